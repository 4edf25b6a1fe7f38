"""Writes tests/data/dspark_*.safetensors: what the reference package `speculators` drafts with tiny random weights.

Needs an environment of its own, since the package asks for an older transformers: `pip install speculators==0.9.0`.
Each file holds a checkpoint in the speculators layout, its target, a text of the target, and for each place of it the
states of the block, the corrected logits behind what was drafted before, the confidences and the greedy draft.

    python tests/make_golden_dspark.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

VOCAB, HIDDEN, LAYERS, BLOCK, PROMPT, PLACES = 64, 32, 4, 5, 6, 40
CASES = {
    "vanilla": {"draft_vocab_size": 48, "sample_from_anchor": True},
    "gated": {"draft_vocab_size": VOCAB, "sample_from_anchor": False},
    "rnn": {"draft_vocab_size": VOCAB, "sample_from_anchor": True},
}


def make_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=LAYERS, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_drafter(kind: str, target: LlamaForCausalLM, folder: str) -> object:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="eager", initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(7)
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=3,
        markov_rank=6,
        markov_head_type=kind,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **CASES[kind],
    )
    drafter = DSparkDraftModel(config).eval()
    if config.draft_vocab_size < VOCAB:
        said = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[said] = True
        drafter.load_vocab_mappings(known, said - torch.arange(len(said)))
        drafter.lm_head.weight.data = target.lm_head.weight.data[said].clone()
    else:
        drafter.lm_head.weight.data = target.lm_head.weight.data.clone()
    drafter.embed_tokens.weight.data = target.model.embed_tokens.weight.data.clone()
    drafter.verifier_lm_head.weight.data = drafter.lm_head.weight.data.clone()
    for name, parameter in drafter.named_parameters():  # what begins as ones, or near zero, would hide its use
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "markov" in name or "confidence" in name:
            parameter.data = 0.7 * torch.randn_like(parameter)
    drafter.save_pretrained(folder)
    return drafter


@torch.no_grad()
def draft(drafter: object, text: Tensor, features: Tensor, place: int) -> dict[str, Tensor]:
    """One round with the token at `place` as anchor."""
    anchor = torch.zeros_like(text)
    anchor[0, place] = 1
    documents = torch.zeros_like(text)
    hidden, logits, _, _, _ = drafter._backbone_forward(
        features, text, anchor, features[..., :HIDDEN], documents, max_anchors=1
    )
    anchored = drafter.config.sample_from_anchor
    before = torch.full((1, BLOCK), int(text[0, place]))  # of slots that are not drafted yet, and not looked at
    tokens, rows = [], []
    for slot in range(0 if anchored else 1, BLOCK):
        bias = drafter.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        corrected = (logits + bias)[0, slot].clone()
        mask = drafter.config.mask_token_id
        ids = torch.arange(len(corrected))
        ids = ids if drafter.d2t is None else ids + drafter.d2t
        corrected[ids == mask] = -torch.inf  # never drafted here
        rows.append(corrected)
        tokens.append(int(ids[corrected.argmax()]))
        if slot + 1 < BLOCK:
            before[0, slot + 1] = tokens[-1]
    read = torch.cat([hidden, drafter.markov_head.prev_embeddings(before)], -1)
    confidence = drafter.confidence_head(read)[0, 0 if anchored else 1 :]
    return {"hidden": hidden[0], "logits": torch.stack(rows), "confidence": confidence, "tokens": torch.tensor(tokens)}


def main() -> None:
    data = Path(__file__).parent / "data"
    target = make_target()
    prompt = torch.tensor([[1, 9, 30, 12, 55, 4]])
    text = target.generate(prompt, max_new_tokens=PLACES + BLOCK, do_sample=False)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[3]], -1)
    for kind in CASES:
        with tempfile.TemporaryDirectory() as folder:
            drafter = make_drafter(kind, target, folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            tensors = {
                f"checkpoint.{name}": value for name, value in load_file(Path(folder) / "model.safetensors").items()
            }
        rounds = [draft(drafter, text, features, place) for place in range(PROMPT, PROMPT + PLACES)]
        for name in rounds[0]:
            tensors[name] = torch.stack([each[name] for each in rounds])
        tensors |= {f"target.{name}": value for name, value in target.state_dict().items()}
        tensors |= {"text": text, "first_place": torch.tensor(PROMPT)}
        described = {"config": json.dumps(config), "target_config": target.config.to_json_string()}
        described["made_with"] = f"speculators {version('speculators')}, torch {torch.__version__}"
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            data / f"dspark_{kind}.safetensors",
            described,
        )
        print(data / f"dspark_{kind}.safetensors", file=sys.stderr)


if __name__ == "__main__":
    main()

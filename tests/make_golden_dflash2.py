"""Writes tests/data/dflash2_*.safetensors: what the reference packages draft with tiny random DFlash 2 weights.

Needs an environment of its own, since they ask for an older transformers: `pip install speculators==0.9.0` and
`pip install --no-deps dflash==0.1.0`. Each file holds a checkpoint in the package's layout, its target, a text of the
target, and for each place of it the corrected logits of the slots' candidates behind what was drafted before (-inf
elsewhere) and the greedy draft. The mask token is never drafted here, and its embedding makes it unlikely there.

    TORCHDYNAMO_DISABLE=1 python -m tests.make_golden_dflash2
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config

from tests.make_golden_dspark import BLOCK, HIDDEN, PLACES, PROMPT, VOCAB, make_target

MASK, TAPS = 3, (1, 3)  # of hidden states: what leaves layers 0 and 2
SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def randomise(drafter: Any) -> None:
    """What begins as ones or zeros would hide its use."""
    torch.manual_seed(7)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "base_kernel" in name:
            parameter.data = torch.zeros_like(parameter)
            parameter.data[:, 0] = 1
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "codebook" in name:
            parameter.data = 0.9 * torch.randn_like(parameter)
        else:
            parameter.data = 0.15 * torch.randn_like(parameter)


def slot_logits(unary: Tensor, score: Any, root: int) -> tuple[Tensor, list[int]]:
    """[slots, vocab] corrected logits and greedy tokens, from those before the selector and its score of candidates."""
    rows, tokens = [], [root]
    for slot, logits in enumerate(unary):
        candidates = logits.topk(SIZES["selector_top_k"]).indices
        corrected = torch.full_like(logits, -torch.inf)
        corrected[candidates] = logits[candidates] + score(slot, tokens[-1], candidates)
        assert int(corrected.argmax()) != MASK
        rows.append(corrected)
        tokens.append(int(corrected.argmax()))
    return torch.stack(rows), tokens[1:]


def make_zlab(target: LlamaForCausalLM, folder: str) -> Any:
    from dflash.model import DFlash2DraftModel

    block = {"mask_token_id": MASK, "target_layer_ids": [0, 2], "output_multiplier": 0.7, "input_embedding_scale": 1.4}
    config = Qwen3Config(
        **LAYER, use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"],
        block_size=BLOCK, num_target_layers=4, is_causal=False, final_logit_softcapping=12.0,
        dflash_config=block | SIZES, architectures=["DFlash2DraftModel"],
    )  # fmt: skip
    drafter = DFlash2DraftModel(config).eval()
    randomise(drafter)
    drafter.save_pretrained(folder)
    return drafter


def draft_zlab(drafter: Any, target: LlamaForCausalLM, text: Tensor, features: Tensor, place: int) -> Any:
    block = torch.full((1, BLOCK), MASK)
    block[0, 0] = text[0, place]
    embedded = torch.nn.functional.embedding(block, target.model.embed_tokens.weight) * 1.4
    positions = torch.arange(place + BLOCK).unsqueeze(0)
    hidden = drafter(position_ids=positions, noise_embedding=embedded, target_hidden=features[:, :place])[:, 1:]
    selector = drafter.candidate_selector
    states = selector.hidden_projection(hidden)[0]

    def score(slot: int, before: int, candidates: Tensor) -> Tensor:
        code = selector.predecessor_codebook(torch.tensor(before)) * states[slot]
        return selector.successor_codebook(candidates) @ code

    logits, tokens = slot_logits(drafter.compute_logits(hidden, target.lm_head)[0], score, int(text[0, place]))
    proposed = drafter.propose(hidden, text[:, place], target.lm_head, 0.0)[0]
    assert proposed[0].tolist() == tokens
    return {"logits": logits, "tokens": torch.tensor(tokens)}


def make_speculators(target: LlamaForCausalLM, folder: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config = DFlash2SpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYER, attn_implementation="eager"),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK,
        sample_from_anchor=True,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash2",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **SIZES,
    )
    drafter = DFlash2DraftModel(config).eval()
    randomise(drafter)
    drafter.embed_tokens.weight.data = target.model.embed_tokens.weight.data.clone()
    drafter.lm_head.weight.data = target.lm_head.weight.data.clone()
    drafter.save_pretrained(folder)
    return drafter


def draft_speculators(drafter: Any, target: LlamaForCausalLM, text: Tensor, features: Tensor, place: int) -> Any:
    anchor = torch.zeros_like(text)
    anchor[0, place] = 1
    hidden, logits, *_ = drafter._backbone_forward(
        features, text, anchor, features[..., :HIDDEN], torch.zeros_like(text), max_anchors=1
    )

    def score(slot: int, before: int, candidates: Tensor) -> Tensor:
        return drafter.candidate_selector.transition_scores(hidden[0, slot], torch.tensor(before), candidates)

    corrected, tokens = slot_logits(logits[0], score, int(text[0, place]))
    return {"logits": corrected, "tokens": torch.tensor(tokens)}


PACKAGES = {
    "zlab": ("dflash", make_zlab, draft_zlab),
    "speculators": ("speculators", make_speculators, draft_speculators),
}


@torch.no_grad()
def main() -> None:
    target = make_target()
    target.lm_head.weight.data[MASK] = 0
    prompt = torch.tensor([[1, 9, 30, 12, 55, 4]])
    text = target.generate(prompt, max_new_tokens=PLACES + BLOCK, do_sample=False)
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[tap] for tap in TAPS], -1)
    for name, (package, make, draft) in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            drafter = make(target, folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            stored = load_file(Path(folder) / "model.safetensors")
        rounds = [draft(drafter, target, text, features, place) for place in range(PROMPT, PROMPT + PLACES)]
        tensors = {f"checkpoint.{key}": value for key, value in stored.items()}
        tensors |= {key: torch.stack([each[key] for each in rounds]) for key in rounds[0]}
        tensors |= {f"target.{key}": value for key, value in target.state_dict().items()}
        tensors |= {"text": text, "first_place": torch.tensor(PROMPT)}
        described = {"config": json.dumps(config), "target_config": target.config.to_json_string()}
        described["made_with"] = f"{package} {version(package)}, torch {torch.__version__}"
        file = Path(__file__).parent / "data" / f"dflash2_{name}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, described)
        print(file.name, len(rounds), "rounds")


if __name__ == "__main__":
    main()

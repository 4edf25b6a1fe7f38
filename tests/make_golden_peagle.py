"""Writes tests/data/peagle.safetensors: what the reference package `speculators` drafts with tiny random weights.

Needs an environment of its own, since the package asks for an older transformers: `pip install speculators==0.9.0`.
The file holds a checkpoint in the speculators layout, its target, a text of the target, and for each place of it, as
the root, the logits of all depths, from the reference's own training forward.

    TORCHDYNAMO_DISABLE=1 python -m tests.make_golden_peagle
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.make_golden_dspark import HIDDEN, PLACES, PROMPT, VOCAB, make_target

DRAFT_VOCAB, DEPTHS = 48, 5


def make_drafter(folder: str) -> object:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.models.peagle.core import PEagleDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="eager", initializer_range=0.3,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    torch.manual_seed(7)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=3,
        norm_before_fc=True,
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    drafter = PEagleDraftModel(config).eval()
    said = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[said] = True
    drafter.load_vocab_mappings(known, said - torch.arange(len(said)))
    for name, parameter in drafter.named_parameters():  # what begins as ones would hide its use
        if "verifier" in name:
            parameter.data = torch.ones_like(parameter)
        else:
            parameter.data = 0.2 * torch.randn_like(parameter) + (parameter.dim() == 1)
    drafter.save_pretrained(folder)
    return drafter


def all_samples(seq_length: int, num_depths: int = DEPTHS, **ignored: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Every depth behind every place, where training takes some of them."""
    found = [(place, depth) for depth in range(num_depths) for place in range(seq_length - depth)]
    places, depths = torch.tensor(found).unbind(1)
    return places, depths


@torch.no_grad()
def main() -> None:
    from speculators.models.peagle import core

    core.generate_cod_sample_indices = all_samples
    core.compute_metrics = lambda **ignored: (torch.zeros(()), {})  # the losses want a GPU
    target = make_target()
    text = target.generate(torch.tensor([[1, 9, 30, 12, 55, 4]]), max_new_tokens=PLACES + DEPTHS, do_sample=False)
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[index] for index in (1, 2, 3)], -1)
    with tempfile.TemporaryDirectory() as folder:
        drafter = make_drafter(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        stored = load_file(Path(folder) / "model.safetensors")
    seen = []
    drafter.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    pairs = text.shape[1] - 1
    drafter(
        features[:, :-1], text[:, 1:], torch.zeros(1, pairs, dtype=torch.int64),
        verifier_last_hidden_states=states[-1][:, :-1], num_depths=DEPTHS,
    )  # fmt: skip
    places, depths = all_samples(pairs)
    logits = torch.full((text.shape[1], DEPTHS, DRAFT_VOCAB), torch.nan)
    logits[places + 1, depths] = seen[0][0]  # a pair at place p - 1 holds the token at p, the root
    tensors = {f"checkpoint.{name}": value for name, value in stored.items()}
    tensors |= {f"target.{name}": value for name, value in target.state_dict().items()}
    tensors |= {"text": text, "first_place": torch.tensor(PROMPT), "logits": logits}
    described = {"config": json.dumps(config), "target_config": target.config.to_json_string()}
    described["made_with"] = f"speculators {version('speculators')}, torch {torch.__version__}"
    file = Path(__file__).parent / "data" / "peagle.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, described)
    print(file)


if __name__ == "__main__":
    main()

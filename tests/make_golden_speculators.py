"""Writes tests/data/{eagle3,dflash}_speculators.safetensors: drafts of the reference package `speculators`.

Needs an environment of its own, since the package asks for an older transformers: `pip install speculators==0.9.0`.
Each file holds a target, a greedy text of it, and per case a checkpoint with tiny random weights, as the reference's
`save_pretrained` wrote it, with the reference's logits and greedy drafts for each place of the text as the root. A
tensor of a case has its name in front; the case's config.json is in the metadata, unchanged.

    TORCHDYNAMO_DISABLE=1 python -m tests.make_golden_speculators
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from tests.make_golden_dspark import HIDDEN, PLACES, PROMPT, VOCAB, make_target

DEPTHS, BLOCK, MASK, DRAFT_VOCAB = 5, 5, 3, 48
# The reference counts a window back from the root, engines (and we) from each slot: here it cuts nothing off.
WINDOW = PROMPT + PLACES + BLOCK


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        layer_class: of the nested config.
        fields: of the speculator's config.
        layer: of the nested config.
        draft_vocab_size: tokens that it can say; the head of a DFlash drafter that can say all is not saved.
    """

    layer_class: type
    fields: dict[str, Any]
    layer: dict[str, Any] = field(default_factory=dict)
    draft_vocab_size: int = DRAFT_VOCAB


EAGLE3 = {
    "raw_residual": Case(LlamaConfig, {"norm_before_residual": False}, {"num_hidden_layers": 1}),
    "normed_residual": Case(
        LlamaConfig,
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen3": Case(
        Qwen3Config, {"norm_before_residual": True, "fc_norm": True}, {"num_hidden_layers": 2}, draft_vocab_size=VOCAB
    ),
}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
DFLASH = {
    "full": Case(Qwen3Config, {}),
    "anchored": Case(
        Qwen3Config,
        {"sample_from_anchor": True},
        {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        draft_vocab_size=VOCAB,
    ),
    "mixed": Case(Qwen3Config, {}, SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
    "sliding_non_causal": Case(
        Qwen3Config, {"sliding_window_non_causal": True}, SLIDING | {"layer_types": ["sliding_attention"] * 2}
    ),
}


def make_drafter(kind: str, case: Case, target: LlamaForCausalLM) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    shape = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    layer = case.layer_class(**shape | case.layer)
    layer._attn_implementation = "eager"
    config_class, model_class, own = {
        "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        "dflash": (
            DFlashSpeculatorConfig,
            DFlashDraftModel,
            {"aux_hidden_state_layer_ids": [1, 3], "block_size": BLOCK, "mask_token_id": MASK},
        ),
    }[kind]
    drafted = DEPTHS if kind == "eagle3" else BLOCK - 1 + case.fields.get("sample_from_anchor", False)
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=case.draft_vocab_size,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafted)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **own,
        **case.fields,
    )
    torch.manual_seed(7)
    drafter = model_class(config).eval()
    if case.draft_vocab_size < VOCAB:
        said = torch.randperm(VOCAB)[: case.draft_vocab_size].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[said] = True
        drafter.load_vocab_mappings(known, said - torch.arange(len(said)))
    for parameter in drafter.parameters():  # what begins as ones would hide its use
        parameter.data = 0.15 * torch.randn_like(parameter) + (parameter.dim() == 1)
    if kind == "dflash":  # the embedding is never saved, the head only for a smaller vocabulary
        drafter.embed_tokens.weight.data = target.model.embed_tokens.weight.data.clone()
        if case.draft_vocab_size == VOCAB:
            drafter.lm_head.weight.data = target.lm_head.weight.data.clone()
    return drafter


def target_ids(drafter: Any) -> Tensor:
    """The target's ids of all draft ids."""
    ids = torch.arange(drafter.config.draft_vocab_size)
    return ids if drafter.d2t is None else ids + drafter.d2t


def draft_eagle3(drafter: Any, text: Tensor, states: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Logits [places, depths, draft vocabulary] and tokens [places, depths], in the target's ids.

    The forward is that of training: step k reads, at each place, the k-th token after the place's own, and attends to
    the pairs of step 0 and to the same place in later steps. Behind the pairs of a text come the tokens drafted so far.
    """
    features = torch.cat([states[index] for index in drafter.target_layer_ids], -1)
    heads = []
    drafter.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(output))
    ids = target_ids(drafter)
    all_logits, all_tokens = [], []
    for place in range(PROMPT, PROMPT + PLACES):
        pairs = torch.nn.functional.pad(features[:, :place], (0, 0, 0, DEPTHS))
        tokens = torch.nn.functional.pad(text[:, 1 : place + 1], (0, DEPTHS))
        for depth in range(DEPTHS):
            heads.clear()
            drafter(pairs, tokens, torch.zeros_like(tokens), ttt_steps=depth + 1)
            tokens[0, place + depth] = ids[heads[-1][0, place - 1].argmax()]
        all_logits.append(torch.stack([each[0, place - 1] for each in heads]))
        all_tokens.append(tokens[0, place:])
    return {"logits": torch.stack(all_logits), "tokens": torch.stack(all_tokens)}


def draft_dflash(drafter: Any, text: Tensor, states: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The same; the one forward fills the blocks of all places, which do not see each other."""
    from speculators.models.dflash import core

    core.compute_metrics = lambda *inputs, **settings: (torch.zeros(()), {})  # the loss is of no interest
    features = torch.cat([states[index] for index in drafter.target_layer_ids], -1)
    anchors = torch.zeros_like(text)
    anchors[0, PROMPT : PROMPT + PLACES] = 1
    heads = []
    drafter.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(output))
    drafter(features, text, anchors, states[-1], torch.zeros_like(text), max_anchors=PLACES)
    logits = heads[0].view(PLACES, BLOCK, -1)[:, 0 if drafter.config.sample_from_anchor else 1 :]
    ids = target_ids(drafter)
    likeliest = logits.masked_fill(ids == MASK, -torch.inf).argmax(-1)  # the mask token is never drafted here
    return {"logits": logits, "tokens": ids[likeliest]}


@torch.no_grad()
def write(kind: str, cases: dict[str, Case], draft: Callable[..., dict[str, Tensor]]) -> None:
    target = make_target()
    text = target.generate(torch.tensor([[1, 9, 30, 12, 55, 4]]), max_new_tokens=PLACES + BLOCK, do_sample=False)
    states = target(text, output_hidden_states=True).hidden_states
    tensors = {f"target.{name}": value for name, value in target.state_dict().items()}
    tensors |= {"text": text, "first_place": torch.tensor(PROMPT)}
    described = {"target_config": target.config.to_json_string(), "cases": json.dumps(list(cases))}
    described["made_with"] = f"speculators {version('speculators')}, torch {torch.__version__}"
    for name, case in cases.items():
        drafter = make_drafter(kind, case, target)
        with tempfile.TemporaryDirectory() as folder:
            drafter.save_pretrained(folder)
            described[f"{name}.config"] = (Path(folder) / "config.json").read_text()
            stored = load_file(Path(folder) / "model.safetensors")
        tensors |= {f"{name}.checkpoint.{key}": value for key, value in stored.items()}
        tensors |= {f"{name}.{key}": value for key, value in draft(drafter, text, states).items()}
    file = Path(__file__).parent / "data" / f"{kind}_speculators.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, described)
    print(file)


if __name__ == "__main__":
    write("eagle3", EAGLE3, draft_eagle3)
    write("dflash", DFLASH, draft_dflash)

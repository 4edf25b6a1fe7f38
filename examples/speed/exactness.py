"""The part `exact`: compares greedy output with plain decoding, and checks whether rounding explains differences.

In float32 every output must be identical. In bfloat16 a forward over a tree rounds differently from a forward over one
token, so that the order of two nearly equal logits can change. `verification.first_difference` defines the bound:
rounding explains a difference if the target's logits of the two tokens differ by at most twice the rounding error. This
error is one unit in the last place (`ulp`) of the best logit, or more if the logits of plain decoding with and without
a cache differ by more at any of up to 32 positions before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.benchmark.variants import Variant
from hf_specdec.methods.medusa import MedusaConfig, MedusaDrafter
from hf_specdec.verification import first_difference

from .scripted import eagle3_network


def untrained(model: PreTrainedModel, tree_budget: int) -> list[Variant]:
    """Drafters with random weights, for methods without a bundled checkpoint: bad drafts, the same verification.

    Args:
        model: the target.
        tree_budget: drafted nodes.
    """
    own = model.config.get_text_config(decoder=True)
    torch.manual_seed(0)
    medusa = MedusaConfig(
        vocab_size=model.get_input_embeddings().num_embeddings, hidden_size=own.hidden_size, own_head=False
    )
    drafters: dict[str, Any] = {"eagle3": eagle3_network(model), "medusa": MedusaDrafter(medusa)}
    return [
        Variant(
            f"{kind}, random weights",
            "drafter",
            drafter=drafter.to(model.device, model.dtype).eval(),
            settings={"tree_budget": tree_budget},
        )
        for kind, drafter in drafters.items()
    ]


def compare(
    model: PreTrainedModel,
    variants: Sequence[Variant],
    modes: Iterable[str],
    groups: Mapping[str, Sequence[Tensor]],
    new_tokens: int,
) -> list[dict[str, Any]]:
    """One row per drafter, mode and group of prompts.

    Args:
        model: the target.
        variants: drafters with their settings.
        modes: values of `compile_mode`.
        groups: prompts [1, seq] int64 by name.
        new_tokens: of each output.

    Returns:
        rows with `identical` (share of prompts), and for each first difference, in units in the last place of the
        best logit: `gap_ulps` between the target's two best tokens, `apart_ulps` between its best token and the
        drafter's, `rounding_ulps`. `above_rounding` counts the differences that rounding does not explain.
    """
    plain: dict[str, list[list[int]]] = {
        group: [_continue(model, prompt, new_tokens) for prompt in prompts] for group, prompts in groups.items()
    }
    rows = []
    for variant in variants:
        assert variant.drafter is not None
        for mode in modes:
            variant.drafter.set_options(**{**variant.settings, "compile_mode": mode})
            for group, prompts in groups.items():
                found = []
                committed = forwards = 0
                for prompt, alone in zip(prompts, plain[group], strict=True):
                    output = _continue(model, prompt, new_tokens, assistant_model=variant.drafter)
                    assert variant.drafter.stats is not None
                    committed += len(output) - 1
                    forwards += variant.drafter.stats.num_target_forwards
                    if output != alone:
                        with torch.no_grad():
                            found.append(first_difference(model, prompt, alone, output))
                rows.append(
                    {
                        "part": "exact",
                        "way": variant.name,
                        "mode": mode,
                        "dtype": str(model.dtype).removeprefix("torch."),
                    }
                    | {"group": group, "prompts": len(prompts), "tau": committed / max(1, forwards)}
                    | {"identical": 1 - len(found) / len(prompts)}
                    | {"gap_ulps": [_finite(each.top2_gap / each.ulp) for each in found]}
                    | {"apart_ulps": [_finite(each.gap / each.ulp) for each in found]}
                    | {"rounding_ulps": [each.rounding / each.ulp for each in found]}
                    | {"above_rounding": sum(not each.is_near_tie for each in found)}
                )
    return rows


def _continue(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **arguments: Any) -> list[int]:
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **arguments)
    return output[0, prompt.shape[1] :].tolist()


def _finite(value: float) -> float | None:
    """None for infinity, which JSON lacks: one output ends where the other continues."""
    return value if math.isfinite(value) else None

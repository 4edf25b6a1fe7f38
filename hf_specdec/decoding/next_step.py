"""What plain decoding gives the target at every step beside tokens, mask and cache: asked of the host itself, once.

Families have rules of their own. PaliGemma counts positions from 1; GPT-2 adds an embedding of the token's type; any
target may take arguments that `generate` hands on from its caller. A round runs several steps in one forward, so it
must give each node what the host would have given the step in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.decoding.host import cache_name, next_inputs
from hf_specdec.decoding.support import TreesRefusedError

# What rounds have answers of their own for.
_OUR_BUSINESS = frozenset(
    {
        "attention_mask", "cache_params", "cache_position", "input_ids", "inputs_embeds", "logits_to_keep",
        "output_attentions", "output_hidden_states", "past_key_values", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip
_CROSS_ATTENDED = ("cross_attention_states", "encoder_hidden_states", "encoder_outputs", "pixel_values")


@dataclass
class NextStep:
    """The step after the prefill; those after it differ from it in their position alone.

    Attributes:
        positions: [batch] int64, the first generated token's; None where the host leaves them to the model.
        token_types: by argument name [batch, 1] int64, the same for all generated tokens.
        switches: further arguments that are no tensors.
    """

    positions: Tensor | None
    token_types: dict[str, Tensor]
    switches: dict[str, Any]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but tokens to be given."""
        return not self.token_types and not self.switches

    def arguments(self, nodes: int) -> dict[str, Any]:
        """Of a forward over `nodes` nodes per row."""
        types = {name: value.expand(-1, nodes) for name, value in self.token_types.items()}
        return types | self.switches

    def of_rows(self, rows: Tensor) -> NextStep:
        """The same for some of the rows: [rows] int64. Positions are not needed any more by then."""
        return NextStep(None, {name: value[rows] for name, value in self.token_types.items()}, self.switches)


def next_step(
    model: PreTrainedModel, outputs: Any, input_ids: Tensor, cache: Cache, model_kwargs: dict[str, Any]
) -> NextStep:
    """Asks the host for the step that it would make after the prefill.

    Args:
        model: the target.
        outputs: of the prefill's last forward.
        input_ids: [batch, seq] int64, the prompt.
        cache: after the prefill.
        model_kwargs: of the `generate` call; left as they are.

    Raises:
        TreesRefusedError: the target is given a tensor at every step that nodes of a tree cannot share.
    """
    batch = len(input_ids)
    longer = torch.cat([input_ids, input_ids.new_zeros(batch, 1)], dim=1)  # whatever the first token will be
    given = next_inputs(model, outputs, longer, dict(model_kwargs, **{cache_name(model): cache}))
    positions = given.get("position_ids")
    others = {name: value for name, value in given.items() if name not in _OUR_BUSINESS and value is not None}
    types = {name: value for name, value in others.items() if name.endswith("token_type_ids")}
    switches = {name: value for name, value in others.items() if isinstance(value, (bool, int, float, str))}
    unknown = sorted(others.keys() - types.keys() - switches.keys())
    if positions is not None and positions.dim() != 2:
        unknown.append("position_ids of several axes")
    if unknown:
        raise TreesRefusedError(
            f"Target {type(model).__name__} is given {unknown} at every step of decoding, and how the nodes of a draft "
            "tree would share that is not known"
        )
    return NextStep(
        None if positions is None else positions[:, -1].expand(batch),
        {name: value[:, -1:].expand(batch, 1) for name, value in types.items()},
        switches,
    )


def check_attended(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raises TreesRefusedError if layers of the target would attend to something beside the text."""
    config = model.config.get_text_config(decoder=True)
    given: Sequence[str] = [name for name in _CROSS_ATTENDED if model_kwargs.get(name) is not None]
    if given and (getattr(config, "cross_attention_layers", None) or getattr(config, "add_cross_attention", False)):
        raise TreesRefusedError(
            f"Target {type(model).__name__} was given {', '.join(given)} for its layers with cross-attention, which "
            "draft trees are not verified on"
        )

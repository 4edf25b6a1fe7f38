"""The arguments of a decoding step besides tokens, mask and cache, found by calling transformers' own code once.

Families differ: PaliGemma counts positions from 1; GPT-2 adds an embedding of the token type; any target may get
arguments that `generate` passes on from its caller. A round runs several steps in one forward, so each node must get
the arguments that transformers would have passed in that step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_specdec.decoding.once import REFUSED_RUN, once_per_model, undisturbed
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.decoding.targets.support import TreesRefusedError, bound_rows
from hf_specdec.decoding.upstream import CACHE_NAMES, arguments_of_prompt, cache_name, next_inputs, prefill

# Arguments that rounds set themselves.
_SET_BY_ROUNDS = frozenset(
    {
        *CACHE_NAMES, "attention_mask", "cache_position", "input_ids", "inputs_embeds", "logits_to_keep",
        "output_attentions", "output_hidden_states", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip
_CROSS_ATTENDED = ("cross_attention_states", "encoder_hidden_states", "encoder_outputs", "pixel_values")


@dataclass
class NextStep:
    """Arguments of the step after the prefill; later steps differ only in their positions.

    Attributes:
        positions: [batch] int64, of the first generated token, on the first axis; None if transformers passes none.
        token_types: by argument name [batch, 1] int64, the same for all generated tokens.
        switches: other arguments, which are not tensors.
        axes: [axes, batch, 1] int64, what each axis of the positions adds to the first one; None if there are no axes.
            After a prompt with pictures the axes of a row differ, but from then on each grows by 1 per token.
    """

    positions: Tensor | None
    token_types: dict[str, Tensor]
    switches: dict[str, Any]
    axes: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a step needs no other arguments."""
        return not self.token_types and not self.switches and self.axes is None

    def arguments(self, nodes: int) -> dict[str, Any]:
        """The arguments of a forward over `nodes` nodes per row."""
        types = {name: value.expand(-1, nodes) for name, value in self.token_types.items()}
        return types | self.switches

    def on_axes(self, position_ids: Tensor) -> Tensor:
        """Positions [batch, nodes] on the first axis -> [axes, batch, nodes]; unchanged if there are no axes."""
        return position_ids if self.axes is None else position_ids + self.axes

    def of_rows(self, rows: Tensor) -> NextStep:
        """Selects rows, [rows] int64. Positions are no longer needed when rows are dropped."""
        types = {name: value[rows] for name, value in self.token_types.items()}
        return NextStep(None, types, self.switches, None if self.axes is None else self.axes[:, rows])


def next_step(
    model: PreTrainedModel, outputs: Any, input_ids: Tensor, cache: Cache, model_kwargs: dict[str, Any]
) -> NextStep:
    """The arguments that transformers would pass in the step after the prefill.

    Args:
        model: the target.
        outputs: of the prefill's last forward.
        input_ids: [batch, seq] int64, the prompt.
        cache: after the prefill.
        model_kwargs: of the `generate` call; not changed.

    Raises:
        TreesRefusedError: an argument is a tensor that has an effect, and it is unknown what the nodes of a tree need.
    """
    batch = len(input_ids)
    longer = torch.cat([input_ids, input_ids.new_zeros(batch, 1)], dim=1)  # any token in place of the first new one
    inputs = next_inputs(model, outputs, longer, dict(model_kwargs, **{cache_name(model): cache}))
    positions = inputs.get("position_ids")
    others = {name: value for name, value in inputs.items() if name not in _SET_BY_ROUNDS and value is not None}
    types = {name: value for name, value in others.items() if name.endswith("token_type_ids")}
    switches = {name: value for name, value in others.items() if isinstance(value, (bool, int, float, str))}
    unknown = sorted(
        name for name in others.keys() - types.keys() - switches.keys() if not _is_ignored(model, name, others[name])
    )
    axes = None
    if positions is not None and positions.dim() == 3:
        last = positions[..., -1:].expand(-1, batch, 1)
        axes, positions = last - last[:1], positions[0]
    elif positions is not None and positions.dim() != 2:
        unknown.append(f"position_ids of shape {list(positions.shape)}")
    if unknown:
        raise TreesRefusedError(
            f"Target {type(model).__name__} gets {unknown} in every decoding step, and it is not known what the nodes "
            "of a draft tree need"
        )
    return NextStep(
        None if positions is None else positions[:, -1].expand(batch),
        {name: value[:, -1:].expand(batch, 1) for name, value in types.items()},
        switches,
        axes,
    )


def _is_ignored(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument changes nothing in a decoding step, such as the mask of sound in the prompt."""
    found = _ignored_arguments(model)
    if name not in found:
        try:
            found[name] = isinstance(value, Tensor) and _has_no_effect(model, name, value)
        except REFUSED_RUN:  # no step without the others
            found[name] = False
    return found[name]


@once_per_model
def _ignored_arguments(model: PreTrainedModel) -> dict[str, bool]:
    """By name, filled by `_is_ignored`."""
    return {}


@torch.no_grad()
def _has_no_effect(model: PreTrainedModel, name: str, value: Tensor) -> bool:
    """Runs a step after a short text with this value, with others of its shape, and without: the same bits or not."""
    ids = (3 + torch.arange(5, device=home_of(model.get_input_embeddings()))) % num_tokens(model)
    ids = ids.expand(bound_rows(model) or 1, -1)
    with undisturbed(model):
        arguments = arguments_of_prompt(model, ids, torch.ones_like(ids))
        outputs = prefill(model, ids, GenerationConfig(), dict(arguments))
        inputs = next_inputs(model, outputs, torch.cat([ids, ids[:, :1]], 1), arguments)

        def logits(**more: Tensor) -> Tensor:
            own = {cache_name(model): copy.deepcopy(inputs[cache_name(model)])}
            found: Tensor = model(**{**inputs, **own, **more}, return_dict=True).logits
            return found

        some = torch.rand(value.shape, generator=torch.Generator().manual_seed(0), device="cpu") < 0.5
        others = [value, torch.zeros_like(value), some.to(value)]
        without = logits()
        return all(logits(**{name: other}).equal(without) for other in others)


def refuse_cross_attention(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raises TreesRefusedError if layers of the target would attend to something besides the text."""
    config = model.config.get_text_config(decoder=True)
    given: Sequence[str] = [name for name in _CROSS_ATTENDED if model_kwargs.get(name) is not None]
    if given and (getattr(config, "cross_attention_layers", None) or getattr(config, "add_cross_attention", False)):
        raise TreesRefusedError(
            f"Target {type(model).__name__} got {', '.join(given)} for its cross-attention layers, and draft trees "
            "cannot be verified with cross-attention"
        )

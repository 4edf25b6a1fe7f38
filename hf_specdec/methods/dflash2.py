"""DFlash 2: DFlash with convolutions over the slots of its block, and a selector conditioned on the previous token.

Each sublayer of a draft layer is between two causal convolutions over the block, whose kernels depend on the slot. The
selector then rescores each slot's likeliest tokens, conditioned on the token drafted before. The config is DFlash's, in
z-lab's layout, with more fields; a `generate` call is DSpark's (`dspark.py`). Source: shared facts on formats of 2026,
sections 1.1 to 1.3; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from hf_specdec.decoding.targets.modules import apply_head, table_rows
from hf_specdec.drafting.draft_logits import SoftCapLogitsProcessor, TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import Slots
from hf_specdec.drafting.registry import register
from hf_specdec.drafting.vocabulary import known_ids
from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, once
from hf_specdec.hub.formats.keys import Section, decoder
from hf_specdec.hub.formats.speculators import section, speculators
from hf_specdec.methods.dflash.layouts import (
    BLOCK_KEYS,
    BLOCK_SERVING,
    ZLAB,
    block_config,
    read_speculators_dflash,
    read_zlab,
)
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashLayer, block_field
from hf_specdec.methods.dspark import ConditionalDrafter, DSparkOptions

TREE, CHAIN = "dflash2", "dflash2_chain"


@strict
class DFlash2Config(DFlashConfig):
    """A `DFlashConfig` whose `dflash_config` has DFlash 2's own fields.

    `conv_kernel_size` (slots that a convolution reads) and `conv_group_size` (channels that share a kernel's dynamic
    part), `selector_rank` and `selector_top_k` (width of the selector, and candidates of a slot), `output_multiplier`
    (of the head's logits, before their cap) and `input_embedding_scale` (of the block's unscaled embeddings).
    """

    architecture: ClassVar[str | None] = "DFlash2DraftModel"

    def check(self) -> None:
        super().check()
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        self.check_sizes(*sizes, where=" in this DFlash 2 config")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size} in this DFlash 2 config, which does not divide hidden_size "
                f"{self.hidden_size}. Correct the wrong one."
            )
        if self.vocab_size is None or self.maps_vocabulary or self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, draft_vocab_size {self.draft_vocab_size} and selector_top_k "
                f"{self.selector_top_k} in this DFlash 2 config: its selector chooses from the target's complete "
                "vocabulary, whose size vocab_size must state."
            )

    conv_kernel_size = block_field("conv_kernel_size")
    conv_group_size = block_field("conv_group_size")
    selector_rank = block_field("selector_rank")
    selector_top_k = block_field("selector_top_k")
    output_multiplier = block_field("output_multiplier", 1.0)
    input_embedding_scale = block_field("input_embedding_scale", 1.0)


@dataclass(slots=True, kw_only=True)
class DFlash2Options(DSparkOptions):
    """Drafting options of a DFlash 2 drafter.

    Attributes:
        method: `"dflash2"` for the best-first tree, `"dflash2_chain"` for one path, as published; it is sampled in
            calls that sample.
        tree_budget: see `DSparkOptions`.
        block_size: see `DSparkOptions`.
    """

    METHODS = (TREE, CHAIN)

    method: str = TREE


class BlockConvolution(nn.Module):
    """Two causal convolutions over the slots of a block: before a sublayer, and after it.

    Both kernels have a fixed part and one that is computed from the sublayer's input at each slot, per channel group.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.kernel_size, self.group_size = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.kernel_size * groups, bias=False)

    def kernels(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, block, hidden] -> both kernels, each [batch, block, kernel, hidden]."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, -1))
        both = self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)
        return both[:, :, 0], both[:, :, 1]

    def forward(self, hidden: Tensor, kernel: Tensor) -> Tensor:
        """[batch, block, hidden] -> the same; zeros come before the first slot."""
        block = hidden.shape[1]
        padded = nn.functional.pad(hidden, (0, 0, self.kernel_size - 1, 0))
        taps = [padded[:, self.kernel_size - 1 - back :][:, :block] for back in range(self.kernel_size)]
        return (torch.stack(taps, dim=2) * kernel).sum(2)


class DFlash2Layer(DFlashLayer):
    """A DFlash layer whose sublayers are between convolutions over the block; the context is not convolved."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, block: Tensor, context: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, block, hidden] -> [batch, block, hidden]."""
        normed = self.input_layernorm(block)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(self.attention_conv(normed, before), context, *attention_inputs)
        block = block + self.attention_conv(attended, after)
        normed = self.post_attention_layernorm(block)
        before, after = self.mlp_conv.kernels(normed)
        return block + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after)


class CandidateSelector(nn.Module):
    """Scores of a slot's candidates after the previous token, from both tokens' codes and the slot's state."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k: int = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, token_ids: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Scores that are added to the candidates' logits.

        Args:
            token_ids: [batch, nodes] int64, the previous tokens; may include tokens that the table lacks.
            hidden: [batch, hidden], the slot's state.
            candidates: [batch, top_k] int64, of the slot.

        Returns:
            [batch, nodes, top_k].
        """
        before = self.predecessor_codebook[known_ids(token_ids, len(self.predecessor_codebook))]
        code = before * self.hidden_projection(hidden).unsqueeze(1)
        return code @ self.successor_codebook[candidates].transpose(1, 2)


class SelectorSlots(Slots):
    """The slots of one round's block, for use in order."""

    def __init__(self, selector: CandidateSelector, states: Tensor, logits: Tensor) -> None:
        self.selector, self.states, self.logits = selector, states, logits
        self.depth = states.shape[1]
        self.unary, self.candidates = logits.topk(selector.top_k, dim=-1)

    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[batch, nodes] int64 tokens before a slot -> its [batch, nodes, vocab] logits, -inf except at candidates."""
        candidates = self.candidates[:, slot]
        scores = self.selector(token_ids, self.states[:, slot], candidates).float() + self.unary[:, slot, None]
        slot_logits = scores.new_full((*token_ids.shape, self.logits.shape[-1]), -torch.inf)
        return slot_logits.scatter(-1, candidates.unsqueeze(1).expand_as(scores), scores), state


class DFlash2Drafter(ConditionalDrafter):
    """A DFlash 2 checkpoint as a drafter: `method="dflash2"` drafts the best-first tree, `"dflash2_chain"` one path.

    Drafting options: `DFlash2Options`.
    """

    config_class = DFlash2Config
    config: DFlash2Config
    options_class = DFlash2Options
    layer_class = DFlash2Layer
    card_summary = (
        "A DFlash 2 drafter: it fills a block of masked slots in one forward, from the hidden states of the "
        "target, and rescores each slot's likeliest tokens given the token drafted before it. hf_specdec drafts "
        'with it either the likeliest tree (`method="dflash2"`, the default) or one chain '
        '(`method="dflash2_chain"`).'
    )

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):  # initially equal to a DFlash layer
            module.base_kernel.data.zero_()
            module.base_kernel.data[:, 0] = 1
            module.kernel_projection.weight.data.zero_()
        elif isinstance(module, CandidateSelector):
            for codebook in (module.predecessor_codebook, module.successor_codebook):
                codebook.data.normal_(std=self.config.initializer_range)

    def embed(self, block_ids: Tensor, embed_tokens: nn.Module) -> Tensor:
        # The table itself, without the scale or norm of the target's own embedding.
        return table_rows(embed_tokens, block_ids) * self.config.input_embedding_scale

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        raise ValueError(
            f"draft_vocab was given for {type(self).__name__}, whose selector compares tokens of the whole vocabulary: "
            "leave it out."
        )

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        """[..., hidden] after the final norm -> [..., vocab] float32, -inf except at the `selector_top_k` likeliest."""
        logits = apply_head(lm_head, hidden) * self.config.output_multiplier
        logits = SoftCapLogitsProcessor(self.config.final_logit_softcapping)(None, logits)
        logits = TargetVocabularyLogitsProcessor(self.config.vocab_size)(None, logits)
        likeliest = logits.topk(self.config.selector_top_k, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> SelectorSlots:
        """See `ConditionalDrafter.slots`."""
        return SelectorSlots(self.candidate_selector, states[:, self.config.first_slot :], logits)

    def card_facts(self) -> dict[str, str]:
        config, facts = self.config, super().card_facts()
        facts["Method"] = f"{self.loaded_options().method}, on a DFlash 2 drafter"
        facts["Selector"] = f"rank {config.selector_rank}, {config.selector_top_k} candidates a slot"
        return facts


CONVOLUTIONS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_KEYS = (*CONVOLUTIONS, "output_multiplier", "input_embedding_scale")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def is_dflash2(fields: Config) -> bool:
    """Whether a `config.json` has z-lab's layout of DFlash 2."""
    named = any("DFlash2" in name for name in fields.get("architectures") or ())
    return named or bool({"selector_rank", "conv_kernel_size"} & {*fields, *(fields.get("dflash_config") or ())})


def read_dflash2(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash 2 drafter in z-lab's layout.

    Raises:
        ValueError: a key is in two places, with different values.
    """
    nested = dict(fields.get("dflash_config") or {})
    block = {key: once(fields, nested, key) for key in _KEYS}
    cap = once(fields, nested, "final_logit_softcapping")
    nested |= {key: value for key, value in block.items() if value is not None}
    nested.pop("final_logit_softcapping", None)
    rest = {key: value for key, value in fields.items() if key not in _KEYS}
    rest |= {"dflash_config": nested, "final_logit_softcapping": cap if cap is not None and cap > 0 else None}
    reading = read_zlab(rest, stored)
    # Some checkpoints have the codebooks as embedding modules.
    tables = {f"{codebook}.weight": codebook for codebook in _CODEBOOKS}
    return Reading(reading.fields, {name: tables.get(ours, ours) for name, ours in reading.names.items()})


def _with_keys(section: Section, *further: str) -> Section:
    """A section of DFlash's layout with the additional keys."""
    only = {key: values for key, values in section.only.items() if key not in _KEYS}
    return replace(section, read=section.read.union(_KEYS, further), only=only)


_zlab = ZLAB.keys


assert _zlab is not None


_block = _with_keys(_zlab.nested["dflash_config"], "final_logit_softcapping")
DFLASH2 = Format(
    "DFlash 2",
    "dflash2",
    read_dflash2,
    replace(_with_keys(_zlab), nested={**_zlab.nested, "dflash_config": _block}),
    refused=ZLAB.refused,
    recognises=is_dflash2,
    rank=30,
)
# Of the training class.
DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def read_speculators_dflash2(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash 2 drafter in the speculators layout."""
    given = {"sliding_window_non_causal": True} | DFLASH2_DEFAULTS | fields
    reading = read_speculators_dflash(given, stored)
    block = reading.fields["dflash_config"] | {key: given[key] for key in CONVOLUTIONS}
    return Reading(reading.fields | {"dflash_config": block}, reading.names)


def write_dflash2(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DFlash2Drafter` whose config has these fields; arguments as for `write_eagle3`."""
    block = fields["dflash_config"]
    for key in ("output_multiplier", "input_embedding_scale"):
        if block.get(key, 1) != 1:
            raise ValueError(f"{key} is {block[key]!r}, and this layout has no field for it.")
    config = block_config("dflash2", "DFlash2DraftModel", fields, target)
    return config | {key: block[key] for key in CONVOLUTIONS}


SPECULATORS_DFLASH2 = speculators(
    "dflash2",
    "DFlash 2",
    read_speculators_dflash2,
    write_dflash2,
    section(*BLOCK_KEYS, *CONVOLUTIONS, layer=decoder("is_causal")),
)


register("dflash2", DFlash2Drafter, layouts=(DFLASH2, SPECULATORS_DFLASH2), serving=BLOCK_SERVING)

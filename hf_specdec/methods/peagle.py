"""P-EAGLE: EAGLE-3's layers drafting all depths in one forward, with a learned state in place of unknown ones.

Placeholder pairs, each of the mask token and the learned state, follow the committed pairs. One forward reads all: the
last committed pair predicts the first token, each placeholder one more. Drafted tokens are not fed back, so the result
is marginals per position, from which `ddtree` builds trees. Source: P-EAGLE, arXiv 2602.01469; shared facts on formats
of 2026, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.masks import additive
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.drafter import BlockMarginals
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.reader import behind_committed
from hf_specdec.drafting.registry import MARGINAL_METHODS, Serving, register
from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, architecture, check_vocabulary_maps, once
from hf_specdec.hub.formats.keys import Section, decoder
from hf_specdec.hub.formats.speculators import envelope, section, speculators
from hf_specdec.methods.eagle3.drafting import PairReader
from hf_specdec.methods.eagle3.layouts import (
    EAGLE3_FLAGS,
    EAGLE_CONFIG,
    read_specforge,
    read_speculators_eagle3,
    write_eagle3,
)
from hf_specdec.methods.eagle3.network import Eagle3Config, Eagle3Network


@strict
class PEagleConfig(Eagle3Config):
    """An `Eagle3Config` with the placeholders for unknown tokens.

    Args:
        mask_token_id: token of a placeholder pair.
        num_draft_tokens: tokens that it drafts in one forward.
    """

    model_type = "hf_specdec_peagle"

    mask_token_id: int | None = None
    num_draft_tokens: int = 8

    def check(self) -> None:
        super().check()
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id!r}; a P-EAGLE drafter needs the id of its placeholder token, "
                f"from 0 to {self.vocab_size - 1}. Some trainers do not write it: add the id used at training to its "
                "config.json."
            )
        self.check_sizes("num_draft_tokens")


@dataclass(slots=True, kw_only=True)
class PEagleOptions(TreeOptions):
    """Drafting options of a P-EAGLE drafter.

    Attributes:
        method: `"ddtree"`, or any other method that drafts from per-position marginals.
        tree_budget: see `TreeOptions`. An integer does not affect chains (`"dflash"`).
    """

    METHODS = MARGINAL_METHODS

    method: str = "ddtree"


class PEagleDrafter(Eagle3Network):
    """A P-EAGLE checkpoint as a drafter.

    Drafting options: `PEagleOptions`.
    """

    config_class = PEagleConfig
    config: PEagleConfig
    options_class = PEagleOptions
    options: PEagleOptions
    card_summary = (
        "A P-EAGLE drafter: it drafts several tokens in one forward, from fused hidden states of the target and a "
        "learned state in place of those that do not exist yet. hf_specdec builds draft trees from its predictions."
    )

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        # In place of the concatenated states, before the norms around `fc`.
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_taps * config.target_hidden_size))

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return MARGINAL_METHODS[self.method](PEagleMarginals(self, target), self.options)

    def card_facts(self) -> dict[str, str]:
        return super().card_facts() | {"Tokens drafted in one forward": str(self.config.num_draft_tokens)}


class PEagleMarginals(PairReader, BlockMarginals):
    """Per-position logits, from each row's last pair and the placeholders after it.

    The pairs are appended to the cache in one forward, and the placeholders are read in a second one. Because attention
    is causal, the result equals the paper's single forward, and the cache contains no placeholders.
    """

    def __init__(self, drafter: PEagleDrafter, target: TargetModel) -> None:
        self.further = drafter.config.num_draft_tokens - 1
        super().__init__(drafter, target, depth=1 + self.further, room=self.further)

    @in_inference_mode
    def marginals(self, context: DraftContext) -> Tensor:
        outputs = self.read_pairs(context.root_ids)
        return self.run(_marginals, outputs, context.root_positions.to(self.device), self.cache.lengths)[0]


def _marginals(
    at: int, reader: PEagleMarginals, outputs: Tensor, root_positions: Tensor, lengths: Tensor
) -> tuple[Tensor]:
    """[batch, depth, vocab] float32 logits, from [batch, 1, hidden] outputs at the last pairs."""
    drafter, further, (batch, _, hidden) = reader.drafter, reader.further, outputs.shape
    config = drafter.config
    if further:
        order = torch.arange(further, device=outputs.device)
        causal = (order.unsqueeze(1) >= order).expand(batch, -1, -1)
        with reader.cache.writing_after(0):
            placeholders = drafter(
                reader.embed(order.new_full((batch, further), config.mask_token_id)),
                drafter.fuse(drafter.mask_hidden).expand(batch, further, hidden),
                root_positions.unsqueeze(1) + order,
                mask=additive(behind_committed(causal, at, lengths), reader.dtype),
                cache=reader.cache,
            )
        outputs = torch.cat([outputs, placeholders], dim=1)
    logits: Tensor = drafter.logits(outputs)
    if config.maps_vocabulary:
        ids = drafter.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))
        logits = TargetVocabularyLogitsProcessor(config.vocab_size, ids)(None, logits)
    return (logits,)


def peagle_reading(reading: Reading, fields: Config) -> Reading:
    """Adds the fields of a P-EAGLE drafter; `PEagleConfig` checks for a missing mask token.

    Raises:
        ValueError: the mask token is in two places, with different values, or the first proposal method has no
            `speculative_tokens`.
    """
    own = {"mask_token_id": once(fields, fields.get("dflash_config") or {}, "mask_token_id")}
    methods: Any = (fields.get("speculators_config") or {}).get("proposal_methods")
    if methods:
        if not isinstance(methods, list) or not isinstance(methods[0], dict) or "speculative_tokens" not in methods[0]:
            raise ValueError(f"proposal_methods is {methods!r}; its first entry must have speculative_tokens.")
        own |= {"num_draft_tokens": methods[0]["speculative_tokens"]}
    return Reading(reading.fields | own, reading.names)


def read_specforge_peagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of SpecForge's P-EAGLE drafter."""
    return peagle_reading(read_specforge(fields, stored), fields)


SPECFORGE_PEAGLE = Format(
    "P-EAGLE (SpecForge)",
    "peagle",
    read_specforge_peagle,
    decoder(
        "draft_vocab_size", "fc_norm", "mask_token_id", "norm_output", "target_hidden_size",
        idle=EAGLE_CONFIG["idle"],
        nested={**EAGLE_CONFIG["nested"], "dflash_config": Section(read=frozenset(("mask_token_id",)))},
    ),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=architecture("PEagle"),
    rank=60,  # its configs have a dflash_config, as those of the next ones
)  # fmt: skip


def read_speculators_peagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a P-EAGLE drafter in the speculators layout."""
    return peagle_reading(read_speculators_eagle3(fields, stored), fields)


def write_peagle(fields: Config, target: Config) -> Config:
    """The `config.json` for a `PEagleDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    if fields["fc_norm"]:
        raise ValueError("fc_norm is true, and vLLM does not read it for P-EAGLE drafters.")
    tokens = fields["num_draft_tokens"]
    about = envelope("peagle", fields, target, "PEagleSpeculator", speculative_tokens=tokens)
    return write_eagle3(fields, target) | about | {"mask_token_id": fields["mask_token_id"]}


SPECULATORS_PEAGLE = speculators(
    "peagle",
    "P-EAGLE",
    read_speculators_peagle,
    write_peagle,
    section("eagle_aux_hidden_state_layer_ids", "mask_token_id", *EAGLE3_FLAGS, layer=decoder()),
)


register(
    "peagle",
    PEagleDrafter,
    layouts=(SPECFORGE_PEAGLE, SPECULATORS_PEAGLE),
    serving=Serving(
        "eagle3",
        tokens=lambda drafter: drafter.config.num_draft_tokens,
        settings=lambda drafter: {"parallel_drafting": True},
    ),
)

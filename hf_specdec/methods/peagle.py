"""P-EAGLE: EAGLE-3's layers drafting all depths in one forward, with a learned state in place of unknown ones.

Placeholder pairs, each of the mask token and the learned state, follow the committed pairs. One forward reads all: the
last committed pair predicts the first token, each placeholder one more. Drafted tokens are not fed back, so the result
is marginals per position, from which `ddtree` builds trees. Source: P-EAGLE, arXiv 2602.01469; shared facts on formats
of 2026, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from hf_specdec.hub.formats.specforge import SPECFORGE_PEAGLE
from hf_specdec.hub.formats.speculators import SPECULATORS_PEAGLE
from hf_specdec.methods.eagle3 import Eagle3Config, Eagle3Network, PairReader

__all__ = ["PEagleConfig", "PEagleDrafter", "PEagleOptions"]


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

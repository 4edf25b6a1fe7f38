"""PEagleDrafter: EAGLE-3's layers, with a learned state in place of target states that do not exist yet.

Placeholder pairs, each of the mask token and the learned state, follow the committed pairs. One forward reads all: the
last committed pair predicts the first token, each placeholder one more. Drafted tokens are not fed back, so the result
is marginals per position, from which `ddtree` builds trees. Source: P-EAGLE, arXiv 2602.01469; shared facts on formats
of 2026, section 4.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.eagle3.modeling import Eagle3Network
from hf_specdec.drafters.peagle.configuration import PEagleConfig, PEagleOptions
from hf_specdec.drafters.registry import MARGINAL_METHODS


class PEagleDrafter(Eagle3Network):
    """A P-EAGLE checkpoint as a drafter.

    Drafting options: `PEagleOptions`.
    """

    config_class = PEagleConfig
    config: PEagleConfig
    options_class = PEagleOptions
    options: PEagleOptions

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        # In place of the concatenated states, before the norms around `fc`.
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_taps * config.target_hidden_size))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(MARGINAL_METHODS)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.peagle.candidates import PEagleMarginals

        return MARGINAL_METHODS[self.method](PEagleMarginals(self, target), self.options)

    def card_summary(self) -> str:
        return (
            "A P-EAGLE drafter: it drafts several tokens in one forward, from fused hidden states of the target and a "
            "learned state in place of those that do not exist yet. hf_specdec builds draft trees from its predictions."
        )

    def card_facts(self) -> dict[str, str]:
        return super().card_facts() | {"Tokens drafted in one forward": str(self.config.num_draft_tokens)}

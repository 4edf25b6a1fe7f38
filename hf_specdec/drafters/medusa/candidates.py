"""Medusa in one `generate` call: remembers each row's last target state, and asks the heads about it once a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.decoding.candidates import DraftContext, RoundOutcome
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import from_host
from hf_specdec.drafters.base import BlockMarginals
from hf_specdec.drafters.medusa.modeling import MedusaDrafter


class MedusaMarginals(BlockMarginals):
    """Per-position logits of all heads, from the target's state at the last token before the root."""

    def __init__(self, drafter: MedusaDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.lm_head = target.model.get_output_embeddings()
        self.last_states: Tensor | None = None  # [batch, hidden]

    def observe(self, outcome: RoundOutcome) -> None:
        features = outcome.features
        assert features is not None, "the target's last state is tapped"
        batch, new, _ = features.shape
        last = torch.full((batch,), new - 1, device=features.device)
        if outcome.valid is not None:
            last = (outcome.valid.to(features.device) * torch.arange(new, device=features.device)).amax(1)
        states = features[torch.arange(batch, device=features.device), last]
        if self.last_states is not None and 0 in outcome.num_committed:
            moved = from_host(outcome.num_committed, features.device) > 0
            states = states.where(moved.unsqueeze(1), self.last_states)
        self.last_states = states

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.last_states = None if self.last_states is None else self.last_states[list(rows)]

    @torch.inference_mode()
    def marginals(self, context: DraftContext) -> Tensor:
        assert self.last_states is not None, "draft() before the prefill was observed"
        states = self.last_states.to(device=self.drafter.device, dtype=self.drafter.dtype)
        return self.drafter(states, self.lm_head)

"""P-EAGLE in one `generate` call: the marginals of all depths, from placeholders after the committed pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import DraftContext
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import BlockMarginals
from hf_specdec.drafters.eagle3.pairs import PairCache
from hf_specdec.drafters.peagle.modeling import PEagleDrafter


class PEagleMarginals(PairCache, BlockMarginals):
    """Per-position logits, from each row's last pair and the placeholders after it.

    The pairs are appended to the cache in one forward, and the placeholders are read in a second one. Because attention
    is causal, the result equals the paper's single forward, and the cache contains no placeholders.
    """

    def __init__(self, drafter: PEagleDrafter, target: TargetModel) -> None:
        self.further = drafter.config.num_draft_tokens - 1
        # Not captured, because the forward over the placeholders is not.
        super().__init__(drafter, target, depth=1 + self.further, room=self.further, compile_mode="none")

    @in_inference_mode
    def marginals(self, context: DraftContext) -> Tensor:
        drafter = self.drafter
        outputs = self.append_pairs(context.root_ids).unsqueeze(1)
        cache = self.cache
        assert cache is not None
        if self.further:
            batch, device = len(outputs), outputs.device
            indices = torch.arange(self.further, device=device)
            with cache.writing_after(0):
                placeholders = drafter(
                    self.embed(torch.full((batch, self.further), drafter.config.mask_token_id, device=device)),
                    drafter.fuse(drafter.mask_hidden).expand(batch, self.further, -1),
                    context.root_positions.to(device).unsqueeze(1) + indices,
                    mask=self.additive(
                        (indices.unsqueeze(1) >= indices).expand(batch, -1, -1), cache.longest, cache.lengths
                    ),
                    cache=cache,
                )
            outputs = torch.cat([outputs, placeholders], dim=1)
        logits: Tensor = drafter.logits(outputs)
        if drafter.config.maps_vocabulary:
            ids = torch.arange(logits.shape[-1], device=logits.device)
            logits = TargetVocabularyLogitsProcessor(drafter.config.vocab_size, drafter.to_target_ids(ids))(
                None, logits
            )
        return logits

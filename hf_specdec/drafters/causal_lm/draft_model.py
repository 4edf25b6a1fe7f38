"""DraftModel: a draft model in one `generate` call, run as the target is, but in the target's tokens.

The tables of the two may differ in size (`drafters/vocabulary.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding.graphs import CompileMode
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.vocabulary import known_ids


class DraftModel(TargetModel):
    """A draft model bound to one `generate` call of the target.

    Attributes:
        vocab_size: columns of the target's logits, to be set after its prefill: `verify` gives as many.

    Raises:
        ValueError: as `TargetModel`.
    """

    def __init__(self, model: PreTrainedModel, *, compile_mode: CompileMode = "none") -> None:
        super().__init__(model, compile_mode=compile_mode)
        self.num_rows: int = model.get_input_embeddings().num_embeddings
        self.vocab_size = self.num_rows

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> TargetOutput:
        return super().prefill(known_ids(input_ids, self.num_rows), generation_config, model_kwargs)

    def prefill_for_drafting(self, token_ids: Tensor, mask: Tensor | None, max_length: int) -> None:
        """`prefill` of a draft model, where padding is run behind the text, and its entries in the cache are zeros.

        On the left, padding has nothing to see. Eager attention in float64 gives NaN there, and one layer later to all
        tokens of the row. A target must do what the host does; a draft model need not.

        Args:
            token_ids: [batch, seq] int64.
            mask: [batch, seq] bool, False at padding; None where there is none.
            max_length: most tokens that a text may have.
        """
        order = None
        if mask is not None and not bool(mask.all()):
            order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
            token_ids = token_ids.gather(1, order)
        self.prefill_alone(token_ids, max_length)
        if mask is not None and order is not None:
            mask = mask.to(self.position_offset.device)
            self.cache.spread(order, mask)
            self.position_offset = self.position_offset - (~mask).sum(1)
            self.set_prompt_mask(mask)

    def verify(self, tree: DraftTree, root_positions: Tensor, **settings: Any) -> TargetOutput:
        if self.vocab_size > self.num_rows:  # else all that the target can choose has a row
            tree = replace(tree, token_ids=known_ids(tree.token_ids, self.num_rows))
        output = super().verify(tree, root_positions, **settings)
        output.logits = TargetVocabularyLogitsProcessor(self.vocab_size)(None, output.logits)
        return output

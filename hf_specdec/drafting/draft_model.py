"""DraftModel: a draft model in one `generate` call. It runs as a target does, but reads and returns the target's ids.

The two vocabularies may differ in size (`drafting/vocabulary.py`). The config of a draft model with a draft vocabulary
has `draft_token_ids`: the target's id of each row of its embedding and head.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding.speed.cuda_graphs import CompileMode
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.support import keeps_states
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.vocabulary import HeadRows, draft_ids_of, known_ids


def target_ids_of(model: PreTrainedModel) -> Tensor | None:
    """[rows] int64: the target's id of each row of a draft model's embedding, ascending; None if the ids are equal."""
    ids = getattr(model.config, "draft_token_ids", None)
    return None if ids is None else torch.tensor(ids, device="cpu")


@torch.no_grad()
def with_whole_vocabulary(draft_model: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """The draft model with a row for each of the target's tokens, for software that needs equal vocabularies.

    It drafts as before: a token without a row of its own gets the embedding of the last row and the logit 0, which in
    practice is below that of the likeliest token.

    Args:
        draft_model: returned unchanged if it has no draft vocabulary.
        vocab_size: rows of the target's embedding.
    """
    target_ids = target_ids_of(draft_model)
    if target_ids is None:
        return draft_model
    table: Tensor = draft_model.get_input_embeddings().weight
    ids = target_ids.to(table.device)
    embeddings = table[DraftVocabulary(ids, len(table)).rows(torch.arange(vocab_size, device=table.device))]
    head = torch.zeros_like(embeddings)
    head[ids] = draft_model.get_output_embeddings().weight
    config = copy.deepcopy(draft_model.config)
    del config.draft_token_ids
    text = config.get_text_config(decoder=True)
    text.vocab_size, text.tie_word_embeddings = vocab_size, False
    config.tie_word_embeddings = False
    whole: PreTrainedModel = type(draft_model)(config).to(table.device, table.dtype).eval()
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    own = {name: tensor for name, tensor in draft_model.state_dict().items() if tensor.shape == shapes[name]}
    whole.load_state_dict(own, strict=False)
    whole.get_input_embeddings().weight.copy_(embeddings)
    whole.get_output_embeddings().weight.copy_(head)
    whole.generation_config = copy.deepcopy(draft_model.generation_config)
    return whole


def with_head_rows(draft_model: PreTrainedModel, rows: Tensor) -> PreTrainedModel:
    """The same model, sharing its layers, whose head has these rows, [kept] int64, only.

    Raises:
        ValueError: its head is not a module of its own.
    """
    head: Any = draft_model.get_output_embeddings()
    names = [name for name, module in draft_model.named_children() if module is head]
    if not names:
        raise ValueError(
            f"draft_vocab was given for draft model {draft_model.name_or_path!r}, but {type(draft_model).__name__} "
            "computes its logits in another module than its own head: leave it out."
        )
    less = copy.copy(draft_model)
    less._modules = {**draft_model._modules, names[0]: HeadRows(head, rows)}
    return less


class DraftVocabulary:
    """Maps the target's ids to rows of a draft model.

    Args:
        target_ids: [rows] int64, see `target_ids_of`; None if the ids are equal.
        num_rows: of the draft model's embedding.
    """

    def __init__(self, target_ids: Tensor | None, num_rows: int) -> None:
        self.target_ids, self.num_rows = target_ids, num_rows
        self._rows: Tensor | None = None
        if target_ids is not None:
            offsets = target_ids - torch.arange(num_rows, device=target_ids.device)
            self._rows = draft_ids_of(offsets, int(target_ids[-1]) + 1)

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows for target ids of any shape; the last row for a token without its own."""
        if self._rows is None:
            return known_ids(token_ids, self.num_rows)
        if self._rows.device != token_ids.device:
            self._rows = self._rows.to(token_ids.device)
        found = self._rows[token_ids.clamp(max=len(self._rows) - 1)]
        return found.where(found >= 0, self.num_rows - 1)


class DraftModel(TargetModel):
    """A draft model bound to one `generate` call of the target.

    Attributes:
        head_ids: [draft_vocab] int64, the target's id of each row of the head; None if that is its row.
        vocab_size: columns of the target's logits, to be set after its prefill; `verify` returns as many.

    Raises:
        ValueError: as `TargetModel`.
    """

    def __init__(
        self, model: PreTrainedModel, *, compile_mode: CompileMode = "none", head_ids: Tensor | None = None
    ) -> None:
        super().__init__(model, compile_mode=compile_mode)
        self.num_rows: int = num_tokens(model)
        self.vocab_size = self.num_rows
        self.vocabulary = DraftVocabulary(target_ids_of(model), self.num_rows)
        self.head_ids = self.vocabulary.target_ids if head_ids is None else head_ids

    def prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> TargetOutput:
        return super().prefill(self.vocabulary.rows(input_ids), generation_config, model_kwargs)

    def prefill_for_drafting(self, token_ids: Tensor, mask: Tensor | None, max_length: int) -> None:
        """`prefill` of a draft model, with padding moved to the right and its cache entries set to zero.

        A padding token on the left attends to nothing. Eager attention in float64 then gives NaN, which the next layer
        spreads over the row. A target must do what transformers does; a draft model need not.

        Args:
            token_ids: [batch, seq] int64.
            mask: [batch, seq] bool, False at padding; None for no padding.
            max_length: most tokens that a row may have.
        """
        if mask is not None and keeps_states(self.model):  # padding on the right would change the states
            self.prefill_alone(token_ids, max_length, mask)
            return
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
        target_ids = self.vocabulary.target_ids
        if target_ids is not None or self.vocab_size > self.num_rows:  # else every token of the target has a row
            tree = replace(tree, token_ids=self.vocabulary.rows(tree.token_ids))
        output = super().verify(tree, root_positions, **settings)
        output.logits = TargetVocabularyLogitsProcessor(self.vocab_size, self.head_ids)(None, output.logits)
        return output

"""Vocabularies of drafter and target that differ in size: padding, added tokens, draft vocabularies.

An id means the same token in all models with the same tokenizer, but the number of embeddings differs: rows beyond the
tokenizer's ids are padding, and a target may have been resized for an added token. `TargetVocabularyLogitsProcessor`
brings draft logits to the target's columns. `known_ids` replaces a token that the drafter has no row for by its last
row, which can only cost accepted drafts. `pairing.py` compares tokenizers.

A published map `d2t` holds offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.targets.modules import apply_head, has_plain_weight, num_tokens
from hf_specdec.drafting.registry import name_of

# Largest difference that is assumed to be padding and added tokens if no tokenizers can be compared, as a share of the
# larger table. Different vocabularies differ by more (Llama 3 and Qwen: 16%), or their tokenizers do.
MOST_PADDING = 1 / 8


def may_be_padding(one: int, other: int) -> bool:
    """Whether two table sizes may belong to the same vocabulary.

    Examples:
        >>> may_be_padding(151936, 152064), may_be_padding(32000, 50257)
        (True, False)
    """
    return abs(one - other) <= MOST_PADDING * max(one, other)


def known_ids(token_ids: Tensor, num_rows: int) -> Tensor:
    """Replaces ids beyond a table of `num_rows` by its last id.

    Examples:
        >>> known_ids(torch.tensor([3, 9]), 8)
        tensor([3, 7])
    """
    return token_ids.clamp(max=num_rows - 1)


class HeadRows(nn.Module):
    """The rows of a head for a draft vocabulary, for drafters that share the target's head.

    Args:
        head: the target's, [..., hidden] -> [..., vocab]. The rows of a plain `nn.Linear` are copied, so only they are
            computed; any other head, such as a quantised or offloaded one, is computed completely.
        target_ids: [draft_vocab] int64, the rows.
    """

    def __init__(self, head: nn.Module, target_ids: Tensor) -> None:
        super().__init__()
        self.whole: nn.Module | None = None
        if type(head) is nn.Linear and has_plain_weight(head):
            target_ids = target_ids.to(head.weight.device)
            self.weight = nn.Parameter(head.weight.detach()[target_ids], requires_grad=False)
            self.bias = None if head.bias is None else nn.Parameter(head.bias.detach()[target_ids], requires_grad=False)
        else:
            self.whole = head
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab]."""
        if self.whole is None:
            return nn.functional.linear(hidden, self.weight, self.bias)
        logits = apply_head(self.whole, hidden)
        ids: Tensor = self.target_ids  # type: ignore[assignment]
        return logits[..., ids.to(logits.device)]


class CachedRows:
    """The rows of a target's head, reused between calls as long as neither its weights nor the rows change."""

    def __init__(self) -> None:
        self._rows: tuple[Any, HeadRows] | None = None

    def of(self, head: nn.Module, target_ids: Tensor, version: object = None) -> HeadRows:
        """The rows of `head` with these ids.

        Args:
            head: the target's.
            target_ids: [draft_vocab] int64.
            version: changes whenever `target_ids` do.
        """
        weight: Any = head.weight if has_plain_weight(head) else target_ids
        key = (id(head), weight.device, weight.data_ptr(), weight._version, version)
        if self._rows is None or self._rows[0] != key:
            self._rows = key, HeadRows(head, target_ids)
        return self._rows[1]


def frequent_token_ids(texts: Iterable[str], tokenizer: Any, size: int) -> Tensor:
    """The most frequent tokens of one's own texts, for `load_drafter(..., draft_vocab=ids)`: FR-Spec, arXiv 2502.14856.

    Args:
        texts: what the target writes or is asked about; some megabytes are enough.
        tokenizer: the target's.
        size: most tokens to choose; those that do not occur are not chosen.

    Returns:
        [at most size] int64, ascending, special tokens of the tokenizer included.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text)["input_ids"])
    ends = [token for token in getattr(tokenizer, "all_special_ids", ()) if token not in counts]
    chosen = [token for token, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    return torch.tensor(sorted({*ends[:size], *chosen[: max(0, size - len(ends))]}), dtype=torch.int64, device="cpu")


def draftable_rows(own_ids: Tensor, draft_vocab: Tensor | Sequence[int], vocab_size: int, name: str) -> Tensor:
    """[kept] int64: the rows of a head whose tokens are in a draft vocabulary.

    Args:
        own_ids: [rows] int64, the target's id of each row.
        draft_vocab: ids of the target.
        vocab_size: the target's, as the drafter knows it.
        name: the drafter's, for messages.

    Raises:
        ValueError: an id is out of range, or none has a row.
    """
    wanted = torch.as_tensor(draft_vocab, dtype=torch.int64, device=own_ids.device).flatten().unique()
    if not len(wanted) or int(wanted[0]) < 0 or int(wanted[-1]) >= vocab_size:
        shown = f"from {int(wanted[0])} to {int(wanted[-1])}" if len(wanted) else "none at all"
        raise ValueError(
            f"draft_vocab has ids {shown}, but drafter {name!r} is for a vocabulary of {vocab_size}: give ids of the "
            "target's tokenizer, as from frequent_token_ids(texts, tokenizer, size)."
        )
    rows = torch.isin(own_ids, wanted).nonzero().flatten()
    if not len(rows):
        raise ValueError(
            f"draft_vocab has none of the {len(own_ids)} tokens that drafter {name!r} can draft: give more tokens."
        )
    return rows


@torch.no_grad()
def head_of_rows(head: nn.Linear, rows: Tensor) -> nn.Linear:
    """A linear layer with some rows of another one."""
    less = nn.Linear(head.in_features, len(rows), bias=head.bias is not None).to(head.weight)
    less.weight.copy_(head.weight[rows.to(head.weight.device)])
    if head.bias is not None:
        less.bias.copy_(head.bias[rows.to(head.bias.device)])
    return less.requires_grad_(head.weight.requires_grad)


class MappedVocabulary(PreTrainedModel):
    """A drafter with a draft vocabulary: the buffer `d2t`, [draft_vocab] int64, exists if `config.maps_vocabulary`."""

    d2t: Tensor

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab] int64, the target's ids of the tokens that can be drafted."""
        return self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids in the draft vocabulary, any shape -> ids of the target."""
        return draft_ids + self.d2t[draft_ids] if self.config.maps_vocabulary else draft_ids

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Sets the draft vocabulary to these ids of the target, [draft_vocab] int64.

        Raises:
            ValueError: their number is not `draft_vocab_size`, they do not ascend, or one is out of range.
        """
        size, ascending = len(self.d2t), bool((target_ids.diff() > 0).all())
        if target_ids.shape != self.d2t.shape or not ascending:
            raise ValueError(
                f"A draft vocabulary for draft_vocab_size={size} must be {size} ascending ids, but got "
                f"{list(target_ids.shape)} of them, {'' if ascending else 'not '}ascending."
            )
        offsets = target_ids.to(self.d2t.device) - torch.arange(size, device=self.d2t.device)
        check_draft_to_target(offsets, self.config.vocab_size, name_of(self))
        self.d2t.copy_(offsets)


def draft_ids_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] int64: the draft id of each target id, -1 for tokens outside the draft vocabulary.

    Examples:
        >>> draft_ids_of(torch.tensor([1, 2]), 5)
        tensor([-1,  0, -1,  1, -1])
    """
    found = torch.full((vocab_size,), -1, device=d2t.device)
    order = torch.arange(len(d2t), device=d2t.device)
    return found.scatter_(0, order + d2t, order)


def check_same_size(drafter: Any, model: PreTrainedModel, purpose: str) -> None:
    """Raises ValueError if a drafter has another vocabulary size than the target, for uses that need equal sizes.

    Args:
        drafter: with `config.vocab_size`.
        model: the target.
        purpose: what needs equal sizes, for the message.
    """
    own, rows = drafter.config.vocab_size, num_tokens(model)
    if own != rows:
        raise ValueError(
            f"Drafter {name_of(drafter)!r} has a vocabulary of {own}, but target "
            f"{name_of(model)!r} has {rows} embeddings. It can draft for this target, but "
            f"{purpose} compares the two token by token and needs equal sizes: resize the target to {own} with "
            "resize_token_embeddings, or train a new drafter for it."
        )


def check_draft_to_target(d2t: Tensor, vocab_size: int, name: str) -> None:
    """Raises ValueError if a map has target ids outside the target's vocabulary, or the same one twice.

    Args:
        d2t: [draft_vocab] int64; not checked on the meta device.
        vocab_size: the target's.
        name: the drafter's, for the message.
    """
    if d2t.is_meta:
        return
    target_ids = torch.arange(d2t.numel(), device=d2t.device) + d2t
    way_out = (
        "It must hold offsets (target id minus draft id) to tokens that the target has: save the drafter again with "
        "the map it was trained with, or use the target it was trained for."
    )
    lowest, highest = torch.stack(target_ids.aminmax()).tolist()
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"The vocabulary map d2t of drafter {name!r} gives target ids from {lowest} to {highest}, but the "
            f"target has ids 0 to {vocab_size - 1}. {way_out}"
        )
    named, counts = target_ids.unique(return_counts=True)
    if len(named) < len(target_ids):
        raise ValueError(
            f"The vocabulary map d2t of drafter {name!r} gives target id {int(named[counts.argmax()])} to "
            f"{int(counts.max())} draft ids, but each draft id must have its own target id. {way_out}"
        )

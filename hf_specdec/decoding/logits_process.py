"""LogitsProcessor subclasses for drafting: what is done to logits before a draft token is chosen from them.

They shape drafts only. The target's own logits go through the processors of the call and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class AnnealedConfidenceLogitsProcessor(LogitsProcessor):
    """Flattens the logits of an exit head, the more the shallower its layer, and says whether they suffice to exit.

    Shallow layers are confident of wrong tokens; a temperature above 1 takes that away where it is worst and leaves the
    last layer as it is. SpecBound, Section 2.2, Eq. 1 and 2.

    Args:
        layer: l, layers passed at the exit, from 1.
        num_layers: L of the target.
        alpha: strength of the annealing; 0 for none.
        threshold: tau, the least top probability to exit with.

    Raises:
        ValueError: the layer is beyond the target, alpha negative, or the threshold outside (0, 1).

    Example:
        >>> exit_rule = AnnealedConfidenceLogitsProcessor(5, 20, alpha=0.2, threshold=0.55)
        >>> exit_rule.temperature
        1.15
        >>> confidence, token_ids = exit_rule.confidence(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
        >>> confidence >= exit_rule.threshold, token_ids
        (tensor([ True, False]), tensor([0, 1]))
    """

    def __init__(self, layer: int, num_layers: int, *, alpha: float, threshold: float) -> None:
        if not 1 <= layer <= num_layers:
            raise ValueError(f"layer={layer!r} must be from 1 to {num_layers}, the layers of the target.")
        check_annealing(alpha, threshold)
        self.threshold = threshold
        self.temperature = 1 + alpha * (1 - layer / num_layers)

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[batch, vocab] logits divided by T_l = 1 + alpha (1 - l / L); the prefix is not looked at."""
        return scores / self.temperature

    def confidence(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Annealed top probability of each row and its token: [batch] float and [batch] int64.

        A row exits where the first reaches `threshold`; NaN reaches nothing.
        """
        confidence, token_ids = torch.softmax(self(None, scores), dim=-1).max(-1)
        return confidence, token_ids


class SoftCapLogitsProcessor(LogitsProcessor):
    """Bounds logits as the target bounds its own (Gemma 2): tanh(logits / cap) * cap.

    Args:
        cap: of the target's config, `final_logit_softcapping`; None for none.

    Example:
        >>> SoftCapLogitsProcessor(2.0)(None, torch.tensor([[0.0, 100.0]]))
        tensor([[0., 2.]])
    """

    def __init__(self, cap: float | None) -> None:
        self.cap = cap

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[..., vocab] -> [..., vocab]; the prefix is not looked at."""
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


class NeverProposedLogitsProcessor(LogitsProcessor):
    """Takes from a token all chance to be drafted, as from the mask token, which no text has.

    Args:
        token_id: of the token.
        value: its logit. A loss wants a finite one.

    Example:
        >>> NeverProposedLogitsProcessor(1)(None, torch.tensor([[1.0, 2.0]]))
        tensor([[1., -inf]])
    """

    def __init__(self, token_id: int, value: float = -torch.inf) -> None:
        self.token_id, self.value = token_id, value

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[..., vocab] -> [..., vocab]; in place where no gradient is asked for, since vocabularies are large."""
        scores = scores.clone() if scores.requires_grad else scores
        scores.select(-1, self.token_id).fill_(self.value)
        return scores


class TargetVocabularyLogitsProcessor(LogitsProcessor):
    """Brings draft logits to the columns of the target's, so that drafts and their probabilities are over its tokens.

    Tables of one tokenizer differ in size by padding, by tokens that were added to one of the models, and where a
    drafter can say a part of the tokens only. A token that the target does not have is dropped; one that the drafter
    cannot say gets -inf, so that it is never drafted and its draft probability is 0.

    Args:
        vocab_size: columns of the target's logits.
        token_ids: [draft_vocab] int64, ascending target ids of the draft columns, all below `vocab_size`; None where
            draft id and target id are the same.

    Example:
        >>> TargetVocabularyLogitsProcessor(4)(None, torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., -inf, -inf]])
        >>> TargetVocabularyLogitsProcessor(1)(None, torch.tensor([[1.0, 2.0]]))
        tensor([[1.]])
        >>> TargetVocabularyLogitsProcessor(4, torch.tensor([0, 2]))(None, torch.tensor([[1.0, 2.0]]))
        tensor([[1., -inf, 2., -inf]])
    """

    def __init__(self, vocab_size: int, token_ids: Tensor | None = None) -> None:
        self.vocab_size = vocab_size
        self.token_ids = token_ids

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[..., draft_vocab] -> [..., vocab_size], `scores` itself where nothing differs; ignores the prefix."""
        if self.token_ids is not None:
            everywhere = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
            return everywhere.index_copy_(-1, self.token_ids.to(scores.device), scores)
        missing = self.vocab_size - scores.shape[-1]
        # A negative pad cuts.
        return scores if missing == 0 else torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)


def check_annealing(alpha: float, threshold: float) -> None:
    """Raises ValueError, naming value and range, if annealing is negative or a threshold not a probability."""
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"alpha={alpha!r} must be 0 (no annealing) or more; 0.2 is usual.")
    if not 0 < threshold < 1:
        raise ValueError(
            f"threshold={threshold!r} must be between 0 and 1, both excluded: it is the least top probability of an "
            "exit. 0.55 is usual."
        )

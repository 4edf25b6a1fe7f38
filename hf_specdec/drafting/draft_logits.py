"""LogitsProcessor subclasses for drafting, applied to draft logits before a token is chosen.

They change drafts only. The target's logits are processed only by the processors of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class AnnealedConfidenceLogitsProcessor(LogitsProcessor):
    """Flattens the logits of an exit head, more for shallower layers, and decides whether to exit.

    Shallow layers are overconfident in wrong tokens. A temperature above 1 reduces this, most for the first layer; the
    last layer is unchanged. SpecBound, Section 2.2, Eq. 1 and 2.

    Args:
        layer: l, number of layers before the exit, from 1.
        num_layers: L of the target.
        alpha: strength of the annealing; 0 for none.
        threshold: tau, the smallest top probability to exit with.

    Raises:
        ValueError: the layer is beyond the target, alpha negative, or the threshold outside (0, 1).

    Examples:
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
        """[batch, vocab] logits divided by T_l = 1 + alpha (1 - l / L); ignores the prefix."""
        return scores / self.temperature

    def confidence(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Annealed top probability of each row and its token: [batch] float and [batch] int64.

        A row exits if its probability is at least `threshold`, which is never true for NaN.
        """
        confidence, token_ids = torch.softmax(self(None, scores), dim=-1).max(-1)
        return confidence, token_ids


class SoftCapLogitsProcessor(LogitsProcessor):
    """Bounds logits as the target bounds its own (Gemma 2): tanh(logits / cap) * cap.

    Args:
        cap: of the target's config, `final_logit_softcapping`; None for none.

    Examples:
        >>> SoftCapLogitsProcessor(2.0)(None, torch.tensor([[0.0, 100.0]]))
        tensor([[0., 2.]])
    """

    def __init__(self, cap: float | None) -> None:
        self.cap = cap

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[..., vocab] -> [..., vocab]; ignores the prefix."""
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


class NeverProposedLogitsProcessor(LogitsProcessor):
    """Prevents a token from being drafted, for example the mask token.

    Args:
        token_id: of the token.
        value: its logit; finite for a loss.

    Examples:
        >>> NeverProposedLogitsProcessor(1)(None, torch.tensor([[1.0, 2.0]]))
        tensor([[1., -inf]])
    """

    def __init__(self, token_id: int, value: float = -torch.inf) -> None:
        self.token_id, self.value = token_id, value

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """[..., vocab] -> [..., vocab]; in place if no gradient is needed, since vocabularies are large."""
        scores = scores.clone() if scores.requires_grad else scores
        scores.select(-1, self.token_id).fill_(self.value)
        return scores


class TargetVocabularyLogitsProcessor(LogitsProcessor):
    """Maps draft logits to the columns of the target's logits, so that draft probabilities are over its vocabulary.

    Vocabularies of one tokenizer differ in size by padding, by tokens added to one of the models, and by reduced draft
    vocabularies. Columns of tokens that the target does not have are dropped. Tokens that the drafter does not have get
    -inf, so that they are never drafted and their draft probability is 0.

    Args:
        vocab_size: columns of the target's logits.
        token_ids: [draft_vocab] int64, ascending target ids of the draft columns, all below `vocab_size`; None if draft
            ids equal target ids.

    Examples:
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
        """[..., draft_vocab] -> [..., vocab_size]; `scores` itself if nothing differs. Ignores the prefix."""
        if self.token_ids is not None:
            everywhere = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
            return everywhere.index_copy_(-1, self.token_ids.to(scores.device), scores)
        missing = self.vocab_size - scores.shape[-1]
        # A negative pad removes columns.
        return scores if missing == 0 else torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)


def check_annealing(alpha: float, threshold: float) -> None:
    """Raises ValueError if alpha is negative or not finite, or the threshold is not between 0 and 1."""
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"alpha={alpha!r} must be 0 (no annealing) or more; 0.2 is usual.")
    if not 0 < threshold < 1:
        raise ValueError(
            f"threshold={threshold!r} must be between 0 and 1, both excluded: it is the smallest top probability of an "
            "exit. 0.55 is usual."
        )

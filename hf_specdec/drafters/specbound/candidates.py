"""SpecBound in one `generate` call: bounded speculation with cached states.

A round runs the root, then each drafted token, through shallow layers one at a time. A position drafts the next token
at the first exit layer whose annealed confidence reaches the threshold. The draft ends at a difficult position, one
that finds no exit up to d_max, or when w_max positions are taken; the last of these asks no head, since the target is
about to decode it. Then all positions go through their remaining layers together: that is the verification (`verify`),
and it decodes the last position as well. A round of w positions so runs at most
(w - 1) d_max + L = w d_max + (L - d_max) layers (Eq. 3), and keeps one hidden state per position.
With d_max = L, the ablation of Figure 4, a difficult position is decoded alone and the draft goes on behind it.
Beyond the paper: a head that errs at one place is as confident of the same error at the next place like it, and in a
text that repeats itself then drafts a full width behind it every round. A token that was refused after this very token
the last time it was drafted there therefore makes the position a difficult one (`learn_refusals`).
Source: SpecBound, Sections 2.2 and 2.3, Figures 2 and 5; which states are kept and brought up is in `pending.py`. In
the paper rows stand alone; here the rows of a batch pass layers together, each leaves at its own exit, and the draft
goes on while some row has found one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import ChoiceRule, Committed, DraftContext
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.specbound.modeling import SpecBoundDrafter
from hf_specdec.drafters.specbound.pending import PendingChain, PendingGenerator


@dataclass(frozen=True)
class NextTokens:
    """What the last position of a chain drafts.

    Attributes:
        found: per row, whether it found an exit; where it did not, its tokens mean nothing.
        token_ids: [batch] int64, target ids.
        law: [batch, vocab] float32, what they were drawn from; None for the likeliest tokens.
        finite: per row, False where no exit was found and a head gave NaN or infinite logits.
    """

    found: list[bool]
    token_ids: Tensor
    law: Tensor | None
    finite: list[bool]


class EarlyExitGenerator(PendingGenerator):
    """Drafts chains with the target's own layers.

    Args:
        drafter: heads and options.
        target: of the call.
    """

    drops_rows = True

    def __init__(self, drafter: SpecBoundDrafter, target: TargetModel) -> None:
        super().__init__(target)
        self.drafter = drafter
        self.width = drafter.options.w_max
        self.rules = drafter.exit_rules()
        self.is_unbounded = drafter.options.d_max == drafter.config.num_target_layers
        self.draft_ids = drafter.draft_ids
        self.vocabulary: TargetVocabularyLogitsProcessor
        # Per row the pairs (token, draft behind it) whose draft was refused the last time.
        self.refused: list[set[tuple[int, int]]] = []
        self.chains: list[list[int]] = []  # per row, the root and the drafts of this round

    @in_inference_mode  # cheaper than no_grad, and what outlives the round is the target's cache alone
    def draft(self, context: DraftContext) -> DraftTree:
        device = context.root_ids.device
        chain = self.begin_chain(context.root_positions, self.width)
        chain.extend(context.root_ids)
        going = list(context.active)
        self.chains = [[token] for token in context.root_ids.tolist()]
        self.refused = self.refused or [set() for _ in going]
        columns, laws = [context.root_ids], []
        finite = [True] * len(going)
        while chain.num_nodes < self.width:
            drafted = self.next_tokens(chain, going, context.choice)
            if chain.num_nodes == 1:
                finite = drafted.finite
            going = drafted.found
            if not any(going):
                break
            for row, token in enumerate(drafted.token_ids.tolist()):
                if going[row]:
                    self.chains[row].append(token)
            token_ids = drafted.token_ids.to(device)
            columns.append(token_ids)
            if drafted.law is not None:
                laws.append(drafted.law)
            chain.extend(token_ids)
        lengths = [len(drafted_chain) for drafted_chain in self.chains]
        valid = None
        if min(lengths) < chain.num_nodes:
            valid = torch.arange(chain.num_nodes, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        return DraftTree.chain(
            torch.stack(columns, dim=1),
            valid=valid,
            finite=None if all(finite) else torch.tensor(finite, device=device),
            draft_probs=torch.stack(laws, dim=1).to(device) if laws else None,
        )

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1], self.draft_ids)
        if not self.drafter.options.learn_refusals:
            return
        for refused, chain, num_kept in zip(self.refused, self.chains, committed.num_accepted, strict=False):
            pairs = list(itertools.pairwise(chain))
            refused.difference_update(pairs[:num_kept])
            refused.update(pairs[num_kept : num_kept + 1])  # those behind it follow a text that is not there

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.refused = [self.refused[row] for row in rows]

    def next_tokens(self, chain: PendingChain, going: list[bool], choice: ChoiceRule) -> NextTokens:
        """Runs the last position from exit to exit, until every row that is `going` has left, or may not any more."""
        found, finite = [False] * len(going), [True] * len(going)
        waiting = list(going)
        logits, token_ids = None, None
        for layer, rule in self.rules.items():
            here = self.drafter.exit_logits(layer, chain.advance(layer), chain.slices)
            here = here[:, : self.vocabulary.vocab_size]
            confidence, likeliest = rule.confidence(here)
            leaving = []
            for row, value in enumerate(confidence.tolist()):
                # A decision that looked at the token drawn later would give drafts another law than they carry.
                leaving.append(waiting[row] and value >= rule.threshold)
                if waiting[row]:
                    finite[row] = leaving[row] or (finite[row] and value == value)
            if any(leaving):
                if self.draft_ids is not None:
                    likeliest = self.draft_ids[likeliest]
                if choice.do_sample:
                    here = self.vocabulary(None, here)
                waiting = [there and not now for there, now in zip(waiting, leaving, strict=True)]
                if any(self.refused):
                    pairs = zip((row[-1] for row in self.chains), likeliest.tolist(), strict=True)
                    refused = [pair in known for pair, known in zip(pairs, self.refused, strict=True)]
                    leaving = [now and not no for now, no in zip(leaving, refused, strict=True)]
                if any(leaving):
                    found, logits, token_ids = _joined(found, leaving, logits, here, token_ids, likeliest)
                if not any(waiting):
                    break
        if self.is_unbounded and found != going:
            here = chain.slices.logits(chain.advance(chain.slices.num_layers)).float()
            leaving = [row and not left for row, left in zip(going, found, strict=True)]
            if not choice.do_sample:  # else the logits of exits may be of a reduced vocabulary
                logits = None
            found, logits, token_ids = _joined(found, leaving, logits, here, token_ids, here.argmax(-1))
        if token_ids is None or logits is None:
            return NextTokens(found, torch.zeros(len(going), dtype=torch.int64), None, finite)
        if choice.do_sample:
            return NextTokens(found, *self.draw(logits, found, choice), finite)
        return NextTokens(found, token_ids, None, finite)

    def draw(self, logits: Tensor, found: list[bool], choice: ChoiceRule) -> tuple[Tensor, Tensor]:
        """Tokens [batch] drawn as the call draws its own, and their law [batch, vocab]; not annealed."""
        if not all(found):  # rows without an exit are not drafted for, but drawn in the same call
            logits = logits.where(torch.tensor(found, device=logits.device).unsqueeze(1), 0.0)
        scores = choice.warpers(logits.new_zeros(len(logits), 1, dtype=torch.int64), logits)
        # A warper may forbid all that a reduced vocabulary can say; anything may then be drafted.
        law = torch.softmax(scores.where((scores > -torch.inf).any(1, keepdim=True), 0.0), dim=-1)
        return torch.multinomial(law, num_samples=1).squeeze(1), law


def _joined(
    found: list[bool],
    leaving: list[bool],
    logits: Tensor | None,
    new_logits: Tensor,
    token_ids: Tensor | None,
    new_token_ids: Tensor,
) -> tuple[list[bool], Tensor, Tensor]:
    """Rows that have left, with their logits and tokens, after those `leaving` now."""
    left = [before or now for before, now in zip(found, leaving, strict=True)]
    if token_ids is None or (len(found) == 1 and leaving[0]):
        return left, new_logits, new_token_ids
    mask = torch.tensor(leaving, device=new_token_ids.device)
    if logits is not None:
        new_logits = new_logits.where(mask.unsqueeze(1), logits)
    return left, new_logits, new_token_ids.where(mask, token_ids)

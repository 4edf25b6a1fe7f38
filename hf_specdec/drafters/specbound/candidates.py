"""SpecBound in one `generate` call: bounded speculation with cached states.

A round runs the root, then each drafted token, through shallow layers one at a time. A position drafts the next token
at the first exit layer whose annealed confidence reaches the threshold. The draft ends at a difficult position, one
without an exit up to d_max, or after w_max positions; no head is evaluated at the last of these, because the target
decodes it next. Then all positions run through their remaining layers together: this is the verification (`verify`),
which also decodes the last position. So a round of w positions runs at most
(w - 1) d_max + L = w d_max + (L - d_max) layers (Eq. 3), and stores one hidden state per position.
With d_max = L, the ablation of Figure 4, a difficult position is decoded alone and the draft continues after it.
Beyond the paper: if a text repeats itself, a head repeats its errors with the same confidence, and then drafts the full
width after an error in every round. Therefore a position is difficult, too, if its draft was rejected after the same
token the last time (`learn_refusals`).
Source: SpecBound, Sections 2.2 and 2.3, Figures 2 and 5; `pending.py` stores and advances the states. The paper has one
row; here the rows of a batch run each layer together, each exits at its own layer, and the draft continues while any
row has found an exit.
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
    """The tokens drafted at the last position of a chain.

    Attributes:
        found: per row, whether it found an exit; without one its token is undefined.
        token_ids: [batch] int64, target ids.
        probs: [batch, vocab] float32, the distribution they were sampled from; None for the likeliest tokens.
        finite: per row, False if no exit was found and a head gave NaN or infinite logits.
    """

    found: list[bool]
    token_ids: Tensor
    probs: Tensor | None
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
        # Per row the pairs (token, draft after it) whose draft was rejected the last time.
        self.refused: list[set[tuple[int, int]]] = []
        self.chains: list[
            list[int]
        ] = []  # per row, the root and the drafts of this round; empty before the first draft

    @in_inference_mode  # cheaper than no_grad; only the target's cache outlives the round
    def draft(self, context: DraftContext) -> DraftTree:
        device = context.root_ids.device
        chain = self.begin_chain(context.root_positions, self.width)
        chain.extend(context.root_ids)
        active = list(context.active)
        self.chains = [[token] for token in context.root_ids.tolist()]
        columns, draft_probs = [context.root_ids], []
        finite = [True] * len(active)
        width = self.width if context.node_limit is None else min(self.width, 1 + context.node_limit)
        while chain.num_nodes < width:
            drafted = self.next_tokens(chain, active, context.choice)
            if chain.num_nodes == 1:
                finite = drafted.finite
            active = drafted.found
            if not any(active):
                break
            for row, token in enumerate(drafted.token_ids.tolist()):
                if active[row]:
                    self.chains[row].append(token)
            token_ids = drafted.token_ids.to(device)
            columns.append(token_ids)
            if drafted.probs is not None:
                draft_probs.append(drafted.probs)
            chain.extend(token_ids)
        lengths = [len(drafted_chain) for drafted_chain in self.chains]
        valid = None
        if min(lengths) < chain.num_nodes:
            valid = torch.arange(chain.num_nodes, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        return DraftTree.chain(
            torch.stack(columns, dim=1),
            valid=valid,
            finite=None if all(finite) else torch.tensor(finite, device=device),
            draft_probs=torch.stack(draft_probs, dim=1).to(device) if draft_probs else None,
        )

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1], self.draft_ids)
            # Here and not in `draft`: rows that end with the prefill's token leave before the first draft.
            self.refused = [set() for _ in committed.token_ids]
        if not self.drafter.options.learn_refusals:
            return
        for refused, chain, num_accepted in zip(self.refused, self.chains, committed.num_accepted, strict=False):
            pairs = list(itertools.pairwise(chain))
            refused.difference_update(pairs[:num_accepted])
            refused.update(pairs[num_accepted : num_accepted + 1])  # later pairs follow a rejected token

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.refused = [self.refused[row] for row in rows]

    def next_tokens(self, chain: PendingChain, active: list[bool], choice: ChoiceRule) -> NextTokens:
        """Runs the last position from exit to exit, until every active row has exited or no exit is left."""
        found, finite = [False] * len(active), [True] * len(active)
        waiting = list(active)
        logits, token_ids = None, None
        for layer, rule in self.rules.items():
            here = self.drafter.exit_logits(layer, chain.advance(layer), chain.slices)
            here = here[:, : self.vocabulary.vocab_size]
            confidence, likeliest = rule.confidence(here)
            leaving = []
            for row, value in enumerate(confidence.tolist()):
                # The decision must not depend on the token sampled later, or drafts would have another distribution.
                leaving.append(waiting[row] and value >= rule.threshold)
                if waiting[row]:
                    finite[row] = leaving[row] or (finite[row] and value == value)
            if any(leaving):
                if self.draft_ids is not None:
                    likeliest = self.draft_ids[likeliest]
                if choice.do_sample:
                    here = self.vocabulary(None, here)
                waiting = [waits and not exits for waits, exits in zip(waiting, leaving, strict=True)]
                if any(self.refused):
                    pairs = zip((row[-1] for row in self.chains), likeliest.tolist(), strict=True)
                    refused = [pair in known for pair, known in zip(pairs, self.refused, strict=True)]
                    leaving = [exits and not pair for exits, pair in zip(leaving, refused, strict=True)]
                if any(leaving):
                    found, logits, token_ids = _joined(found, leaving, logits, here, token_ids, likeliest)
                if not any(waiting):
                    break
        if self.is_unbounded and found != active:
            here = chain.slices.logits(chain.advance(chain.slices.num_layers)).float()
            leaving = [row and not exited for row, exited in zip(active, found, strict=True)]
            if not choice.do_sample:  # the logits of exits may have a reduced vocabulary
                logits = None
            found, logits, token_ids = _joined(found, leaving, logits, here, token_ids, here.argmax(-1))
        if token_ids is None or logits is None:
            return NextTokens(found, torch.zeros(len(active), dtype=torch.int64), None, finite)
        if choice.do_sample:
            return NextTokens(found, *self.sample(logits, found, choice), finite)
        return NextTokens(found, token_ids, None, finite)

    def sample(self, logits: Tensor, found: list[bool], choice: ChoiceRule) -> tuple[Tensor, Tensor]:
        """Tokens [batch] sampled with the call's settings, and their distribution [batch, vocab]; not annealed."""
        if not all(found):  # rows without an exit get no draft, but take part in the shared call of multinomial
            logits = logits.where(torch.tensor(found, device=logits.device).unsqueeze(1), 0.0)
        scores = choice.warpers(logits.new_zeros(len(logits), 1, dtype=torch.int64), logits)
        # A warper may forbid the complete reduced vocabulary; then the distribution is uniform.
        probs = torch.softmax(scores.where((scores > -torch.inf).any(1, keepdim=True), 0.0), dim=-1)
        return torch.multinomial(probs, num_samples=1).squeeze(1), probs


def _joined(
    found: list[bool],
    leaving: list[bool],
    logits: Tensor | None,
    new_logits: Tensor,
    token_ids: Tensor | None,
    new_token_ids: Tensor,
) -> tuple[list[bool], Tensor, Tensor]:
    """Which rows have exited, with their logits and tokens, after those `leaving` now."""
    exited = [before or now for before, now in zip(found, leaving, strict=True)]
    if token_ids is None or (len(found) == 1 and leaving[0]):
        return exited, new_logits, new_token_ids
    mask = torch.tensor(leaving, device=new_token_ids.device)
    if logits is not None:
        new_logits = new_logits.where(mask.unsqueeze(1), logits)
    return exited, new_logits, new_token_ids.where(mask, token_ids)

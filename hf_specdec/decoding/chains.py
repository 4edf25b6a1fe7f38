"""HostChains: a candidate generator in the host's own assisted loop, which verifies one chain per round, batch 1.

For targets that trees cannot be verified on. The drafter is the same and so is what it is told; of each tree the
likeliest path goes to the host, which verifies it and keeps its own cache.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_specdec.decoding.accept import PREFIX_FREE, STATEFUL
from hf_specdec.decoding.generator import ChoiceRule, Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.policies import Always
from hf_specdec.decoding.state import Counts, RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree


def best_path(tree: DraftTree) -> list[int]:
    """The nodes of the likeliest path of a tree of one row, root first: nodes come likeliest first.

    Example:
        >>> best_path(DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 0, 1]]))
        [0, 1, 3]
    """
    parents, valid = tree.parents[0].tolist(), tree.valid[0].tolist()
    path = [0]
    for node in range(1, tree.num_nodes):
        if valid[node] and parents[node] == path[-1]:
            path.append(node)
    return path


class HostChains:
    """What one call of the host's loop has seen so far.

    Args:
        target: of the call; its taps are open while the host's loop runs.
        policy: chooses how much is drafted.
        stats: filled while the call runs.
        logits_processor: of the call.
        stopping_criteria: of the call.
        do_sample: whether the call samples.
        max_length: of the call.

    Attributes:
        drafts: whether the host's loop verifies chains exactly in this call. It asks criteria of the caller's only at
            the end of a round, and processors that keep state also about drafts that are rejected.
    """

    def __init__(
        self,
        target: TargetModel,
        policy: Always,
        stats: SpeculationStats,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        do_sample: bool,
        max_length: int,
    ) -> None:
        self.target, self.policy, self.stats, self.max_length = target, policy, stats, max_length
        warpers = [processor for processor in logits_processor if type(processor) in PREFIX_FREE]
        self.choice = ChoiceRule(do_sample, LogitsProcessorList(warpers))
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.drafts = all(type(rule) in known for rule in stopping_criteria)
        self.drafts &= not any(isinstance(processor, STATEFUL) for processor in logits_processor)
        self.eos_ids: Collection[int] = {
            int(token) for rule in stopping_criteria if type(rule) is EosTokenCriteria for token in rule.eos_token_id
        }
        self.vocab_size = target.model.get_input_embeddings().num_embeddings
        self.padding = 0  # in front of the prompt
        self.tree: DraftTree | None = None  # of the round under way; None while the prompt is run
        self.path: list[int] = []  # the nodes of it that the host verifies, root first
        self.started = False

    def candidates(
        self,
        generator: TreeCandidateGenerator,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        outputs: Any,
        num_matches: int,
    ) -> tuple[Tensor, Tensor | None]:
        """See `TreeCandidateGenerator.get_candidates`."""
        if not self.drafts:
            return input_ids, None
        if not self.started:  # the prompt alone first, whose features the drafter reads
            self.started = True
            return input_ids, None
        if self.tree is None:
            self._begin(generator, input_ids, model_kwargs, outputs)
        else:
            self._take_in(generator, input_ids, outputs, num_matches)
        root_positions = torch.tensor([input_ids.shape[1] - 1 - self.padding], device=input_ids.device)
        context = DraftContext(
            root_ids=input_ids[:, -1],
            root_positions=root_positions,
            sequences=input_ids,
            lengths=[input_ids.shape[1]],
            active=[True],
            choice=self.choice,
            lap=self.stats.lap,
        )
        tree = self.policy.draft(generator, context).within_vocabulary(self.vocab_size)
        self.tree, self.path = tree, self._verifiable(tree, self.max_length - input_ids.shape[1] - 1)
        if generator.reads_cache:
            generator.verify(self.target, tree, RoundState(context.root_ids, root_positions))
        self.stats.lap("tree")
        self.target.forget_taps()
        drafted = tree.token_ids[:, self.path[1:]].to(input_ids.device)
        laws = None
        if tree.draft_probs is not None and len(self.path) > 1:
            laws = tree.draft_probs[:, : len(self.path) - 1].log()
        return torch.cat([input_ids, drafted], dim=1), laws

    def _verifiable(self, tree: DraftTree, most: int) -> list[int]:
        """The path without what lies at or behind an end of the text: the host may go on behind it."""
        path = best_path(tree)[: 1 + max(0, most)]
        for place, token in enumerate(tree.token_ids[0, path].tolist()):
            if place and token in self.eos_ids:
                return path[:place]
        return path

    def _begin(
        self, generator: TreeCandidateGenerator, input_ids: Tensor, model_kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """Tells the drafter of the prompt; the last of `input_ids` is the first root."""
        prompt, mask = input_ids[:, :-1], model_kwargs.get("attention_mask")
        valid = None
        if mask is not None and not bool(mask[:, : prompt.shape[1]].all()):
            valid = mask[:, : prompt.shape[1]].to(device=prompt.device, dtype=torch.bool)
            self.padding = int((~valid).sum())
        if generator.reads_cache:
            self.target.prefill_alone(prompt[:, self.padding :], self.max_length)
            self.target.begin_rounds(self.max_length)
        elif valid is not None:
            self.target.set_prompt_mask(valid)
        features = None if generator.reads_cache else self.target.read_taps()
        if features is not None:  # fewer than the prompt's where a cache was continued
            prompt = prompt[:, -features.shape[1] :]
            valid = None if valid is None else valid[:, -features.shape[1] :]
        last = input_ids.shape[1] - 1 - self.padding
        positions = torch.arange(last - prompt.shape[1], last, device=prompt.device).unsqueeze(0)
        counts = Counts.of([prompt.shape[1] if valid is None else int(valid.sum())], prompt.device)
        generator.observe(Committed(prompt, features, positions, valid, counts, outputs.logits))
        self.stats.lap("prefill")

    def _take_in(self, generator: TreeCandidateGenerator, input_ids: Tensor, outputs: Any, num_matches: int) -> None:
        """Tells the drafter what the host has kept of its path."""
        count, length = num_matches + 1, input_ids.shape[1]
        assert self.tree is not None
        path = torch.tensor([self.path[:count]], device=self.tree.token_ids.device)
        counts = Counts.of([count], input_ids.device)
        features = None if generator.reads_cache else self.target.read_taps()
        if generator.reads_cache:
            self.target.cache.commit(path, counts)
        last = length - 1 - self.padding
        generator.observe(
            Committed(
                token_ids=input_ids[:, -count - 1 : -1],
                features=None if features is None else features[:, :count],
                position_ids=torch.arange(last - count, last, device=input_ids.device).unsqueeze(0),
                valid=None,
                counts=counts,
                target_logits=outputs.logits,
                tree=self.tree,
                path=path,
                tokens=[input_ids[0, -count:].tolist()],
            )
        )
        self.stats.lap("commit")

    def note(self, num_matches: int) -> None:
        """Counts a round; the first forward is the prompt's."""
        if self.tree is None:
            return
        self.stats.per_step_accepted[0].append(int(num_matches))
        self.stats.num_draft_tokens += len(self.path) - 1
        self.stats.num_target_forwards += 1
        self.stats.num_layers_run += self.target.num_layers
        self.policy.learn(self.tree, torch.tensor([self.path]), [int(num_matches)])
        self.stats.lap("verify")

"""AssistedChains: a candidate generator in the assisted loop of transformers, which verifies one chain per round.

For targets that cannot verify trees, in batches of one row. The drafter runs as in our loop; the likeliest path of
each tree is passed to transformers, which verifies it and manages its own cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.exchange import ChoiceRule, Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.observers import Observer
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.state import Counts, RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.tree import DraftTree, pick
from hf_specdec.decoding.upstream import CACHE, tokens_in
from hf_specdec.decoding.user_code import late_criteria, user_code


def best_path(tree: DraftTree) -> list[int]:
    """The likeliest path of a tree with one row, root first: the first child of each node, as nodes are sorted.

    Examples:
        >>> best_path(DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 0, 1]]))
        [0, 1, 3]
    """
    parents, valid = tree.parents[0].tolist(), tree.valid[0].tolist()
    path = [0]
    for node in range(1, tree.num_nodes):
        if valid[node] and parents[node] == path[-1]:
            path.append(node)
    return path


def why_called_otherwise(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> str | None:
    """Why transformers' loop would not decode as plain decoding does with these objects; None if it would.

    It calls criteria only at the end of a round, and processors for drafts that are refused, too.
    """
    names = [*user_code(logits_processor, StoppingCriteriaList()), *late_criteria(stopping_criteria)]
    if not names:
        return None
    return (
        "nothing is drafted, because that loop calls these stopping criteria or logits processors otherwise than plain "
        f"decoding does: {', '.join(names)}"
    )


class OneByOne(BaseStreamer):
    """Passes tokens on one per call, as plain decoding does; transformers' loop passes those of a round at once."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self.streamer = streamer

    def put(self, value: Tensor) -> None:
        """Receives [1, tokens]."""
        for token in value[0]:
            self.streamer.put(token.unsqueeze(0))

    def end(self) -> None:
        self.streamer.end()


def why_no_continuation(input_ids: Tensor, arguments: dict[str, Any]) -> str | None:
    """Why transformers' loop cannot continue the cache that its caller has passed; None if it can, or there is none.

    Args:
        input_ids: [1, seq] int64.
        arguments: of `_assisted_decoding`.
    """
    embeddings, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
    if embeddings is not None and embeddings.shape[1] > input_ids.shape[1] and not (mask is None or bool(mask.all())):
        return "the prompt is given as inputs_embeds with padding, and that loop cuts the mask to the number of ids"
    cache = arguments.get(CACHE)
    if cache is None:
        return None
    if any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ())):
        return f"{CACHE} records its past (activate_past_recording), and that loop cuts it to its window"
    if not tokens_in(cache):
        return None
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return f"{CACHE} holds states, which do not say of how many tokens they are"
    if embeddings is not None:
        return f"{CACHE} holds tokens already, and the others are passed as inputs_embeds"
    # Without padding, `generate` drops the mask and notes its length, which tells whether all ids were passed.
    length = getattr(arguments["generation_config"], "_mask_length", -1) if mask is None else mask.shape[1]
    if length != input_ids.shape[1] or length <= cache.get_seq_length():
        return (
            f"{CACHE} holds {cache.get_seq_length()} tokens, and that loop needs the ids of all tokens, these "
            f"included, but input_ids has {input_ids.shape[1]}, for a text of {length}"
        )
    return None


class AssistedChains:
    """The state of one call of transformers' loop.

    Args:
        target: of the call; its taps are active while transformers' loop runs.
        policy: decides how much is drafted.
        stats: filled while the call runs.
        logits_processor: of the call.
        stopping_criteria: of the call.
        do_sample: whether the call samples.
        max_length: of the call.
        observers: see what every round but the last commits (`Observer.on_commit`).

    Attributes:
        drafts: False for a drafter that cannot read the prompt of this call.
    """

    def __init__(
        self,
        target: TargetModel,
        policy: DraftingPolicy,
        stats: SpeculationStats,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        do_sample: bool,
        max_length: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.target, self.policy, self.stats, self.max_length = target, policy, stats, max_length
        self.observers = observers
        self.choice = ChoiceRule.of(do_sample, logits_processor)
        self.eos_ids: Collection[int] = {
            int(token) for rule in stopping_criteria if type(rule) is EosTokenCriteria for token in rule.eos_token_id
        }
        self.vocab_size = num_tokens(target.model)
        self.padding = 0  # tokens before the prompt; less than 0 for a prompt of embeddings without ids
        self.tree: DraftTree | None = None  # of the current round; None while the prompt is run
        self.text: list[int] = []  # all tokens so far
        self.path: list[int] = []  # the nodes of `tree` that transformers verifies, root first
        self.features: Tensor | None = None  # of its nodes, for generators that read the target's cache
        self.started, self.drafts = False, True
        self.first_inputs: dict[str, Any] = {}  # override those that transformers prepares for the prompt

    def start_after(self, cache: Cache, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Lets the first forward run only the tokens that a cache of the caller lacks, as in plain decoding.

        transformers' assisted loop would run the whole prompt again. Call it before that loop.

        Args:
            cache: of the caller, not empty.
            input_ids: [1, seq] int64, the whole text, including the tokens in the cache.
            model_kwargs: of the call.
        """
        new = input_ids.shape[1] - cache.get_seq_length()
        self.first_inputs = self.target.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new, is_first_iteration=True, **model_kwargs, **{CACHE: cache}
        )

    def candidates(
        self,
        generator: TreeCandidateGenerator,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        outputs: Any,
        num_matches: int,
    ) -> tuple[Tensor, Tensor | None]:
        """See `TreeCandidateGenerator.get_candidates`."""
        generator.model_kwargs_overrides, self.first_inputs = self.first_inputs, {}
        if not self.drafts:
            return input_ids, None
        if not self.started:  # first the prompt without drafts: the drafter reads its features
            self.started = True
            return input_ids, None
        if self.tree is None:
            self._begin(generator, input_ids, model_kwargs, outputs)
        else:
            self._observe_round(generator, input_ids, outputs, num_matches)
        root_positions = torch.tensor([input_ids.shape[1] - 1 - self.padding], device=input_ids.device)
        context = DraftContext(
            root_ids=input_ids[:, -1],
            root_positions=root_positions,
            sequences=input_ids,
            lengths=[input_ids.shape[1]],
            active=[True],
            choice=self.choice,
            read_texts=lambda: [self.text],
            lap=self.stats.lap,
        )
        tree = self.policy.draft(generator, context).to(input_ids.device).within_vocabulary(self.vocab_size)
        self.tree, self.path = tree, self._verifiable(tree, self.max_length - input_ids.shape[1] - 1)
        if generator.reads_cache:
            output = generator.verify(self.target, tree, RoundState(context.root_ids, root_positions))
            self.features = output.features
        self.stats.lap("tree")
        self.target.forget_taps()
        drafted = tree.token_ids[:, self.path[1:]].to(input_ids.device)
        draft_logits = None
        if tree.draft_probs is not None and len(self.path) > 1:
            draft_logits = tree.draft_probs[:, : len(self.path) - 1].log()
        return torch.cat([input_ids, drafted], dim=1), draft_logits

    def _verifiable(self, tree: DraftTree, most: int) -> list[int]:
        """The path, cut before an end-of-text token and to `most` drafts: transformers may accept tokens after it."""
        path = best_path(tree)[: 1 + max(0, most)]
        for index, token in enumerate(tree.token_ids[0, path].tolist()):
            if index and token in self.eos_ids:
                return path[:index]
        return path

    def _begin(
        self, generator: TreeCandidateGenerator, input_ids: Tensor, model_kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """Reports the prompt to the drafter; the last of `input_ids` is the first root."""
        self.text = input_ids[0].tolist()
        prompt, mask = input_ids[:, :-1], model_kwargs.get("attention_mask")
        embeddings = model_kwargs.get("inputs_embeds")
        if embeddings is not None:  # a prompt given as embeddings has unknown tokens, zeros for the drafter
            self.padding = prompt.shape[1] - embeddings.shape[1]
            prompt = torch.nn.functional.pad(prompt, (-self.padding, 0))
        valid = None
        if mask is not None and not bool(mask[:, : prompt.shape[1]].all()):
            valid = mask[:, : prompt.shape[1]].to(device=prompt.device, dtype=torch.bool)
            self.padding = int((~valid).sum())
        if generator.reads_cache:
            self.target.forget_taps()
            features = self.target.prefill_alone(prompt[:, self.padding :], self.max_length).features
            self.target.begin_rounds(self.max_length)
        else:
            if valid is not None:
                self.target.set_prompt_mask(valid)
            features = self.target.read_taps()
        if features is not None:  # fewer than the prompt if a cache was continued
            prompt = prompt[:, -features.shape[1] :]
            valid = None if valid is None else valid[:, -features.shape[1] :]
        last = input_ids.shape[1] - 1 - self.padding
        positions = torch.arange(last - prompt.shape[1], last, device=prompt.device).unsqueeze(0)
        counts = Counts.of([prompt.shape[1] if valid is None else int(valid.sum())], prompt.device)
        generator.observe(Committed(prompt, features, positions, valid, counts, outputs.logits))
        self.stats.lap("prefill")

    def _observe_round(
        self, generator: TreeCandidateGenerator, input_ids: Tensor, outputs: Any, num_matches: int
    ) -> None:
        """Reports to the drafter which nodes of its path transformers has accepted."""
        count, length = num_matches + 1, input_ids.shape[1]
        assert self.tree is not None
        path = torch.tensor([self.path[:count]], device=self.tree.token_ids.device)
        counts = Counts.of([count], input_ids.device)
        if generator.reads_cache:
            features = None if self.features is None else pick(self.features, path.to(self.features.device))
            self.target.cache.commit(path, counts)
        else:
            features = self.target.read_taps()
        last = length - 1 - self.padding
        self.text += (tokens := input_ids[0, -count:].tolist())
        committed = Committed(
            token_ids=input_ids[:, -count - 1 : -1],
            features=None if features is None else features[:, :count],
            position_ids=torch.arange(last - count, last, device=input_ids.device).unsqueeze(0),
            valid=None,
            counts=counts,
            target_logits=outputs.logits,
            tree=self.tree,
            path=path,
            tokens=[tokens],
        )
        for observer in self.observers:
            observer.on_commit(committed)
        generator.observe(committed)
        self.stats.lap("commit")

    def note(self, num_matches: int) -> None:
        """Counts a round; the first forward is the prompt's and does not count."""
        if self.tree is None:
            return
        self.stats.per_step_accepted[0].append(int(num_matches))
        self.stats.num_draft_tokens += len(self.path) - 1
        self.stats.num_target_forwards += 1
        self.stats.num_layers_run += self.target.num_layers
        self.policy.learn(self.tree, torch.tensor([self.path], device="cpu"), [int(num_matches)])
        self.stats.lap("verify")

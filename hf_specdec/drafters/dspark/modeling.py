"""DSparkDrafter: a DFlash drafter with a Markov head and a confidence head after its block.

The block is run once per round, as in DFlash. The logits of its slots are then computed in order, each given the token
drafted before it: U_k + W2 z(previous token). No slot is run again. Source: DSpark, arXiv 2607.05147; shared facts on
formats of 2026, section 2.4. The state of a `generate` call is in `candidates.py`.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.dflash.modeling import DFlashDrafter
from hf_specdec.drafters.dspark.configuration import DSparkConfig, DSparkOptions
from hf_specdec.drafters.dspark.heads import ConfidenceHead, MarkovHead
from hf_specdec.drafters.growth import Slots


class ConditionalDrafter(DFlashDrafter):
    """A DFlash drafter whose slots are conditioned on the previous token."""

    options_class: ClassVar[type[DSparkOptions]] = DSparkOptions
    options: DSparkOptions  # type: ignore[assignment]  # not DFlashOptions

    @property
    def methods(self) -> tuple[str, ...]:
        return self.options_class.METHODS

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.dspark.candidates import ChainGenerator, TreeGenerator

        tree, _ = self.options_class.METHODS
        if self.method == tree:
            return TreeGenerator(self, target, self.options.node_limit)
        return ChainGenerator(self, target)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> Slots:
        """The slots of one round.

        Args:
            states: [batch, block, hidden] of all slots.
            logits: [batch, depth, draft_vocab] float32 of the slots that draft.
            root_ids: [batch] int64.
        """
        raise NotImplementedError


class DSparkDrafter(ConditionalDrafter):
    """A DSpark checkpoint as a drafter: `method="dspark"` drafts the best-first tree, `"dspark_chain"` one path.

    Drafting options: `DSparkOptions`.
    """

    config_class = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden, rank = config.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if rank:
            assert config.vocab_size is not None, "check() requires it"
            self.markov_head = MarkovHead(
                config.markov_head_type,
                rank,
                vocab_size=config.vocab_size,
                draft_vocab_size=config.draft_vocab_size,
                hidden_size=hidden,
            )
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(hidden + (rank if config.confidence_head_with_markov else 0))
        self.post_init()

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        # The Markov head has `draft_vocab_size` columns; the target's head may have more or fewer.
        logits = super().draft_logits(hidden, lm_head)
        return TargetVocabularyLogitsProcessor(self.config.draft_vocab_size)(None, logits)

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        """Logits of the probability that slots are accepted; None without a confidence head.

        Args:
            hidden: [..., hidden], of the slots.
            embedded: [..., rank], of the tokens before them; None without a Markov head.
        """
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, embedded if self.config.confidence_head_with_markov else None)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> Slots:
        return MarkovSlots(self, states, logits, root_ids)

    def card_summary(self) -> str:
        return (
            "A DSpark drafter: it fills a block of masked slots in one forward, from the hidden states of the target, "
            "and conditions each slot on the token drafted before it. hf_specdec drafts with it either the likeliest "
            'tree (`method="dspark"`, the default) or one chain (`method="dspark_chain"`).'
        )

    def card_facts(self) -> dict[str, str]:
        config, facts = self.config, super().card_facts()
        facts["Method"] = f"{self.loaded_options().method}, on a DSpark drafter"
        if config.markov_rank:
            facts["Markov head"] = f"{config.markov_head_type}, rank {config.markov_rank}"
        facts["Confidence head"] = "yes" if config.enable_confidence_head else "no"
        return facts


class MarkovSlots:
    """A DSpark drafter's slots, see `Slots`; `state` is the Markov head's."""

    def __init__(self, drafter: DSparkDrafter, states: Tensor, logits: Tensor, root_ids: Tensor) -> None:
        self.drafter, self.logits = drafter, logits
        first = drafter.config.first_slot
        self.states = states[:, first:]
        self.depth = self.states.shape[1]
        self.state: Tensor | None = None
        if (head := drafter.markov_head) is not None:
            embedded = head.embed(root_ids.unsqueeze(1))
            self.state = head.start(embedded)
            if first:  # recurrent heads were trained with the root's slot as first step, although it drafts nothing
                _, self.state = head(states[:, :1], embedded, self.state)

    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Slots.step`."""
        logits, head = self.logits[:, slot, None], self.drafter.markov_head
        if head is None:
            return logits.expand(-1, token_ids.shape[1], -1), state
        assert state is not None
        hidden = self.states[:, slot, None].expand(-1, token_ids.shape[1], -1)
        code, state = head(hidden, head.embed(token_ids), state)
        return logits + head.markov_w2(code).float(), state

    def confidence(self, slot: int, token_ids: Tensor) -> Tensor | None:
        """See `Slots.confidence`."""
        head = self.drafter.markov_head
        logit = self.drafter.confidence(self.states[:, slot], None if head is None else head.embed(token_ids))
        return None if logit is None else logsigmoid(logit.float())

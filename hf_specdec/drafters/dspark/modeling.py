"""DSparkDrafter: a DFlash drafter with a Markov head and a confidence head behind its block.

The block is run once per round, as in DFlash. Its slots are then walked in order, each with the token drafted before
it: U_k + W2 z(token before). No slot is run again. Source: DSpark, arXiv 2607.05147; shared facts on formats of 2026,
section 2.4. What a `generate` call remembers is in `candidates.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.dflash.modeling import DFlashDrafter
from hf_specdec.drafters.dspark.configuration import CHAIN, TREE, DSparkConfig, DSparkOptions
from hf_specdec.drafters.dspark.heads import ConfidenceHead, MarkovHead


class DSparkDrafter(DFlashDrafter):
    """A DSpark checkpoint as a drafter: `method="dspark"` drafts the best-first tree, `"dspark_chain"` one path.

    Drafting options: `DSparkOptions`.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    options_class = DSparkOptions
    options: DSparkOptions  # type: ignore[assignment]  # of its own, though a DFlash drafter

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden, rank = config.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if rank:
            assert config.vocab_size is not None, "check() asks for it"
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
        # The Markov head has as many columns as the config says; those of a target's head may be more or fewer.
        logits = super().draft_logits(hidden, lm_head)
        return TargetVocabularyLogitsProcessor(self.config.draft_vocab_size)(None, logits)

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        """Logits of the probability that slots are accepted; None where the drafter does not say.

        Args:
            hidden: [..., hidden], of the slots.
            embedded: [..., rank], of the tokens before them; None without a Markov head.
        """
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, embedded if self.config.confidence_head_with_markov else None)

    @property
    def methods(self) -> tuple[str, ...]:
        return TREE, CHAIN

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.dspark.candidates import ChainGenerator, TreeGenerator

        if self.method == CHAIN:
            return ChainGenerator(self, target)
        return TreeGenerator(self, target, self.options.node_limit)

    def card_summary(self) -> str:
        return (
            "A DSpark drafter: it fills a block of masked slots in one forward, from the hidden states of the target, "
            "and corrects each slot by the token drafted before it. hf_specdec drafts with it either the likeliest "
            'tree (`method="dspark"`, the default) or one chain (`method="dspark_chain"`).'
        )

    def card_facts(self) -> dict[str, str]:
        config, facts = self.config, super().card_facts()
        facts["Method"] = f"{self.loaded_options().method}, on a DSpark drafter"
        if config.markov_rank:
            facts["Markov head"] = f"{config.markov_head_type}, rank {config.markov_rank}"
        facts["Confidence head"] = "yes" if config.enable_confidence_head else "no"
        return facts

"""A whole drafting method in one file: network, options, drafting, published layout, registration and training.

The method is a bigram table: a small network predicts each token from the one before it. A method only drafts; the
library verifies, accepts and commits. Run it:

    python examples/custom_drafter.py examples/tiny-code/target
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec.own_method import (
    TRANSFORMERS,
    DraftContext,
    DraftTree,
    Format,
    Headers,
    PretrainedDrafter,
    Reading,
    Recipe,
    RowSource,
    Section,
    Serving,
    StepOutput,
    TargetFields,
    TargetModel,
    TargetVocabularyLogitsProcessor,
    TrainingStep,
    TrainOptions,
    TreeCandidateGenerator,
    TreeOptions,
    best_tree,
    check_shapes,
    grow_levels,
    load_drafter,
    num_tokens,
    position_losses,
    register,
    register_recipe,
)

WIDTH = 2  # tokens by which each node of a level is extended


class BigramConfig(TargetFields):
    """The size of the table, besides what every config has of its target; saved under a `model_type` of its own."""

    model_type = "hf_specdec_bigram"

    vocab_size: int = 32000
    rank: int = 32


@dataclass(slots=True, kw_only=True)
class BigramOptions(TreeOptions):
    """Drafting options of a bigram table.

    Attributes:
        length: levels of the tree below the root.
    """

    method = "bigram"
    length: int = 4

    def validate(self, config: Any = None) -> None:
        """As for every drafter."""
        TreeOptions.validate(self, config)
        self.check_integers(length=64)


class BigramDrafter(PretrainedDrafter):
    """The object that `generate` gets; it makes a generator per call."""

    config_class = BigramConfig
    options_class = BigramOptions
    card_summary = "A bigram table: it predicts each token from the one before it."

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.inner, self.outer = nn.Embedding(config.vocab_size, config.rank), nn.Linear(config.rank, config.vocab_size)
        self.post_init()

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., vocab], logits of the next token; ids beyond the table are read as its last."""
        return self.outer(self.inner(token_ids.clamp(max=self.config.vocab_size - 1)))

    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the vocabularies differ by more than padding and added tokens."""
        check_shapes(self, model, vocab_size=self.config.vocab_size, may_exceed=True)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return BigramGenerator(self, target)


class BigramGenerator(TreeCandidateGenerator):
    """Drafts in one call. Override `observe` to see what each round committed."""

    def __init__(self, drafter: BigramDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.to_target = TargetVocabularyLogitsProcessor(num_tokens(target.model))

    def next_logits(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., vocab] float32; tokens that the target lacks are never drafted."""
        return self.to_target(None, self.drafter(token_ids).float())

    @torch.no_grad()
    def draft(self, context: DraftContext) -> DraftTree:
        root_ids, depth = context.root_ids.to(self.drafter.device), self.drafter.options.length
        levels = grow_levels(
            self.next_logits(root_ids), lambda level, ids, above: self.next_logits(ids), depth, WIDTH, lambda ids: ids
        )
        budget = context.at_most(self.drafter.options.node_limit)
        return best_tree(root_ids, *levels, depth=depth, budget=budget)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Nothing is kept of rows, so that finished ones may leave the batch."""


def read_published(fields: dict[str, Any], stored: Headers | None) -> Reading:
    """Converts a published layout, whose keys and tensors have other names than ours."""
    names = {"table.in": "inner.weight", "table.out": "outer.weight", "table.bias": "outer.bias"}
    ours = {"vocab_size": fields["tokens"], "rank": fields["bigram_rank"], "target_name_or_path": fields.get("base")}
    return Reading(ours, {name: names.get(name, name) for name in stored or ()})


class BigramStep(TrainingStep):
    """The loss that --loss names, at every token that the target wrote."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        ids, next_ids = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
        place = torch.arange(1, batch["input_ids"].shape[1], device=ids.device)
        learned = (place >= batch["first_anchor"].unsqueeze(1)) & (place < batch["length"].unsqueeze(1))
        logits, last_hidden = model(ids), self.reader.of_batch(batch).last_hidden
        with torch.no_grad():  # "ce" does not need the target's logits
            target_logits = None if last_hidden is None else self.reader.head(last_hidden[:, :-1][learned])
        losses = position_losses(self.loss, logits[learned], target_logits, next_ids[learned])
        return StepOutput(losses.mean(), (logits.argmax(-1) == next_ids).unsqueeze(-1), learned.unsqueeze(-1))


def make(target: PreTrainedModel) -> BigramDrafter:
    """An untrained drafter for a target: for training, and for the library's tests (`pytest --method`)."""
    return BigramDrafter(BigramConfig(vocab_size=num_tokens(target)))


def prepare(options: TrainOptions, target: PreTrainedModel, source: RowSource) -> tuple[BigramDrafter, BigramStep]:
    """What `train --method bigram` trains, and how."""
    drafter = make(target)
    return drafter, BigramStep(drafter, target, options.loss)


register(
    "bigram",
    BigramDrafter,
    layouts=(
        Format(
            "bigram table",
            "bigram",
            read_published,
            Section(frozenset(("tokens", "bigram_rank", "base")), TRANSFORMERS),
            recognises=lambda config: "bigram_rank" in config,
        ),
    ),
    serving=Serving(not_exported="vLLM has no class for bigram tables"),
)
register_recipe(Recipe("bigram", TrainOptions, prepare))


if __name__ == "__main__":
    tokenizer, model = (auto.from_pretrained(sys.argv[1]) for auto in (AutoTokenizer, AutoModelForCausalLM))
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=48)
    drafter = make(model)
    step = BigramStep(drafter, model, "kl")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    rows = {"input_ids": text, "first_anchor": torch.tensor([1]), "length": torch.tensor([text.shape[1]])}
    for _ in range(20):  # `hf-specdec train` does this with much text
        optimizer.zero_grad()
        step(drafter, rows, training=True).loss.backward()
        optimizer.step()
    with TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        drafter = load_drafter(folder, model)
    output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=48)
    print(tokenizer.decode(output[0]), drafter.stats)

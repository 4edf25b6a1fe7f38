"""A whole drafting method in one file: network, options, drafting, published layout, registration and training.

The method is a bigram table: a small network predicts each token from the one before it. A method only drafts; the
library verifies, accepts and commits. Run it:

    python examples/custom_drafter.py examples/tiny-code/target
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec import (
    DraftContext,
    DrafterOptions,
    DraftTree,
    Serving,
    TargetModel,
    TreeCandidateGenerator,
    load_drafter,
    register,
)
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.hub.formats.base import Format, Headers, Reading
from hf_specdec.hub.formats.keys import TRANSFORMERS, Section
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.losses import position_losses
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import Source
from hf_specdec.training.step import StepOutput, TrainingStep


class BigramConfig(TargetFields):
    """The size of the table, besides what every config has of its target; saved under a `model_type` of its own."""

    model_type = "hf_specdec_bigram"

    vocab_size: int = 32000
    rank: int = 32


@dataclass(slots=True, kw_only=True)
class BigramOptions(DrafterOptions):
    """`length`: tokens of a draft."""

    method = "bigram"
    length: int = 4

    def validate(self, config: Any = None) -> None:
        """As for every drafter."""
        DrafterOptions.validate(self, config)
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
        """[...] int64 -> [..., vocab], logits of the next token."""
        return self.outer(self.inner(token_ids))

    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the vocabularies have different sizes."""
        check_shapes(self, model, vocab_size=self.config.vocab_size)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return BigramGenerator(self)


class BigramGenerator(TreeCandidateGenerator):
    """Drafts in one call. Override `observe` to see what each round committed."""

    def __init__(self, drafter: BigramDrafter) -> None:
        self.drafter = drafter

    @torch.no_grad()
    def draft(self, context: DraftContext) -> DraftTree:
        chain = [context.root_ids.to(self.drafter.device)]
        for _ in range(self.drafter.options.length):
            chain.append(self.drafter(chain[-1]).argmax(-1))
        return DraftTree.chain(torch.stack(chain, dim=1))


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


def prepare(options: TrainOptions, target: PreTrainedModel, source: Source) -> tuple[BigramDrafter, BigramStep]:
    """What `train --method bigram` trains, and how."""
    drafter = BigramDrafter(BigramConfig(vocab_size=target.get_input_embeddings().num_embeddings))
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
    drafter = BigramDrafter(BigramConfig(vocab_size=model.get_input_embeddings().num_embeddings))
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

"""A drafting method in one file: it drafts the tokens that followed the previous occurrence of the last token.

A method only drafts; the library verifies, accepts and commits. Run it:

    python examples/custom_drafter.py examples/tiny-code/target
"""

import sys
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec import DraftContext, Drafter, DrafterOptions, DraftTree, TargetModel, TreeCandidateGenerator


@dataclass(slots=True, kw_only=True)
class EchoOptions(DrafterOptions):
    """`length`: tokens of a draft."""

    method = "echo"
    length: int = 6


class EchoDrafter(Drafter):
    """The object that `generate` gets; it makes a generator per call."""

    options_class = EchoOptions

    def __init__(self, **options: Any) -> None:
        self.options = EchoOptions(**options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return EchoGenerator(self.options.length)


class EchoGenerator(TreeCandidateGenerator):
    """Drafts in one call. Override `observe` to see what each round committed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def draft(self, context: DraftContext) -> DraftTree:
        chains = []
        for row, length in zip(context.sequences.tolist(), context.lengths, strict=True):
            *text, root = row[:length]
            place = len(text) - text[::-1].index(root) if root in text else length  # behind its last occurrence
            chains.append([root, *row[place:length][: self.length]])
        return DraftTree.from_lists(chains, [list(range(-1, len(chain) - 1)) for chain in chains])


if __name__ == "__main__":
    tokenizer, model = (auto.from_pretrained(sys.argv[1]) for auto in (AutoTokenizer, AutoModelForCausalLM))
    inputs, drafter = tokenizer("def add(a, b):\n", return_tensors="pt"), EchoDrafter()
    output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=48)
    print(tokenizer.decode(output[0]), drafter.stats)

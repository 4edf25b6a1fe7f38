"""A drafting method of your own in one file: it drafts what followed the last token when it was written before.

Drafting is all that a method has to say; verifying, accepting and committing are the library's. Run it:

    python examples/custom_drafter.py examples/tiny-code/target
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec import DraftContext, Drafter, DrafterOptions, DraftTree, TargetModel, TreeCandidateGenerator


@dataclass(slots=True, kw_only=True)
class EchoOptions(DrafterOptions):
    """`length`: tokens of a draft."""

    method = "echo"
    length: int = 6


class EchoDrafter(Drafter):
    """What `generate` is given; it makes a generator per call."""

    options_class = EchoOptions

    def __init__(self) -> None:
        self.options = EchoOptions()

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return EchoGenerator(self.options.length)


class EchoGenerator(TreeCandidateGenerator):
    """Drafts in one call. A method that remembers something of the call takes note of it in `observe`."""

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
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48, assistant_model=drafter)[0]), drafter.stats)

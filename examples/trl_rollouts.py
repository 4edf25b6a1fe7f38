"""GRPO of TRL with drafted rollouts: the time of the rollouts with and without the drafter, on SmolLM2-135M-Instruct.

    pip install trl
    python examples/trl_rollouts.py

`attach` is all that is added to a script of TRL. The rollouts follow the target's own distribution, with the weights of
the step. A batch of rollouts begins with many rows, where drafting gains little, and ends with the few longest ones,
where it gains most; with `tree_budget="auto"`, a round drafts as much as pays for the rows that are left.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from smollm2 import model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import attach, load_drafter

PROMPTS = [
    "Name three rivers of Europe.",
    "Write a short letter to a neighbour.",
    "What is a prime number?",
    "Count to 30.",
]
STEPS = 2


def short(completions: list[list[dict[str, str]]], **others: object) -> list[float]:
    """A reward for short answers."""
    return [-float(len(completion[0]["content"])) for completion in completions]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from datasets import Dataset  # after the options: --help needs neither
    from trl import GRPOConfig, GRPOTrainer

    for drafted in (False, True):
        model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(model_folder())
        with tempfile.TemporaryDirectory() as folder:
            config = GRPOConfig(
                folder,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=96,
                max_steps=STEPS,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            )
            rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})
            trainer = GRPOTrainer(model, short, config, rows, processing_class=tokenizer)
            if drafted:
                drafter = load_drafter(Path(__file__).parent / "smollm2-135m" / "dflash", model, tree_budget="auto")
                attach(trainer.model, drafter)
            seconds, generate = [0.0], trainer.model.generate

            def timed(*args: object, **kwargs: object) -> object:
                started = time.perf_counter()
                output = generate(*args, **kwargs)  # noqa: B023 - called in this turn only
                seconds[0] += time.perf_counter() - started  # noqa: B023
                return output

            trainer.model.generate = timed
            trainer.train()
        print(f"{STEPS} rollouts {'with the drafter' if drafted else 'without'}: {seconds[0]:.1f} s", flush=True)
    print(drafter.stats)


if __name__ == "__main__":
    main()

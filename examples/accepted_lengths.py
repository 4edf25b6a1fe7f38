"""Accepted length of drafters on held-out prompts, without speeds: for a machine that does other things besides.

    python examples/accepted_lengths.py --target "$(python examples/smollm2.py)" \
        --prompts examples/smollm2-135m/held_out.jsonl --limit 16 --drafter ngram suffix token-recycling

Drafters are written as for `hf-specdec bench`, with options. Every round drafts, whether that pays here or not. With
--judge the output is not the target's own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from harness import about, load_inputs, load_target, mean_acceptance_length, table_of, wide_console, write_json

from hf_specdec.benchmark.variants import distinct, load
from hf_specdec.decoding.relaxed import Judge
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.drafting.vocabulary import frequent_token_ids
from hf_specdec.methods.ssd import SSDDrafter
from hf_specdec.training.answer_files import read_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", nargs="+", required=True, metavar="PATH[:OPTION=VALUE,...]")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts, evenly spaced over the file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--foresee", type=int, help="wrap the drafters in ssd, which verifies so many of their nodes")
    parser.add_argument("--fan-out", type=int, default=4, help="outcomes that ssd prepares")
    parser.add_argument("--draft-vocab", type=int, metavar="SIZE", help="draft only the most frequent tokens")
    parser.add_argument("--answers", type=Path, help="of `hf-specdec write`, in which --draft-vocab counts the tokens")
    parser.add_argument("--judge", type=Path, help="accept by this judge, a file of Judge.save")
    parser.add_argument("--dtype", help="of the target; default: float32, on CUDA bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    model, tokenizer = load_target(arguments.target, arguments.dtype)
    inputs = load_inputs(tokenizer, arguments.prompts, arguments.limit)
    variants = distinct(variant for spec in arguments.drafter for variant in load(spec, model) if variant.leads)
    for drafter in {id(variant.drafter): variant.drafter for variant in variants}.values():
        assert drafter is not None
        if arguments.judge:
            drafter.acceptance = Judge.load(arguments.judge)
        if arguments.draft_vocab:
            answers = [row["answer_ids"] for row in read_answers(arguments.answers)]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            drafter.restrict_vocabulary(frequent_token_ids(texts, tokenizer, arguments.draft_vocab))
    if arguments.foresee:
        variants = [
            replace(
                variant,
                name=f"ssd {variant.name}",
                drafter=SSDDrafter(
                    variant.drafter, tree_budget=arguments.foresee, fan_out=arguments.fan_out, trial=False
                ),
                settings={},
            )
            for variant in variants
        ]
    figures = []
    for variant in variants:
        row = {"drafter": variant.name}
        for temperature in arguments.temperature:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            calls = []
            for index, each in enumerate(inputs):
                variant.begin()
                torch.manual_seed(index)
                with always_drafting():
                    model.generate(
                        **each, assistant_model=variant.drafter, max_new_tokens=arguments.new_tokens, **sampling
                    )
                assert variant.drafter is not None
                calls.append(variant.drafter.stats)
            row[f"{temperature:g}"] = f"{mean_acceptance_length(calls):.2f}"
            if prepared := sum(stats.num_prepared for stats in calls):
                row[f"{temperature:g}"] += f", {sum(stats.num_foreseen for stats in calls) / prepared:.0%} foreseen"
        figures.append(row)
        print(row, flush=True)
    rows = [list(row.values()) for row in figures]
    headings = ["drafter", *(f"temperature {temperature:g}" for temperature in arguments.temperature)]
    title = f"accepted length a round, {len(inputs)} prompts, {arguments.new_tokens} tokens"
    wide_console().print(table_of(title, headings, rows))
    write_json(arguments.json, {"prompts": len(inputs), "figures": figures, **about()})


if __name__ == "__main__":
    main()

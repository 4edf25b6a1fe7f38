"""Make the bundled target `examples/tiny-code/target`: a small Llama-style model of Python functions.

Everything comes from the machine itself: the training text is the permissively licensed Python source of the standard
library and of the packages that hf_specdec depends on, so no download is needed. One command makes the target, its
tokenizer and the held-out prompts:

    python examples/train_tiny_code.py

`examples/train_drafter.py` then trains drafters for it. Documents are single functions, each with its signature,
docstring and body, de-duplicated; whole modules are held out, so that no held-out function shares a file (or a body)
with a training function.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import re
import shlex
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_specdec.training.optimizer import MuonWithAdamW

# Standard library (PSF-2.0) and dependencies under BSD, MIT or Apache-2.0 licences, all of which pip installs with
# hf_specdec[train]. Packages under weaker-known or copyleft terms (tqdm, certifi) are left out on purpose.
PACKAGES = ("torch", "transformers", "accelerate", "peft", "huggingface_hub", "numpy", "sympy", "networkx", "mpmath",
            "jinja2", "fsspec", "datasets")  # fmt: skip
END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"


def source_files() -> Iterator[tuple[str, Path]]:
    """Yields (package name, file) for every Python file of the corpus, tests left out."""
    roots = [("python", Path(sysconfig.get_path("stdlib")))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"The corpus needs the package {package!r}: install hf_specdec[train].")
        roots.append((package, Path(spec.origin).parent))
    for package, root in roots:
        for file in sorted(root.rglob("*.py")):
            parts = set(file.relative_to(root).parts)
            if not parts & {"site-packages", "tests", "test", "testing", "_vendor", "lib2to3", "idlelib"}:
                yield f"{package}/{file.relative_to(root).as_posix()}", file


def functions_of(file: Path) -> Iterator[tuple[str, str | None]]:
    """Yields (dedented source, prompt) of each function; the prompt is signature plus docstring, if it has one."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        if not text.startswith("def ") or not 80 <= len(text) <= 1200 or text.count("\n") < 3:
            continue
        has_body = len(node.body) > 1 and ast.get_docstring(node) is not None
        # Without the line break: it is one token with the indentation that follows, and alone it ends a text.
        prompt = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])) if has_body else None
        yield text, prompt


def build_corpus(held_out_share: float = 0.03) -> tuple[list[str], list[str], list[dict[str, str]]]:
    """Training functions, held-out functions and held-out prompts, from whole held-out modules."""
    train, held_out, seen = [], [], set()
    prompts = []
    for name, file in source_files():
        is_held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < held_out_share * 1000
        for text, prompt in functions_of(file):
            # The body without its name: copies of one function under several names count once.
            key = hashlib.sha256(re.sub(r"\s+", "", text.split("(", 1)[1]).encode()).digest()
            if key in seen:
                continue
            seen.add(key)
            (held_out if is_held_out else train).append(text)
            if is_held_out and prompt is not None and 120 <= len(prompt) <= 420 and len(text) - len(prompt) > 200:
                prompts.append({"source": name, "prompt": prompt})
    return train, held_out, prompts


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; the mask token that block drafters write is part of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int, seed: int = 0) -> Dataset:
    """Joins shuffled documents, each opened by the end-of-text token, and cuts them into rows of `length` tokens."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    stream: list[int] = []
    for encoded in tokenizer([texts[i] for i in order], return_attention_mask=False)["input_ids"]:
        stream += [tokenizer.eos_token_id, *encoded]
    rows = len(stream) // length
    ids = torch.tensor(stream[: rows * length]).view(rows, length).tolist()
    # Labels are given: transformers' collator would leave out the end-of-text token, because it pads with it.
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tiny-code")
    parser.add_argument("--work-dir", type=Path, default=Path("build/tiny-code"), help="checkpoints, resumable")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=10, help="rows per step")
    parser.add_argument("--length", type=int, default=320, help="tokens per row")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    arguments = parser.parse_args()
    set_seed(0)

    train_texts, held_out_texts, prompts = build_corpus()
    tokenizer = train_tokenizer(train_texts, arguments.vocab_size)
    train_rows = pack(train_texts, tokenizer, arguments.length)
    held_out_rows = pack(held_out_texts, tokenizer, arguments.length)
    train_tokens, held_out_tokens = len(train_rows) * arguments.length, len(held_out_rows) * arguments.length
    print(f"{len(train_texts)} functions, {train_tokens / 1e6:.1f}M training tokens", flush=True)
    print(f"{held_out_tokens / 1e3:.0f}k held-out tokens, {len(prompts)} prompts", flush=True)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=arguments.vocab_size,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=14,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attention_dropout=0.0,
        )
    )
    settings = TrainingArguments(
        output_dir=str(arguments.work_dir / "target"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        lr_scheduler_type="linear",
        warmup_steps=arguments.steps // 50,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=max(1, arguments.steps // 3),
        save_steps=max(1, arguments.steps // 12),
        save_total_limit=1,
        logging_steps=50,
        report_to="none",
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        optimizers=(MuonWithAdamW(model, arguments.learning_rate), None),
    )
    started = time.time()
    trainer.train(resume_from_checkpoint=arguments.resume)
    loss = trainer.evaluate()["eval_loss"]
    minutes = (time.time() - started) / 60

    target_dir = arguments.output / "target"
    model.config.use_cache = model.generation_config.use_cache = True  # the trainer turns it off
    model.to(torch.bfloat16).save_pretrained(target_dir)
    tokenizer.save_pretrained(target_dir)
    # A fixed, evenly spread choice of prompts, so that every package is heard.
    chosen = prompts[:: max(1, len(prompts) // 96)][:96]
    (arguments.output / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    record = {
        "training_tokens": arguments.steps * arguments.batch_size * arguments.length,
        "corpus_tokens": len(train_rows) * arguments.length,
        "held_out_loss_per_token": round(loss, 4),
        "minutes": round(minutes, 1),
        "hardware": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }
    write_card(arguments.output, record)


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Share of the n-grams of a continuation that occurred in it before: 0 for fresh text, near 1 for a loop."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.no_grad()
def write_card(folder: Path, record: dict[str, Any]) -> None:
    """Measures how much the target repeats itself on the held-out prompts, and writes its record and model card."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    shares, lengths = [], []
    for line in (folder / "prompts.jsonl").read_text().splitlines():
        inputs = tokenizer(json.loads(line)["prompt"], return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=128, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ].tolist()
        shares.append(repeated_share(written))
        lengths.append(len(written))
    record = record | {
        "parameters": model.num_parameters(),
        "repeated_8_grams_in_greedy_continuations": round(sum(shares) / len(shares), 3),
        "mean_continuation_length_of_at_most_128": round(sum(lengths) / len(lengths), 1),
    }
    (folder / "target" / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in record.items())
    (folder / "target" / "README.md").write_text(CARD.format(rows=rows, packages=", ".join(PACKAGES)))


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code]
---

# tiny-code target

A 14-layer Llama-style model of Python functions, small enough to ship with hf_specdec and to run on a laptop. It exists
to show and test speculative decoding: its code looks like Python and does nothing useful.

Trained on the functions (signature, docstring, body; de-duplicated) of the Python standard library and of these
packages as installed, tests left out, all under PSF, BSD, MIT or Apache-2.0 licences: {packages}. Whole modules, 3% of
all, are held out; the prompts in `../prompts.jsonl` are signatures with docstrings from those modules.

| | |
|---|---|
{rows}

A small model that repeats itself makes any drafter look good. The share of repeated 8-grams above says how much this
one does in greedy decoding; look at sampled figures beside greedy ones.

Made by the command above. Where the hardware above is a CPU, the training was cut short for time: the same command on
a GPU with more `--steps` makes a better model, and the drafters beside it must then be trained anew.
"""


if __name__ == "__main__":
    main()

"""Training rows: text that the target wrote itself, plain text, and mixtures of both.

A row is a sequence of tokens with three columns: `input_ids`, which may be padded at the end; `first_anchor`, the
first position at which a block may start, which excludes the prompt; and `length`, the tokens before the padding.
Drafters learn most from the target's own continuations, because these are what they have to predict.
The target's states of these rows are in `features.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_specdec.training.features import fingerprint, settings_of
from hf_specdec.training.progress import token_progress

if TYPE_CHECKING:
    import datasets

COLUMNS = ("input_ids", "first_anchor", "length")


def datasets_package() -> Any:
    """The package `datasets`, or an ImportError that names the extra to install."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "Training rows need the package datasets, which is not installed: pip install 'hf_specdec[train]'. "
            "Drafting and generation work without it."
        ) from error
    return datasets


def pack_text(documents: Iterable[Sequence[int]], length: int, *, separator_id: int | None = None) -> datasets.Dataset:
    """Concatenates tokenized documents and splits them into rows of `length` tokens; drops an incomplete last row.

    Args:
        documents: token ids of each document.
        length: tokens per row.
        separator_id: inserted before each document; None for nothing.

    Raises:
        ValueError: the documents have fewer tokens than one row.
    """
    stream: list[int] = []
    for document in documents:
        stream += ([] if separator_id is None else [separator_id]) + list(document)
    count = len(stream) // length
    if count == 0:
        raise ValueError(f"The documents have {len(stream)} tokens, less than one row of {length}.")
    rows = [stream[index * length : (index + 1) * length] for index in range(count)]
    return datasets_package().Dataset.from_dict(
        {"input_ids": rows, "first_anchor": [1] * count, "length": [length] * count}
    )


def mix(own: datasets.Dataset, plain: datasets.Dataset, plain_share: float) -> datasets.Dataset:
    """All rows of `own` and as many of `plain` as give them `plain_share` of the mixture, shuffled.

    Raises:
        ValueError: the share is not in [0, 1), `plain` has too few rows, or rows differ in length.
    """
    wanted = plain_rows(len(own), len(plain), plain_share)
    if wanted == 0:
        return own.shuffle(seed=0)
    lengths = len(own[0]["input_ids"]), len(plain[0]["input_ids"])
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"Written rows have {lengths[0]} tokens and rows of plain text {lengths[1]}; pack to one length."
        )
    chosen = plain.shuffle(seed=0).select(range(wanted))
    return datasets_package().concatenate_datasets([own, chosen]).shuffle(seed=0)


def plain_rows(num_own: int, num_plain: int, plain_share: float) -> int:
    """How many of `num_plain` rows of plain text give `plain_share` of a mixture with `num_own` written rows.

    Raises:
        ValueError: the share is not in [0, 1), or needs more than `num_plain` rows.
    """
    if not 0 <= plain_share < 1:
        raise ValueError(f"plain_share={plain_share} must be at least 0 and less than 1.")
    wanted = round(num_own * plain_share / (1 - plain_share))
    if wanted > num_plain:
        raise ValueError(
            f"plain_share={plain_share} of a mixture with {num_own} written rows needs {wanted} rows of plain text, "
            f"but there are {num_plain}: give more text, a smaller share or fewer rows to write."
        )
    return wanted


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows, with or without cached states, into a batch; shorter ones get zeros at the end."""
    columns = {key: [torch.as_tensor(row[key]) for row in rows] for key in rows[0]}
    return {
        key: torch.stack(column) if column[0].ndim == 0 else nn.utils.rnn.pad_sequence(column, batch_first=True)
        for key, column in columns.items()
    }


class _MostFinished(StoppingCriteria):
    """Ends a batch when a share of its rows has ended; the other rows are cut.

    It runs after every token, so it also updates `progress`.
    """

    def __init__(self, prompt_length: int, end_ids: Tensor, share: float, progress: tqdm) -> None:
        self.prompt_length, self.end_ids, self.share = prompt_length, end_ids, share
        self.progress = progress

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.progress.update(len(input_ids))
        written = input_ids[:, self.prompt_length :]
        finished = torch.isin(written, self.end_ids.to(written.device)).any(1)
        stop = finished.float().mean() >= self.share
        return stop.expand(len(input_ids))


def check_documents(documents: Sequence[Sequence[int]], shortest: int) -> None:
    """Raises ValueError if no document is longer than `shortest` tokens, the shortest prompt.

    Some prompts must be shorter than their documents.
    """
    if not any(len(document) > shortest for document in documents):
        raise ValueError(
            f"None of {len(documents)} documents has more than {shortest} tokens, the length of the shortest prompt: "
            "give longer documents, or lower prompt_lengths."
        )


def documents_hash(documents: Sequence[Sequence[int]]) -> str:
    """A hash of tokenized documents."""
    return hashlib.sha256(json.dumps([list(map(int, d)) for d in documents]).encode()).hexdigest()


def write_continuations(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    folder: str | Path,
    *,
    num_rows: int,
    prompt_lengths: tuple[int, int] = (32, 96),
    new_tokens: int = 224,
    temperatures: Sequence[float] = (0.0, 0.0, 0.0, 0.8),
    batch_size: int = 128,
    finished_share: float = 0.75,
    max_minutes: float | None = None,
    worker: tuple[int, int] = (0, 1),
    held_out: bool = False,
    seed: int = 0,
) -> datasets.Dataset:
    """Lets the target continue the beginnings of documents, and writes the rows to disk.

    One batch is one part on disk. A part depends only on its number and the recipe, so an interrupted call can be
    continued, a call for more rows adds parts, and several processes can share the work.

    Args:
        model: the target.
        documents: token ids of the documents whose beginnings are the prompts.
        folder: parent of the cache; a subfolder is named after the recipe (target with its generation config,
            documents, and the following arguments that change the text), and holds it as `recipe.json`.
        num_rows: rounded up to complete batches.
        prompt_lengths: shortest and longest prompt in tokens; all prompts of a batch have the same length.
        new_tokens: most tokens to write per prompt.
        temperatures: of the batches, in turn; 0 is greedy.
        batch_size: prompts per batch.
        finished_share: a batch ends early when this share of its rows has ended.
        max_minutes: no batch is begun after this time.
        worker: (rank, number of workers); this call writes every n-th part and returns only its own parts.
        held_out: marks the rows as held out, for `training_folders`.
        seed: of prompts and sampling.

    Returns:
        Rows of `prompt_lengths[1] + new_tokens` tokens with the columns of this module; no rows if there are fewer
        batches than workers and this worker has none.

    Raises:
        ValueError: `num_rows` or `prompt_lengths` is not valid, no document is long enough for a prompt, or there was
            no time for any batch.
    """
    datasets = datasets_package()
    if num_rows < 1:
        raise ValueError(f"The number of rows to write is {num_rows}, but must be at least 1.")
    shortest, longest = prompt_lengths
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"Prompts of {shortest} to {longest} tokens are not possible: the shortest must have at least 1 token and "
            "at most as many as the longest."
        )
    check_documents(documents, prompt_lengths[0])
    lengths = torch.tensor([len(document) for document in documents])
    recipe = {
        "target": fingerprint(model),
        "generation_config": settings_of(model.generation_config),
        "documents": documents_hash(documents),
        "prompt_lengths": list(prompt_lengths),
        "new_tokens": new_tokens,
        "temperatures": list(temperatures),
        "batch_size": batch_size,
        "finished_share": finished_share,
        "held_out": held_out,
        "seed": seed,
    }
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    own = Path(folder) / f"continuations-{name}"
    own.mkdir(parents=True, exist_ok=True)
    (own / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")

    rank, workers = worker
    files = [own / f"part-{number:06d}" for number in range(rank, -(-num_rows // batch_size), workers)]
    missing = [file for file in files if not file.exists()]
    action = "target writes" if workers == 1 else f"target writes (process {rank + 1} of {workers})"
    started = time.monotonic()
    max_seconds = None if max_minutes is None else 60 * max_minutes
    total = len(missing) * batch_size * new_tokens
    with token_progress(action, total, max_seconds=max_seconds, shown=rank == 0) as progress:
        for part in missing:
            if max_seconds is not None and time.monotonic() - started >= max_seconds:
                break
            number = int(part.name.removeprefix("part-"))
            rows = _write_batch(model, documents, lengths, recipe, number, progress)
            unfinished = own / f"unfinished-{number:06d}-{os.getpid()}"
            datasets.Dataset.from_dict(rows).save_to_disk(unfinished)
            if part.exists():  # another process has written the same part
                shutil.rmtree(unfinished)
            else:
                unfinished.rename(part)
    parts = [datasets.load_from_disk(file) for file in files if file.exists()]
    if not files:
        return datasets.Dataset.from_dict({column: [] for column in COLUMNS})
    if not parts:
        raise ValueError(
            f"max_minutes={max_minutes} was too short to write a batch of {batch_size} rows: give more time."
        )
    return datasets.concatenate_datasets(parts)


def training_folders(folder: Path) -> list[Path]:
    """The subfolders of `folder` with rows of `write_continuations` that are not held out."""
    recipes = sorted(folder.glob("continuations-*/recipe.json"))
    # Folders of earlier versions have no such key, and may hold held-out rows.
    return [file.parent for file in recipes if json.loads(file.read_text()).get("held_out") is False]


@torch.no_grad()
def _write_batch(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    lengths: Tensor,
    recipe: dict[str, Any],
    number: int,
    progress: tqdm,
) -> dict[str, list[Any]]:
    chosen = torch.Generator().manual_seed(recipe["seed"] * 1_000_003 + number)
    shortest, longest = recipe["prompt_lengths"]
    longest = min(longest, int(lengths.max()) - 1)
    prompt_length = int(torch.randint(shortest, longest + 1, (), generator=chosen))
    fitting = (lengths > prompt_length).nonzero().squeeze(1)
    picks = fitting[torch.randint(len(fitting), (recipe["batch_size"],), generator=chosen)].tolist()
    prompts = torch.tensor([list(documents[index][:prompt_length]) for index in picks], device=model.device)

    temperature = recipe["temperatures"][number % len(recipe["temperatures"])]
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    end = model.generation_config.eos_token_id
    end_ids = torch.tensor([] if end is None else [end] if isinstance(end, int) else end, dtype=torch.long)
    stopping = StoppingCriteriaList([_MostFinished(prompt_length, end_ids, recipe["finished_share"], progress)])
    # generate() draws from the global generator, whose state is restored.
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(recipe["seed"] * 1_000_003 + number)
        written = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=recipe["new_tokens"],
            pad_token_id=0 if end is None else int(end_ids[0]),
            stopping_criteria=stopping,
            cache_implementation="static" if model.device.type == "cpu" else None,  # faster there
            use_cache=True,
            disable_compile=True,
            **sampling,
        ).cpu()
    progress.total -= len(written) * (prompt_length + recipe["new_tokens"] - written.shape[1])
    width = recipe["prompt_lengths"][1] + recipe["new_tokens"]
    rows = torch.zeros(len(written), width, dtype=torch.long)
    rows[:, : written.shape[1]] = written
    ended = torch.isin(written[:, prompt_length:], end_ids)
    first_end = torch.where(ended.any(1), ended.int().argmax(1) + 1, ended.shape[1])
    # The end-of-text token is drafted too; the padding after it is not.
    return {
        "input_ids": rows.tolist(),
        "first_anchor": [prompt_length] * len(rows),
        "length": (prompt_length + first_end).tolist(),
    }

"""Training H-RAD: runs the pair to collect examples, balances the classes, and trains a small network.

`python examples/train_hrad.py --target T --draft-model D --text T.jsonl --output O` does this for any pair; use --data
instead of --text for an assistant model:

1. The pair generates without parallel drafting, with drafts of a fixed length. Every draft gives one example: the
   target's last K layers at the last verified token and the embedding of the token after it, and whether none, a part
   or all of the draft was accepted.
2. Rare classes get synthetic examples by SMOTE on standardised features.
3. The network trains with the paper's settings until its loss on held-out prompts stops improving.

Source: SpecBranch, Section 5.1 and Appendix E.4. H-RAD is used in `methods/specbranch/`.
"""

from __future__ import annotations

import copy
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.exchange import Committed
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafting.fingerprint import tokenizer_fingerprint
from hf_specdec.drafting.reader import last_features
from hf_specdec.drafting.targets import target_tokenizer, whole_target
from hf_specdec.hub.saving import check_free, check_writable
from hf_specdec.methods.specbranch import HRAD, SpecBranchConfig, SpecBranchDrafter
from hf_specdec.methods.specbranch.network import OWN_DRAFT_MODEL, last_layers
from hf_specdec.progress import Progress
from hf_specdec.training.answer_files import is_answers, read_answers
from hf_specdec.training.conversation_answers import check_template, read_conversations
from hf_specdec.training.options import CommandOptions, Count, Positive, Share, parse
from hf_specdec.training.source import check_width, opening
from hf_specdec.training.text import Corpus, chosen_corpus
from hf_specdec.version import install_command

CLASSES = ("all reject", "partial", "all accept")


@dataclass(frozen=True)
class Examples:
    """Training examples of H-RAD.

    Attributes:
        inputs: [examples, (K + 1) * hidden] float32, features and embedding (SpecBranch, Eq. 4).
        classes: [examples] int64: 0 none of the draft was accepted, 1 a part, 2 all of it.
    """

    inputs: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of the training of H-RAD; the defaults are those of SpecBranch, Appendix E.4.

    Attributes:
        epochs: upper bound.
        patience: epochs without a lower held-out loss after which training stops.
        batch_size: examples per step.
        learning_rate: of AdamW; halved after two epochs without a lower loss.
        weight_decay: of AdamW.
        label_smoothing: of the cross entropy.
        neighbours: of SMOTE; fewer if a class has fewer examples.
        clip: maximal gradient norm.
    """

    epochs: int = 20
    patience: int = 5
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 1e-4
    label_smoothing: float = 0.1
    neighbours: int = 5
    clip: float = 1.0


@dataclass(kw_only=True)
class HRADOptions(CommandOptions):
    """Options of the command."""

    overwrite: bool = HfArg(default=False, help="replace a drafter that the folder --output holds")
    draft_model: str = HfArg(help="folder or Hub id of a model with the target's tokenizer")
    text: Path | None = HfArg(default=None, help='.jsonl with a field "text", or .txt')
    data: list[str] | None = HfArg(
        default=None,
        help="instead of --text: conversations, or folders of answers: their user messages are the prompts",
    )
    refer_to: str | None = HfArg(
        default=None, help="name of the draft model in the checkpoint: a Hub id, or a path relative to --output"
    )
    with_draft_model: bool = HfArg(default=False, help="save the draft model inside the checkpoint")
    push_to_hub: str | None = HfArg(default=None, help="also publish it in this repository")
    license: str | None = HfArg(default=None, help="Hub licence id, for the drafter's card")
    prompt_tokens: Count = HfArg(default=48, help="length of the prompts, with --text")
    new_tokens: Count = HfArg(default=128, help="tokens to generate per prompt")
    num_prompts: Count = HfArg(default=400, help="most prompts")
    draft_length: Count = HfArg(default=8, help="tokens of every draft; about the speed ratio")
    min_confidence: Share = HfArg(default=0.4, help="epsilon of this pair, saved as the default of the drafting option")
    max_minutes: Positive | None = HfArg(default=None, help="time limit of running the pair")
    examples: Path | None = HfArg(default=None, help="file of the collected examples: used if it exists, else written")
    epochs: Count = HfArg(default=Settings.epochs, help="upper bound")
    learning_rate: Positive = HfArg(default=Settings.learning_rate, help="of AdamW at the start")


class _RecordingDrafter(SpecBranchDrafter):
    """Always drafts `depth` tokens, and notes for every draft the input that H-RAD would get, and the class."""

    examples: list[tuple[Tensor, int]]
    progress: Progress

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return last_layers(model, self.config.num_feature_layers)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        embeddings = target.model.get_input_embeddings()
        generator = super().candidate_generator(target)
        observe = generator.observe
        features: Any = None

        def note(committed: Committed) -> None:
            nonlocal features
            if committed.tree is not None:  # not the prefill
                self.progress.update(sum(committed.num_committed))
                roots = embeddings(committed.tree.token_ids[:, 0])
                inputs = torch.cat([features, roots], dim=-1).float().cpu()
                for own, count, accepted in zip(inputs, committed.num_committed, committed.num_accepted, strict=True):
                    if count:
                        kind = 0 if accepted == 0 else 2 if accepted == self.options.depth else 1
                        self.examples.append((own, kind))
            features = last_features(committed)
            observe(committed)

        generator.observe = note  # type: ignore[method-assign]
        return generator


def collect(
    target: PreTrainedModel,
    draft_model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: int,
    new_tokens: int,
    max_minutes: float | None = None,
    batch_size: int = 8,
) -> Examples:
    """Runs the pair over prompts, greedily and without parallel drafting, and records an example per draft.

    Args:
        target: the target.
        draft_model: the draft model.
        prompts: token ids.
        draft_length: tokens of every draft; about the speed ratio, which will bound it when drafting.
        new_tokens: to generate per prompt.
        max_minutes: no batch of prompts is begun after this time.
        batch_size: prompts per batch.

    Raises:
        ValueError: nothing was drafted.
    """
    recorder: Any = _RecordingDrafter.from_models(
        draft_model, target, pauses=False, parallel=False, lengths="fixed", depth=draft_length,
        speed_ratio=float(draft_length),
    )  # fmt: skip
    recorder.examples = []
    started = time.monotonic()
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    max_seconds = None if max_minutes is None else 60 * max_minutes
    recorder.progress = Progress("the pair writes", len(prompts) * new_tokens, unit="tokens", max_seconds=max_seconds)
    with recorder.progress:
        for batch in batches:
            if max_seconds is not None and time.monotonic() - started > max_seconds:
                break
            longest = max(map(len, batch))
            padding = [longest - len(prompt) for prompt in batch]
            ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
            before = recorder.progress.n
            target.generate(
                ids.to(target.device),
                attention_mask=mask.to(target.device),
                assistant_model=recorder,
                max_new_tokens=new_tokens,
                do_sample=False,
            )
            # Texts may end early, and the token of the prefill is not counted.
            recorder.progress.total -= len(batch) * new_tokens - (recorder.progress.n - before)
    if not recorder.examples:
        raise ValueError(
            f"{len(prompts)} prompts gave no example: give prompts, and more than {new_tokens} new tokens."
        )
    inputs, classes = zip(*recorder.examples, strict=True)
    return Examples(torch.stack(inputs), torch.tensor(classes))


def balance(examples: Examples, neighbours: int, seed: int) -> Examples:
    """Adds synthetic examples to rare classes, between neighbouring ones (SMOTE, Chawla et al. 2002).

    SMOTE runs on standardised features; the results are scaled back. A class with a single example has no neighbours
    and is not changed.

    Raises:
        ImportError: imbalanced-learn is not installed.
    """
    counts = torch.bincount(examples.classes, minlength=len(CLASSES)).tolist()
    several = [index for index, count in enumerate(counts) if count > 1]
    if len(several) < 2:
        return examples
    chosen = torch.isin(examples.classes, torch.tensor(several))
    mean, spread = standard(examples.inputs)
    scaled = ((examples.inputs - mean) / spread)[chosen]
    smote = _smote()(k_neighbors=min(neighbours, min(counts[index] for index in several) - 1), random_state=seed)
    inputs, classes = smote.fit_resample(scaled.numpy(), examples.classes[chosen].numpy())
    inputs = torch.from_numpy(inputs).float() * spread + mean
    alone = Examples(examples.inputs[~chosen], examples.classes[~chosen])
    return Examples(torch.cat([inputs, alone.inputs]), torch.cat([torch.from_numpy(classes), alone.classes]))


def _smote() -> Any:
    try:
        from imblearn.over_sampling import SMOTE
    except ImportError as error:
        raise ImportError(
            f"Training H-RAD needs imbalanced-learn: {install_command('train')}. Drafting works without it."
        ) from error
    return SMOTE


def standard(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every feature, [features] each; the latter is at least 1e-6."""
    return inputs.mean(0), inputs.std(0, correction=0).clamp(min=1e-6)


def fit(h_rad: HRAD, examples: Examples, held_out: Examples, settings: Settings, seed: int = 0) -> list[float]:
    """Trains `h_rad` in place; it ends with the weights of the lowest loss on `held_out`.

    Args:
        h_rad: untrained.
        examples: as collected; this function balances them.
        held_out: as collected, from other prompts: its loss decides on the learning rate and on early stopping.
        settings: see `Settings`.
        seed: of SMOTE, sampling and dropout.

    Returns:
        The loss on `held_out` after every epoch, nats.
    """
    torch.manual_seed(seed)
    mean, spread = standard(examples.inputs)
    h_rad.mean.copy_(mean)
    h_rad.spread.copy_(spread)
    balanced = balance(examples, settings.neighbours, seed)
    counts = torch.bincount(balanced.classes, minlength=len(CLASSES)).clamp(min=1)
    weights = (1.0 / counts)[balanced.classes]
    loader = DataLoader(
        TensorDataset(balanced.inputs, balanced.classes),
        batch_size=settings.batch_size,
        sampler=WeightedRandomSampler(weights.tolist(), len(weights)),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    optimizer = torch.optim.AdamW(h_rad.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    losses: list[float] = []
    best = copy.deepcopy(h_rad.state_dict())
    for _ in range(settings.epochs):
        h_rad.train()
        for inputs, classes in loader:
            optimizer.zero_grad()
            criterion(h_rad(inputs), classes).backward()
            nn.utils.clip_grad_norm_(h_rad.parameters(), settings.clip)
            optimizer.step()
        h_rad.eval()
        with torch.no_grad():
            # All classes have the same weight, as in training.
            parts = [
                criterion(h_rad(held_out.inputs[held_out.classes == kind]), held_out.classes[held_out.classes == kind])
                for kind in held_out.classes.unique()
            ]
            loss = float(torch.stack(parts).mean())
        if loss < min(losses, default=float("inf")):
            best = copy.deepcopy(h_rad.state_dict())
        losses.append(loss)
        plateau.step(loss)
        if len(losses) - losses.index(min(losses)) > settings.patience:
            break
    h_rad.load_state_dict(best)
    return losses


@torch.no_grad()
def confusion(h_rad: HRAD, examples: Examples) -> Tensor:
    """[true class, predicted class] int64 counts."""
    predicted = h_rad(examples.inputs).argmax(-1)
    return torch.bincount(examples.classes * len(CLASSES) + predicted, minlength=len(CLASSES) ** 2).view(
        len(CLASSES), -1
    )


def confusion_table(matrix: Tensor) -> str:
    """A confusion matrix to print, with the F1 score of each class.

    Examples:
        >>> print(confusion_table(torch.tensor([[8, 2, 0], [1, 1, 2], [0, 0, 5]])))
                      all reject   partial  all accept          F1
        all reject             8         2           0        0.84
        partial                1         1           2        0.29
        all accept             0         0           5        0.83
    """
    rows = [("", *CLASSES, "F1")]
    rows += [
        (name, *row, f"{score:.2f}")
        for name, row, score in zip(CLASSES, matrix.tolist(), f1_scores(matrix), strict=True)
    ]
    return "\n".join(f"{name:12}{none:>12}{part:>10}{whole:>12}{score:>12}" for name, none, part, whole, score in rows)


def f1_scores(matrix: Tensor) -> list[float]:
    """The F1 score of each class, from a confusion matrix of [true class, predicted class] counts."""
    scores: list[float] = (2 * matrix.diagonal() / (matrix.sum(0) + matrix.sum(1)).clamp(min=1)).tolist()
    return scores


def main(
    argv: Sequence[str], *, program: str = "python -m hf_specdec.training.hrad", corpus: Corpus | None = None
) -> None:
    """Trains H-RAD for a pair and saves, or publishes, a SpecBranch checkpoint; `--help` lists the options.

    Args:
        argv: the options.
        program: the command without the options, for the drafter's record.
        corpus: default of --text; None makes --text or --data required.

    Raises:
        ImportError: imbalanced-learn is not installed.
        OSError: a model or a file does not exist.
        ValueError: there is too little text, or models, examples and options do not fit each other.
    """
    description = "Train H-RAD for a target and a draft model."
    options = parse(HRADOptions, argv, program, description, required=corpus is None)
    _smote()  # fails before the pair runs
    if not options.overwrite:
        check_free(options.output, "give another --output, or --overwrite.")
    check_writable(options.output)
    set_seed(options.seed)
    started = time.monotonic()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = target_tokenizer(options.target)
    target, draft_model = (
        whole_target(name, dtype=dtype).to(device).eval() for name in (options.target, options.draft_model)
    )
    if options.data is not None:
        prompts = asked_prompts(options.data, tokenizer, options.num_prompts, options.seed)
        if len(prompts) < 2:
            raise ValueError(
                f"{' '.join(options.data)} holds {len(prompts)} conversation, but 2 are needed, to train on and to "
                "hold out: give more."
            )
    else:
        texts, _ = chosen_corpus(options.text, corpus).read()
        documents = tokenizer(texts)["input_ids"]
        prompts = cut_prompts(documents, options.prompt_tokens, options.num_prompts, options.seed)
        if len(prompts) < 2:
            raise ValueError(
                f"{len(documents)} documents gave {len(prompts)} prompts of --prompt-tokens {options.prompt_tokens} "
                f"tokens (--num-prompts {options.num_prompts}), but 2 are needed, to train on and to hold out: give "
                "more or longer documents, or shorter prompts."
            )
    for model in (target, draft_model):
        check_width(max(map(len, prompts)) + options.new_tokens, "prompts and --new-tokens together", model)
    own = draft_model.config.get_text_config(decoder=True)
    config = SpecBranchConfig.of_target(
        target,
        draft_model=draft_model.name_or_path or None,
        draft_hidden_size=own.hidden_size,
        draft_num_layers=own.num_hidden_layers,
        h_rad=True,
    )
    drafter = SpecBranchDrafter(config).eval()
    drafter.attach(draft_model)
    drafter.check_target(target)
    h_rad = drafter.h_rad
    assert h_rad is not None
    split = max(1, len(prompts) // 8)
    minutes = options.max_minutes
    wanted = {"draft_length": options.draft_length, "new_tokens": options.new_tokens}
    if options.examples is not None and options.examples.exists():
        held_out, examples = _read_examples(options.examples)
        if examples.inputs.shape[1] != len(h_rad.mean):
            raise ValueError(
                f"The examples in {str(options.examples)!r} have {examples.inputs.shape[1]} features each, but the "
                f"H-RAD of this pair reads {len(h_rad.mean)}: they were collected from another pair. Give another file "
                "with --examples."
            )
    else:
        both = ((prompts[:split], 1 / 8), (prompts[split:], 7 / 8))
        held_out, examples = (
            collect(target, draft_model, some, max_minutes=None if minutes is None else minutes * share, **wanted)
            for some, share in both
        )
        if options.examples is not None:
            _write_examples(options.examples, held_out, examples)
    collected_s = time.monotonic() - started

    settings = Settings(epochs=options.epochs, learning_rate=options.learning_rate)
    losses = fit(h_rad, examples, held_out, settings, options.seed)
    matrix = confusion(h_rad, held_out)
    print(f"{len(examples.classes)} examples, {len(losses)} epochs, best held-out loss {min(losses):.3f}")
    print(confusion_table(matrix))

    if options.with_draft_model:
        drafter.config.draft_model = OWN_DRAFT_MODEL
    elif options.refer_to:
        drafter.config.draft_model = options.refer_to
    drafter.set_options(min_confidence=options.min_confidence)
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    counts = torch.bincount(examples.classes, minlength=len(CLASSES)).tolist()
    drafter.training_record = {
        "data": f"{len(examples.classes)} drafts of {options.draft_length} tokens from running the pair greedily",
        "classes": dict(zip(CLASSES, counts, strict=True)),
        "f1_of_held_out": {name: round(score, 3) for name, score in zip(CLASSES, f1_scores(matrix), strict=True)},
        "epochs": len(losses),
        "held_out_loss": round(min(losses), 4),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "minutes_running_the_pair": round(collected_s / 60, 1),
        "command": f"{program} {shlex.join(argv)}",
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if options.license:
        drafter.training_record["license"] = options.license
    drafter.save_pretrained(options.output)
    if options.push_to_hub:
        drafter.push_to_hub(options.push_to_hub)


def _write_examples(file: Path, held_out: Examples, examples: Examples) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {"held_out": held_out, "train": examples}
    tensors = {f"{name}.inputs": part.inputs for name, part in parts.items()}
    save_file(tensors | {f"{name}.classes": part.classes for name, part in parts.items()}, file)


def _read_examples(file: Path) -> tuple[Examples, Examples]:
    tensors = load_file(file)
    held_out, examples = (
        Examples(tensors[f"{name}.inputs"], tensors[f"{name}.classes"]) for name in ("held_out", "train")
    )
    return held_out, examples


def asked_prompts(sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, most: int, seed: int) -> list[list[int]]:
    """At most `most` random prompts from conversations, in the target's chat template.

    Args:
        sources: folders of answers (`chat.write_answers`), with a prompt per turn, or conversations
            (`chat.read_conversations`), with one prompt up to the first user message.
        tokenizer: the target's.
        most: number of prompts.
        seed: of the choice.
    """
    check_template(tokenizer)
    found: list[list[int]] = []
    for source in sources:
        if is_answers(source):
            found += [row["prompt_ids"] for row in read_answers(Path(source))]
            continue
        for conversation in read_conversations(source):
            messages = opening(conversation.messages)
            found.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:most]
    return [found[index] for index in chosen.tolist()]


def cut_prompts(documents: Sequence[Sequence[int]], prompt_tokens: int, most: int, seed: int) -> list[list[int]]:
    """At most `most` prompts of `prompt_tokens` tokens, each from a random position of a document."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    for index in torch.randperm(len(documents), generator=generator).tolist():
        spare = len(documents[index]) - prompt_tokens
        if spare >= 0 and len(prompts) < most:
            start = int(torch.randint(spare + 1, (), generator=generator))
            prompts.append(list(documents[index][start : start + prompt_tokens]))
    return prompts

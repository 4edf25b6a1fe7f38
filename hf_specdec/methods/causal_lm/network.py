"""CausalLMDrafter: a language model of transformers as a drafter, its options, and how it is loaded."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import is_quantised, num_tokens
from hf_specdec.decoding.targets.support import check_supported
from hf_specdec.decoding.targets.trial import check_trees
from hf_specdec.decoding.upstream import keep_names
from hf_specdec.drafting.draft_model import DraftModel, target_ids_of, with_head_rows
from hf_specdec.drafting.fingerprint import first_difference, local_tokenizer
from hf_specdec.drafting.options import MAX_TREE_BUDGET, TreeOptions, is_number
from hf_specdec.drafting.pairing import warn_of_sizes
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.targets import check_numbers, loading_differences
from hf_specdec.drafting.vocabulary import draftable_rows, may_be_padding
from hf_specdec.drafting.wrapped import merged_adapters, unwrapped
from hf_specdec.hub.publishing import PublishedDrafter
from hf_specdec.methods.causal_lm.drafting import MAX_DEPTH, DraftModelChain, DraftModelTree, acceptance_bound


@dataclass(slots=True, kw_only=True)
class CausalLMOptions(TreeOptions):
    """Drafting options of a draft model.

    Attributes:
        method: `"causal_lm_tree"`, the likeliest paths, or `"causal_lm_chain"`, one path (SpS).
        depth: most tokens of a path, and most forwards of the draft model per round.
        tree_budget: see `TreeOptions`. An integer does not affect `"causal_lm_chain"`, which drafts `depth` tokens;
            `"auto"` shortens chains too.
        top_k: most nodes of a level that are extended, and most continuations of each of them.
        sample_drafts: if the call samples, a chain's tokens are sampled from the draft model's distribution (after the
            call's temperature, top-k, ...) and verified by rejection sampling; if False they are its likeliest tokens.
            Both are lossless. Trees always contain the likeliest tokens, and so do chains with `tree_budget="auto"`.
        min_confidence: a node is not expanded if the probability of its path is lower; None for no limit.
        min_acceptance: AdaEDL's threshold: a path ends after tokens drafted from a distribution for which
            1 - sqrt(entropy_weight * entropy) is lower; None for no limit.
        entropy_weight: of the entropy (nats) in that bound.
    """

    METHODS = ("causal_lm_chain", "causal_lm_tree")

    method: str = "causal_lm_tree"
    depth: int = 5
    top_k: int = 4
    sample_drafts: bool = True
    min_confidence: float | None = None
    min_acceptance: float | None = None
    entropy_weight: float = 0.2

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TREE_BUDGET)
        self.check_switches("sample_drafts")
        for name in ("min_confidence", "min_acceptance"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} must be above 0 and at most 1, or None for no limit.")
        if not is_number(self.entropy_weight) or not 0 < self.entropy_weight < float("inf"):
            raise ValueError(f"entropy_weight={self.entropy_weight!r} must be a positive number.")

    @property
    def least_log_path(self) -> float:
        """Log of `min_confidence`, nats; minus infinity for None."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    def certain(self, log_probs: Tensor) -> Tensor:
        """[..., vocab] -> [...] bool: whether tokens from these distributions are likely enough to be accepted."""
        if self.min_acceptance is None:
            return torch.ones(log_probs.shape[:-1], dtype=torch.bool, device=log_probs.device)
        return acceptance_bound(log_probs, self.entropy_weight) >= self.min_acceptance


class CausalLMDrafter(PublishedDrafter):
    """A causal language model as drafter: speculative sampling as first published, and a tree version of it.

    It needs no training; any model with the target's tokenizer works, and the more often the two agree, the more is
    accepted. It runs one forward per drafted level, while the drafters that read the target's hidden states (`dflash`,
    `ddtree`) draft all levels in one. Unlike transformers' assisted generation it drafts trees, supports batches, and
    keeps its cache between the rounds of a call.

    Its embedding may have more rows than the target's, or fewer, because of padding or added tokens. A token that the
    target lacks is never drafted; a token that the draft model lacks is read as its last row.

    Args:
        model: the draft model, also one with PEFT adapters, which draft too; shared, not copied. Saving it as a drafter
            stores the options in its config; nothing else changes it.
        drafting_options: of `CausalLMOptions`; they override the `drafting_options` of the draft model's config.

    Attributes:
        tokenizer_folder: where its tokenizer is; None for the folder or repo of the model.
    """

    fits = "It can draft for any target with the same tokenizer; the one it was trained for accepts most."
    options_class = CausalLMOptions
    options: CausalLMOptions
    card_summary = (
        "A plain language model as drafter: it drafts token by token, either the likeliest tree "
        '(`method="causal_lm_tree"`, the default) or one chain (`method="causal_lm_chain"`).'
    )

    def __init__(self, model: PreTrainedModel, **drafting_options: Any) -> None:
        self.model: PreTrainedModel = unwrapped(model)
        self.tokenizer_folder: Path | None = None
        self.draft_rows: Tensor | None = None  # of its head, if it drafts only some of its tokens; not saved
        self._head_rows: tuple[Any, PreTrainedModel] | None = None
        self.options = self.loaded_options()
        self.set_options(**drafting_options)

    @property
    def name_or_path(self) -> str:
        """Folder or Hub id of the draft model; its class if unknown."""
        return name_of(self.model)

    @property
    def device(self) -> torch.device:
        """Of the draft model; may differ from the target's."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the draft model; may differ from the target's."""
        return self.model.dtype

    def to(self, *args: Any, **kwargs: Any) -> CausalLMDrafter:
        """Moves the draft model, as `torch.nn.Module.to` does."""
        self.model.to(*args, **kwargs)
        return self

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the draft model as an ordinary language model, with records and card; `load_drafter` reads it."""
        drafter = self.without_adapters()
        drafter.store_options()
        with drafter.replacing_weights(Path(save_directory)) as unfinished:
            drafter.model.save_pretrained(unfinished, **kwargs)
        drafter.write_records(save_directory)

    def without_adapters(self) -> CausalLMDrafter:
        model = merged_adapters(self.model)
        if model is self.model:
            return self
        plain = copy.copy(self)
        plain.model, plain.measurements = model, None
        return plain

    def save_weights(self, folder: Path, max_shard_size: str | int | None) -> None:
        self.model.save_pretrained(folder, max_shard_size=max_shard_size)

    @property
    def target_ids(self) -> Tensor | None:
        """[rows] int64, the target's id of each row of its embedding, ascending; None if the ids are equal."""
        return target_ids_of(self.model)

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        own = self._row_ids()
        rows = draftable_rows(own, draft_vocab, int(own[-1]) + 1, self.name_or_path)
        with_head_rows(self.model, rows)  # raises where that is not possible
        self.draft_rows = rows

    def _row_ids(self) -> Tensor:
        """[rows] int64, the target's id of each row of its head."""
        ids = self.target_ids
        return torch.arange(num_tokens(self.model), device="cpu") if ids is None else ids

    def _with_draft_rows(self) -> tuple[PreTrainedModel, Tensor | None]:
        """The model that drafts, and the target's ids of the rows of its head; None if it drafts all of its tokens."""
        if self.draft_rows is None:
            return self.model, None
        weight = self.model.get_output_embeddings().weight
        key = (id(self.model), id(self.draft_rows), weight.device, weight.data_ptr(), weight._version)
        if self._head_rows is None or self._head_rows[0] != key:
            self._head_rows = key, with_head_rows(self.model, self.draft_rows)
        return self._head_rows[1], self._row_ids()[self.draft_rows]

    def set_vocabulary(self, target_ids: Tensor | None) -> None:
        """Stores in the config, as `draft_token_ids`, which of the target's tokens the rows of its embedding are.

        Args:
            target_ids: [rows] int64, ascending; None if the ids are equal.
        """
        if target_ids is None:
            self.model.config.__dict__.pop("draft_token_ids", None)
        else:
            self.model.config.draft_token_ids = target_ids.tolist()

    @property
    def saved_model(self) -> PreTrainedModel:
        return self.model

    def card_facts(self) -> dict[str, str]:
        config = self.model.config.get_text_config(decoder=True)
        return {
            "Method": self.loaded_options().method,
            "Model": f"{type(self.model).__name__}, {config.num_hidden_layers} layers, hidden size "
            f"{config.hidden_size}",
            "Vocabulary": str(num_tokens(self.model)) + ("" if self.target_ids is None else " of the target's tokens"),
        }

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        # On a CPU these models are too small to gain from compilation.
        compile_mode = self.options.compile_mode if cuda_graphs.can_capture(self.device) else "none"
        kind = DraftModelChain if self.method == "causal_lm_chain" else DraftModelTree
        model, head_ids = self._with_draft_rows()
        drafter = DraftModel(model, compile_mode=compile_mode, head_ids=head_ids)
        return kind(drafter, target, replace(self.options))

    def check_target(self, model: PreTrainedModel) -> None:
        target_name = name_of(model)
        try:
            check_supported(self.model)
            if self.device.type != "meta":  # without weights there is nothing to run
                check_trees(self.model)
        except ValueError as error:
            raise ValueError(f"{self.name_or_path!r} cannot draft for {target_name!r}: {error}") from error
        self._check_vocabulary(model, target_name)
        if "pairing" not in (known := self.known_of(model)):
            self._compare_once(model, target_name)
            known["pairing"] = True

    def _check_vocabulary(self, model: PreTrainedModel, target_name: str) -> None:
        target_ids, rows = self.target_ids, num_tokens(self.model)
        size = num_tokens(model)
        if self.draft_rows is not None and (most := int(self._row_ids()[self.draft_rows[-1]])) >= size:
            raise ValueError(
                f"draft_vocab of draft model {self.name_or_path!r} has ids up to {most}, but target {target_name!r} "
                f"has {size} embeddings: give ids of the target's tokenizer."
            )
        if target_ids is None:
            return
        ascending = bool((target_ids.diff() > 0).all())
        if len(target_ids) != rows or not ascending or int(target_ids[0]) < 0 or int(target_ids[-1]) >= size:
            raise ValueError(
                f"draft_token_ids in the config.json of draft model {self.name_or_path!r} must be {rows} ascending ids "
                f"of target {target_name!r}, one for each row of its embedding, from 0 to {size - 1}; they are "
                f"{len(target_ids)}, from {int(target_ids.min())} to {int(target_ids.max())}, "
                f"{'' if ascending else 'not '}ascending. Save the draft model again with the vocabulary that it was "
                "trained with, or use the target that it was trained for."
            )

    def _compare_sizes(self, model: PreTrainedModel, target_name: str) -> None:
        """Compares the sizes of the vocabularies, for pairs without two local tokenizers."""
        if self.target_ids is not None:  # a draft vocabulary is smaller on purpose
            return
        own, other = (num_tokens(each) for each in (self.model, model))
        if not may_be_padding(own, other):
            raise ValueError(
                f"Draft model {self.name_or_path!r} has a vocabulary of {own}, but target {target_name!r} has one of "
                f"{other}: more than padding or added tokens explain, and there are no two local tokenizers to "
                "compare. A draft model must use the target's tokens: choose one with the target's tokenizer, or, if "
                "it has that, put the tokenizers' files into the folders of both models."
            )
        warn_of_sizes(self.name_or_path, own, model)

    def _compare_once(self, model: PreTrainedModel, target_name: str) -> None:
        """The checks that take too long for every call."""
        tokenizer = local_tokenizer(str(self.tokenizer_folder or self.model.name_or_path))
        other = local_tokenizer(model.name_or_path)
        if tokenizer is None or other is None:
            self._compare_sizes(model, target_name)
        elif (difference := first_difference(tokenizer, other)) is not None:
            token_id, own_token, target_token = difference
            raise ValueError(
                f"Draft model {self.name_or_path!r} and target {target_name!r} have different tokenizers: id "
                f"{token_id} is {own_token!r} in the draft model's and {target_token!r} in the target's. A draft "
                "model must use the target's tokens: choose one with the target's tokenizer."
            )
        own_size, size = self.model.num_parameters(), model.num_parameters()
        # The weights of a quantised model may be packed, or not be parameters at all.
        if own_size > size and not (is_quantised(self.model) or is_quantised(model)):
            warnings.warn(
                f"Draft model {self.name_or_path!r} has {own_size:,} parameters, more than the {size:,} of target "
                f"{target_name!r}: drafting will cost more than it saves. Check that the two are not swapped.",
                stacklevel=3,
            )


# Names of a language model's weights within an image-text model, and by themselves.
PART_KEYS = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head\.)": "model.",
    r"^(language_model|text_model)\.lm_head\.": "lm_head.",
}


def load(config: dict[str, Any], name: str, folder: Path, dtype: torch.dtype | None, weights: bool) -> CausalLMDrafter:
    """Makes the drafter. Of an image-text model the language model drafts.

    Where transformers has no class for the language model alone, the whole model is loaded, whose other parts never
    run.

    Args:
        config: the checkpoint's `config.json`.
        name: what the user has passed.
        folder: of its files.
        dtype: of the weights; None for the stored one.
        weights: whether to load them; if not, the drafter is on the meta device, with its options and vocabulary.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: transformers has no such model, or the weights differ from those that the config describes, or
            contain NaN.
    """
    names, model_type = config.get("architectures") or (), config.get("model_type")
    known = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if not {*names} & {each for table in known for each in _classes(table.get(str(model_type)))}:
        raise ValueError(
            f"transformers {transformers.__version__} has no language model of architectures "
            f"{config.get('architectures')!r} and model_type {model_type!r}."
        )
    parsed: Any = CONFIG_MAPPING[str(model_type)].from_dict(config)
    own = parsed.get_text_config(decoder=True)
    is_part = type(own) is not type(parsed) and type(own) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_part:
        own.tie_word_embeddings = parsed.tie_word_embeddings  # the whole model's class decides it
    else:
        own = parsed
    loader: Any = AutoModelForCausalLM if type(own) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    own.name_or_path = name
    if weights:
        model, info = loader.from_pretrained(
            folder,
            config=own,
            dtype=dtype or "auto",
            key_mapping=PART_KEYS if is_part else None,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers then reports the shapes instead of raising; we raise below
        )
        if is_part:  # the files hold other parts too, such as a vision tower
            info["unexpected_keys"] = set()
            keep_names(model)
        if differences := loading_differences(info):
            raise ValueError(
                f"The weights of {name!r} are not those of the {type(model).__name__} that its config.json describes: "
                f"{differences}. Nothing was loaded: check that weights and config.json are of one checkpoint."
            )
        check_numbers(model, name)
        model.name_or_path = model.config.name_or_path = name
    else:
        with torch.device("meta"):
            model = loader.from_config(own, trust_remote_code=False)
    drafter = CausalLMDrafter(model.eval())
    drafter.tokenizer_folder = folder
    return drafter


def _classes(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()

"""What we need of transformers besides its public calls: one table, checked at import, and the functions that use it.

What differs by version is here and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    cache_utils,
    conversion_mapping,
    core_model_loading,
    masking_utils,
)
from transformers.cache_utils import Cache
from transformers.generation import CandidateGenerator, GenerationMixin
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import LoadStateDictConfig
from transformers.pipelines import base as pipelines
from transformers.utils import logging

from hf_specdec.decoding.once import once_per_model, undisturbed
from hf_specdec.decoding.targets.modules import home_of

# A layer of transformers' cache that stores nothing; transformers 5.17 does not have it.
DummyLayer: Any = getattr(cache_utils, "DummyLayer", type("DummyLayer", (), {}))

# The cache's name in arguments and outputs of forwards and of `generate`: "cache" since transformers 5.24. Before it,
# Mamba families say "cache_params" in their forwards, see `cache_name`.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
PAST_LENGTH = f"{CACHE}_length"  # of modules that count positions themselves: the argument for the cached tokens

# The oldest and the newest version whose tests were run; pyproject.toml allows no others.
TESTED = ("5.17", "5.24")

# What we wrap, call or replace, by its owner, and the first parameters that each must have.
EXPECTED: dict[Any, dict[str, tuple[str, ...]]] = {
    GenerationMixin: {
        "generate": ("self", "inputs", "generation_config"),
        "_assisted_decoding": ("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        "_get_candidate_generator": ("self", "generation_config", "input_ids", "inputs_tensor", "logits_processor"),
        "_validate_generation_mode": ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
        "_sample": ("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"),
        "_prefill": ("self", "input_ids", "generation_config", "model_kwargs"),
        "_prepare_position_ids_for_generation": ("self", "inputs_tensor", "model_kwargs"),
        "_update_model_kwargs_for_generation": ("self", "outputs", "model_kwargs", "is_encoder_decoder"),
        "prepare_inputs_for_generation": ("self", "input_ids", "next_sequence_length", CACHE, "attention_mask"),
        "_supports_default_dynamic_cache": (),
    },
    CandidateGenerator: {
        "get_candidates": ("self", "input_ids"),
        "update_candidate_strategy": ("self", "input_ids", "scores", "num_matches"),
    },
    GenerationConfig: {"_get_default_generation_params": ()},
    Cache: {
        "update": ("self", "key_states", "value_states", "layer_idx"),
        "get_seq_length": ("self", "layer_idx"),
        "get_mask_sizes": ("self", "query_length", "layer_idx"),
        "crop": ("self", "tokens_to_remove"),
        "activate_past_recording": ("self",),
    },
    cache_utils.CacheLayerMixin: {
        "update": ("self", "key_states", "value_states"),
        "get_seq_length": ("self",),
        "get_mask_sizes": ("self", "query_length"),
    },
    cache_utils.LinearAttentionLayer: {
        "update_conv_state": ("self", "conv_states", "state_idx", "conv_kernel_size"),
        "update_recurrent_state": ("self", "recurrent_states", "state_idx"),
    },
    cache_utils.DynamicIndexedLayer: {"update_indexer": ("self", "indexer_key_states")},
    sdpa_attention: {
        "sdpa_attention_forward": ("module", "query", "key", "value", "attention_mask", "dropout", "scaling"),
    },
    masking_utils: {"sdpa_mask": ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function")},
    pipelines: {"load_assistant_model": ("model", "assistant_model", "assistant_tokenizer")},
    conversion_mapping: {"get_model_conversion_mapping": ("model",)},
    core_model_loading: {"convert_and_load_state_dict_in_model": ("model", "state_dict", "load_config")},
}
# What we read or set.
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    PreTrainedModel: ("_supports_attention_backend", "_supports_sdpa", "_is_stateful"),
    PreTrainedConfig: ("_attn_implementation", "_experts_implementation"),
    Cache: ("is_sliding",),
}


def check_host() -> None:
    """Raises ImportError if the installed transformers has not what `EXPECTED` and `ATTRIBUTES` say."""
    other = [
        f"{owner.__name__}.{name} is missing"
        for owner, names in ATTRIBUTES.items()
        for name in names
        if not hasattr(owner, name)
    ]
    for owner, functions in EXPECTED.items():
        for name, expected in functions.items():
            function = getattr(owner, name, None)
            if function is None:
                other.append(f"{owner.__name__}.{name} is missing")
            elif (found := tuple(signature(function).parameters)[: len(expected)]) != expected:
                other.append(f"{owner.__name__}.{name} has the parameters {found} instead of {expected}")
    if other:
        raise ImportError(
            f"hf_specdec relies on parts of transformers that {transformers.__version__} has otherwise: "
            f"{'; '.join(other)}. It was tested with transformers {TESTED[0]} to {TESTED[1]}: install the newest of "
            f"these (pip install 'transformers=={TESTED[1]}.*'), or a newer hf_specdec."
        )


def is_newer_than_tested() -> bool:
    """Whether the installed transformers is of a later minor version than any whose tests were run."""
    return _minor_version(transformers.__version__) > _minor_version(TESTED[1])


def _minor_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def tokens_in(cache: Cache) -> int:
    """The number of tokens in a cache; of one that has states only, 1 if they are of any text."""
    return max((_tokens_in(layer) for layer in getattr(cache, "layers", ())), default=0)


def _tokens_in(layer: Any) -> int:
    if isinstance(layer, cache_utils.CacheLayerMixin):
        return int(layer.get_seq_length())
    if isinstance(layer, cache_utils.LinearAttentionLayer):
        return int(any(layer.has_previous_state.values()))
    return 0  # it stores nothing


def caches_in(arguments: Mapping[str, Any]) -> dict[str, int]:
    """`tokens_in` of the caches among the arguments of a call, by name."""
    return {name: tokens_in(value) for name, value in arguments.items() if isinstance(value, Cache)}


def prefill(model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """The prompt's forward as plain `generate` runs it, chunks and multimodal inputs included."""
    return model._prefill(input_ids, config, model_kwargs)


def keep_names(model: PreTrainedModel) -> None:
    """Lets a model be saved under its own names, and not under those that it was loaded from with a `key_mapping`."""
    vars(model).pop("_weight_conversions", None)


def default_settings() -> dict[str, Any]:
    """What `generate` sets where neither the caller nor the model's generation config says anything."""
    defaults: dict[str, Any] = GenerationConfig._get_default_generation_params()
    return defaults


def sample(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Plain decoding, greedy or sampled, with the arguments of `_assisted_decoding`."""
    for name in ("assistant_tokenizer", "inputs_tensor", "tokenizer"):  # for assisted decoding only
        kwargs.pop(name, None)
    return model._sample(*args, **kwargs)


def assist(model: PreTrainedModel, input_ids: Tensor, generator: CandidateGenerator, **kwargs: Any) -> Any:
    """Transformers' own assisted decoding, with the arguments of `_assisted_decoding`."""
    return model._assisted_decoding(input_ids, assistant_model=generator, **kwargs)


def arguments_of_prompt(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """The arguments besides ids that `generate` passes to its decoding function for a prompt of text.

    Args:
        model: the target.
        input_ids: [batch, seq] int64.
        mask: [batch, seq] int64, 0 at padding.
    """
    arguments: dict[str, Any] = {cache_name(model): new_cache(model), "use_cache": True}
    parameters = signature(model.forward).parameters
    if "attention_mask" in parameters:
        arguments["attention_mask"] = mask
    if "position_ids" in parameters:
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, arguments)
    return arguments


def whole_text_inputs(model: PreTrainedModel, input_ids: Tensor, more: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one forward over a text without a cache, as plain decoding would run it as a prompt.

    Args:
        model: the target.
        input_ids: [1, seq] int64, a prompt and perhaps its continuation.
        more: arguments of `generate` besides the prompt's ids, such as its pictures.
    """
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
    for name, value in more.items():
        if name.endswith("token_type_ids"):  # transformers extends them, by zeros or their last value
            new = value[:, -1:] if name == "token_type_ids" else value.new_zeros(1, 1)
            value = torch.cat([value, new.expand(-1, input_ids.shape[1] - value.shape[1])], 1)
        arguments[name] = value
    if takes_positions(model):
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, arguments)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **arguments)
    return inputs


def config_of_trial(max_length: int) -> GenerationConfig:
    """The settings of a greedy call that returns logits, as `generate` would have prepared them."""
    config = GenerationConfig(max_length=max_length, return_dict_in_generate=True, output_logits=True)
    config._pad_token_tensor = config._eos_token_tensor = None
    return config


@once_per_model
def position_axes(model: PreTrainedModel) -> int:
    """Axes of the position_ids that plain decoding passes: 1 for [batch, seq]; 0 if it passes none."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=home_of(model.get_input_embeddings()))
    with undisturbed(model):
        arguments = arguments_of_prompt(model, ids, torch.ones_like(ids))
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **arguments)
    position_ids = inputs.get("position_ids")
    return 0 if position_ids is None else 1 if position_ids.dim() == 2 else len(position_ids)


def next_inputs(model: PreTrainedModel, outputs: Any, longer: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that plain decoding would pass to the model in the step after a forward.

    Args:
        model: the target.
        outputs: of the forward.
        longer: [batch, seq] int64, the text including the token of that step.
        model_kwargs: of the forward.
    """
    arguments = model._update_model_kwargs_for_generation(outputs, dict(model_kwargs), is_encoder_decoder=False)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(longer, next_sequence_length=1, **arguments)
    return inputs


@once_per_model
def cache_name(model: PreTrainedModel) -> str:
    """The name of the model's argument for its cache."""
    parameters = signature(model.forward).parameters
    return next((name for name in (CACHE, *CACHE_NAMES) if name in parameters), CACHE)


@once_per_model
def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward has the argument position_ids."""
    return "position_ids" in signature(model.forward).parameters


@once_per_model
def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether a family stores everything in transformers' DynamicCache."""
    parameters = signature(model.forward).parameters
    # A class of the caller may pass all arguments on as **kwargs.
    given = cache_name(model) in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return given and bool(model._supports_default_dynamic_cache())


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of the class that `generate` passes to a model, or else of the class that the model makes itself.

    Raises:
        TypeError: the model has no cache.
    """
    if model._supports_default_dynamic_cache():
        return DynamicCache(config=model.config)
    own = _own_cache_class(model)
    if own is None:
        raise TypeError(f"{type(model).__name__} has no cache: a forward with use_cache=True returns none")
    return own()


@once_per_model
@torch.no_grad()
def _own_cache_class(model: PreTrainedModel) -> type[Cache] | None:
    """The class of the cache that a model makes itself, found by running one token."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=home_of(model.get_input_embeddings()))
    with undisturbed(model):
        made = model(input_ids=token, use_cache=True).get(CACHE)
    return type(made) if isinstance(made, Cache) else None


@once_per_model
def cache_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of the cache that transformers would make for a model; only for inspection."""
    return list(DynamicCache(config=model.config).layers)


def is_callers(cache: Cache) -> bool:
    """Whether `generate` was given this cache, which its caller then sees afterwards."""
    return bool(getattr(cache, "_is_user_defined", False))  # `generate` sets the attribute in this case only


@once_per_model
def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether a forward can compute the logits of the last tokens only."""
    return "logits_to_keep" in signature(model.forward).parameters


def pad_token_id(config: GenerationConfig) -> int | None:
    """The pad token that `generate` has prepared."""
    pad_token: Tensor | None = config._pad_token_tensor
    return None if pad_token is None else int(pad_token)


def looks_attention_up(model: PreTrainedModel) -> bool:
    """Whether a family looks its attention up in transformers' `AttentionInterface`."""
    return bool(model._supports_attention_backend)


def has_own_attention(model: PreTrainedModel) -> bool:
    """Whether a family uses only its own attention code, which may need contiguous keys."""
    return not (model._supports_attention_backend or model._supports_sdpa)


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention implementation that a config asks for."""
    implementation: str | None = config._attn_implementation
    return implementation


def set_attention(config: PreTrainedConfig, implementation: str) -> str:
    """Sets the attention implementation and returns the previous one.

    Writes the internal field, because the config's setter would check the name and visit all parts of the config.
    """
    fields = vars(config)
    before: str = fields["_attn_implementation_internal"]
    fields["_attn_implementation_internal"] = implementation
    return before


def experts_of(config: PreTrainedConfig) -> str | None:
    """The implementation of experts that a config asks for; None if it has none."""
    implementation: str | None = getattr(config, "_experts_implementation", None)
    return implementation


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether transformers marks a family as having states that cannot be cropped."""
    return bool(model._is_stateful)


def load_part(
    model: PreTrainedModel, place: str, part: nn.Module, tensors: Mapping[str, Tensor], device: torch.device
) -> list[str]:
    """Loads tensors that a checkpoint of a model could have for one of its submodules, into another module.

    transformers' loader renames and joins them as it does for the model itself, whose checkpoints may store experts one
    by one or have other names than its modules.

    Args:
        model: stays as it is.
        place: name of the submodule, such as "model.layers.3".
        part: a module of that kind, with its parameters on the meta device; they are replaced.
        tensors: by their names in a checkpoint, without `place`; on the meta device only names and shapes are compared.
        device: to load to, in the types of the parameters.

    Returns:
        The differences between what the module has and what was given; empty if they fit.
    """
    skeleton = copy.copy(model)  # of `model`'s class, but without any submodule besides the part
    skeleton.__dict__["_modules"] = {}
    holder: nn.Module = skeleton
    *above, last = place.split(".")
    for name in above:
        holder.add_module(name, nn.Module())
        holder = getattr(holder, name)
    holder.add_module(last, part)
    mapping = conversion_mapping.get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping)
    with _without_progress_bar():
        given = {f"{place}.{name}": tensor for name, tensor in tensors.items()}
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(skeleton, given, config)
    start = len(place) + 1
    failed = [f"{name[start:]} cannot be made of its parts" for name in info.conversion_errors]
    shapes = [
        f"{name[start:]} {tuple(found)}, where {tuple(wanted)} belongs" for name, found, wanted in info.mismatched_keys
    ]
    missing = [f"{name[start:]} missing" for name in info.missing_keys - info.conversion_errors.keys()]
    return sorted(failed + shapes + missing) + sorted(f"{name[start:]} not expected" for name in info.unexpected_keys)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

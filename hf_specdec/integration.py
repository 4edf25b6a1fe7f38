"""Wrappers of five transformers functions: four of GenerationMixin and one of pipelines.

Enabling is idempotent and reversible.

`generate(assistant_model=drafter)` calls `_assisted_decoding` with expanded rows and prepared processors, stopping
criteria, streamer and cache. If the assistant is a `Drafter`, our wrapper runs our loop. `_validate_generation_mode` is
wrapped because it refuses batches of returned sequences and differing vocabularies, which our loop supports. Other
assistants use the original functions. If trees cannot be verified, transformers' own loop runs, and our wrapper of
`_get_candidate_generator` returns the drafter's generator, which then drafts chains. `decoding/upstream.py` has what
`decoding/` uses of transformers.

The constructor of a pipeline compares the config of `assistant_model` with the target's, to decide whether text must be
translated between two tokenizers. A `Drafter` drafts the target's own tokens and has no such config, so our wrapper of
`load_assistant_model` returns it as it is, and loads one by its name.

After `attach(model, drafter)`, our wrapper of `generate` passes the drafter as `assistant_model`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from typing import Any

import transformers
from accelerate.utils import extract_model_from_parallel
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode
from transformers.pipelines import base as pipelines

from hf_specdec.decoding.chains import AssistedChains, OneByOne, why_called_otherwise, why_no_continuation
from hf_specdec.decoding.devices import without_inference_mode
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.loop import SpeculativeDecoding
from hf_specdec.decoding.observers import Observer
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.records import TokenRecords
from hf_specdec.decoding.relaxed import Relaxed, acceptance_rule
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import runs_in_inference_mode
from hf_specdec.decoding.targets.replay import recording, replaying
from hf_specdec.decoding.targets.support import (
    TreesRefusedError,
    can_be_cut_back,
    check_supported,
    ignores_cache,
    why_chains_are_refused,
)
from hf_specdec.decoding.targets.trial import (
    check_hooks,
    check_trees,
    why_no_chains,
    why_not_same_bits,
    why_unlike_plain_chains,
    why_unlike_plain_trees,
)
from hf_specdec.decoding.upstream import (
    CACHE,
    TESTED,
    cache_name,
    caches_in,
    check_host,
    is_newer_than_tested,
    new_cache,
    sample,
    tokens_in,
)
from hf_specdec.drafting.call_settings import limits_of_drafts, report_unused
from hf_specdec.drafting.drafter import Drafter, check_is_drafter
from hf_specdec.drafting.registry import name_of


def enable() -> None:
    """Lets `generate` accept a `Drafter` as `assistant_model`; a second call changes nothing.

    Importing any drafter calls it.

    Raises:
        ImportError: the installed transformers lacks what we rely on, see `upstream.check_host`.
    """
    check_host()
    for (owner, name), ours in _WRAPS.items():
        function = getattr(owner, name)
        if not hasattr(function, "_hf_specdec_original"):
            setattr(owner, name, _wrapped(function, ours))


def _wrapped(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of `original` that calls ours with it as the first argument."""

    @functools.wraps(original)  # generate() inspects the signature
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    wrapped._hf_specdec_original = original  # type: ignore[attr-defined]
    return wrapped


def disable() -> None:
    """Restores transformers; its `generate` then does not support a `Drafter`."""
    for owner, name in _WRAPS:
        original = getattr(getattr(owner, name), "_hf_specdec_original", None)
        if original is not None:
            setattr(owner, name, original)


def attach(model: Any, drafter: Drafter) -> ExitStack:
    """From now on, the model's own `generate` drafts with `drafter`: for programs that call it without an assistant.

    A call that passes `assistant_model` uses that one; with `assistant_model=None` it decodes without drafts, and so do
    calls that name another assistant of transformers, or a `custom_generate`. Calls that cannot use drafts, such as
    beam search, run without the drafter, with a warning.

    The drafter belongs to the model in this process; it is neither saved nor copied with it.

    Args:
        model: the target; a PEFT, compiled or distributed wrapper stands for the model in it.
        drafter: replaces one that was attached before.

    Returns:
        A context manager that restores at its end what was attached before. It need not be used.

    Raises:
        TypeError: one of the two has another type.
        ValueError: the drafter is not for this target.

    Examples:
        >>> attach(model, load_drafter("owner/drafter", target=model))  # doctest: +SKIP
        >>> with attach(model, load_drafter("ngram")):  # doctest: +SKIP
        ...     trainer.train()
    """
    check_is_drafter(drafter, "The order is attach(model, drafter).")
    target = _wrapped_model(model)
    _check_pair(target, drafter)
    drafter.check_pairing(target)
    enable()
    before = _ATTACHED.get(target)
    _ATTACHED[target] = drafter
    ends = ExitStack()
    if before is None:
        ends.callback(detach, target)
    else:
        ends.callback(_ATTACHED.__setitem__, target, before)
    return ends


def detach(model: Any) -> None:
    """Ends what `attach` began; nothing happens if no drafter is attached to the model."""
    _ATTACHED.pop(_wrapped_model(model), None)


def attached_to(model: Any) -> Drafter | None:
    """The drafter that is attached to a model; None if there is none."""
    return _ATTACHED.get(_wrapped_model(model))


# Not an attribute of the models, because it is neither saved nor copied.
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, Drafter] = weakref.WeakKeyDictionary()


def _wrapped_model(model: Any) -> PreTrainedModel:
    """The model whose `generate` runs when that of a PEFT, compiled or distributed wrapper is called."""
    found = extract_model_from_parallel(model, keep_torch_compile=False)
    if hasattr(found, "get_base_model"):  # of PEFT
        found = found.get_base_model()
    if not isinstance(found, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; it must be a model of transformers with `generate`.")
    return found


@contextlib.contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def observing(observer: Observer) -> AbstractContextManager[None]:
    """In this context, calls with a `Drafter` report their rounds to `observer`, too."""
    return _setting(_OBSERVERS, (*_OBSERVERS.get(), observer))


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


def prepared(model: Any, drafter: Drafter, **arguments: Any) -> SpeculativeDecoding:
    """The loop of a call of `generate` with these arguments, which has run nothing yet.

    Raises:
        TreesRefusedError: the call would not run this loop, or only for all its rows together.
    """
    loops: list[SpeculativeDecoding] = []
    with _setting(_PREPARED, loops):
        model.generate(assistant_model=drafter, **arguments)
    return loops[0]


_PREPARED: ContextVar[list[SpeculativeDecoding] | None] = ContextVar("prepared", default=None)


# Settings of a call by which transformers drafts itself, or with which it calls an assistant's `generate`.
_OTHER_ASSISTANTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant")


# Whether the call drafts because of `attach`: what it cannot do is then no error of the caller.
_FOR_ATTACHED: ContextVar[bool] = ContextVar("for_attached", default=False)


class CallRefusedError(ValueError):
    """A call asks for something that drafts cannot be used for; raised before the prompt is run."""


def _generate(original: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    drafter = _ATTACHED.get(self)
    if drafter is None:
        return original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    settings = vars(given.get("generation_config") or GenerationConfig()) | kwargs
    if (
        "assistant_model" in given
        or given.get("custom_generate") is not None
        or any(settings.get(name) for name in _OTHER_ASSISTANTS)
    ):
        return original(self, *args, **kwargs)
    try:
        if kwargs.get("cache_implementation") == "paged":  # transformers would decode with another function
            raise CallRefusedError("cache_implementation='paged' batches the rows of transformers' own decoding.")
        with _setting(_FOR_ATTACHED, True):
            return original(self, *args, assistant_model=drafter, **kwargs)
    except CallRefusedError as refusal:
        warnings.warn(
            f"{refusal} The attached {type(drafter).__name__} drafts nothing in this call: "
            "the target decodes it plainly.",
            stacklevel=3,
        )
    return original(self, *args, **kwargs)


def _assisted_decoding(
    original: Callable[..., Any], self: PreTrainedModel, *args: Any, assistant_model: Any = None, **kwargs: Any
) -> Any:
    if not isinstance(assistant_model, Drafter):
        return original(self, *args, assistant_model=assistant_model, **kwargs)
    before, filled = assistant_model.stats, caches_in(kwargs)
    try:
        with without_cudnn_attention():
            return _decode(original, self, assistant_model, *args, **kwargs)
    except ValueError as refusal:
        stats = assistant_model.stats
        if not _FOR_ATTACHED.get() or (stats is not before and stats is not None and stats.has_begun):
            raise
        reason = str(refusal)
    _check_untouched(kwargs, filled, reason)
    why = f"{reason} The attached {type(assistant_model).__name__} drafts nothing in this call"
    return _decode_plainly(self, assistant_model, why, *args, **kwargs)


def _decode(
    original: Callable[..., Any], self: PreTrainedModel, assistant_model: Drafter, *args: Any, **kwargs: Any
) -> Any:
    """`_assisted_decoding` with a drafter: trees, else chains, else plainly."""
    input_ids, padded = args[0] if args else kwargs["input_ids"], _is_padded(kwargs.get("attention_mask"))
    assistant_model.check_pairing(self, input_ids)
    filled = caches_in(kwargs)
    try:
        check_supported(self)
        hooked = check_hooks(self, len(input_ids))
        check_trees(self, padded=padded)
        _check_unknown_host(self, why_unlike_plain_trees, input_ids, kwargs)
        return _decode_trees(self, assistant_model, hooked, *args, **kwargs)
    except TreesRefusedError as refusal:  # raised before the first token
        if _PREPARED.get() is not None:
            raise
        reason = str(refusal)
    _check_untouched(kwargs, filled, reason)
    if (rule := acceptance_rule(assistant_model.acceptance)) is not None:
        raise ValueError(
            f"acceptance={rule!r} needs the loop of this library: {reason}. Set drafter.acceptance = None, which "
            "is lossless."
        )
    rows = len(input_ids)
    calls = why_called_otherwise(kwargs["logits_processor"], kwargs["stopping_criteria"])
    if rows == 1 and calls is not None:
        return _decode_plainly(self, assistant_model, f"{reason}. In this call {calls}", *args, **kwargs)
    trouble = f"they are verified for one row, and this batch has {rows}" if rows > 1 else None
    trouble = trouble or why_chains_are_refused(self, kwargs["generation_config"].max_length)
    trouble = trouble or why_no_continuation(input_ids, kwargs) or why_no_chains(self, padded=padded)
    if trouble is None:
        try:
            _check_unknown_host(self, why_unlike_plain_chains, input_ids, kwargs)
        except TreesRefusedError as refusal:
            trouble = str(refusal)
    if trouble is not None:
        why = f"{reason}. Chains cannot be verified either: {trouble}. Nothing is drafted in this call"
        return _decode_plainly(self, assistant_model, why, *args, **kwargs)
    return _decode_chains(self, assistant_model, reason, functools.partial(original, self), *args, **kwargs)


def _check_untouched(arguments: dict[str, Any], filled: dict[str, int], reason: str) -> None:
    """Raises RuntimeError if a refused draft has left tokens in a cache of the call, with which others would begin."""
    if (after := caches_in(arguments)) != filled:
        raise RuntimeError(
            f"{reason}. Plain decoding cannot begin either: the caches of this call held {filled} tokens before the "
            f"refusal and {after} after it, so the target does not use the cache that it is given. With transformers "
            f"{transformers.__version__}, tested from {TESTED[0]} to {TESTED[1]}: generate without assistant_model."
        )


def _check_unknown_host(
    model: PreTrainedModel, why_unlike: Callable[..., str | None], input_ids: Any, arguments: dict[str, Any]
) -> None:
    """Compares the first call of each model, and the first padded one, where transformers is newer than any tested one.

    Raises:
        TreesRefusedError: the first tokens differ.
    """
    if not is_newer_than_tested():
        return
    given = {name: value for name, value in arguments.items() if name not in _OF_LOOP | _OF_CALL}
    version = f"transformers {transformers.__version__} is newer than {TESTED[1]}, the newest version that was tested"
    known, case = _COMPARED.setdefault(model, {}), (why_unlike, _is_padded(arguments.get("attention_mask")))
    if case not in known:
        known[case] = why_unlike(model, input_ids, given, arguments["generation_config"].max_length)
        if known[case] is None:
            warnings.warn(f"{version}. The first tokens of this call equal those of plain decoding.", stacklevel=3)
    if known[case] is not None:
        raise TreesRefusedError(f"{version}, and {known[case]}")


_COMPARED: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def _get_candidate_generator(
    original: Callable[..., Any], self: PreTrainedModel, *args: Any, assistant_model: Any = None, **kwargs: Any
) -> Any:
    if isinstance(assistant_model, TreeCandidateGenerator):
        return assistant_model
    return original(self, *args, assistant_model=assistant_model, **kwargs)


def _load_assistant_model(
    original: Callable[..., Any], model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any
) -> Any:
    from hf_specdec.hub.loading import is_drafter, load_drafter  # which import the drafters

    ours = False
    with contextlib.suppress(OSError, ValueError):  # transformers says what is wrong with the name
        ours = isinstance(assistant_model, str) and is_drafter(assistant_model)
    if ours:
        assistant_model = load_drafter(assistant_model, model)
    if not isinstance(assistant_model, Drafter):
        return original(model, assistant_model, assistant_tokenizer)
    return assistant_model, None


def _validate_generation_mode(
    original: Callable[..., Any],
    self: PreTrainedModel,
    mode: GenerationMode,
    config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """Raises ValueError for unsupported settings, targets and drafters, before the prompt is run.

    For settings it is a `CallRefusedError`.
    """
    drafter = mode_kwargs.get("assistant_model")
    if not isinstance(drafter, Drafter):
        if hasattr(getattr(drafter, "config", None), "draft_token_ids"):
            raise ValueError(
                f"assistant_model is the plain {type(drafter).__name__} of {name_of(drafter)!r}, whose rows are only "
                "some of the target's tokens (draft_token_ids in its config.json), so it would read other ones. Pass "
                "what load_drafter returns for it."
            )
        return original(self, mode, config, mode_kwargs)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise CallRefusedError(
            f"assistant_model={type(drafter).__name__} cannot be used with {mode.value!r} decoding "
            f"(num_beams={config.num_beams}); draft trees need greedy decoding or sampling with num_beams=1."
        )
    if config.use_cache is False and self.generation_config.use_cache is False:
        config.use_cache = True  # False is the target's default, not an argument of this call
    if config.use_cache is False:
        raise CallRefusedError(
            "Speculative decoding needs the target's cache, but use_cache=False was passed; leave it out."
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise CallRefusedError(
            f"cache_implementation={config.cache_implementation!r} does not support draft trees; leave it out, or pass "
            "'dynamic' if it is the target's own default. The cache is preallocated in any case."
        )
    if config.assistant_ensemble_weight is not None:
        raise CallRefusedError(
            f"assistant_ensemble_weight={config.assistant_ensemble_weight} changes the target's output; hf_specdec is "
            "lossless only. Leave it out."
        )
    if config.dola_layers is not None:
        raise CallRefusedError(
            f"dola_layers={config.dola_layers!r} replaces the target's logits by contrasts of layers. Leave it out, or "
            "generate without assistant_model."
        )
    if mode_kwargs.get("synced_gpus"):
        raise CallRefusedError(
            "synced_gpus=True (ZeRO stage 3, FSDP) needs every process to run equally many target forwards, which "
            "speculation does not; generate on a replicated target, or without assistant_model."
        )
    if ignores_cache(self):
        raise CallRefusedError(
            f"Target {type(self).__name__} is in training mode with gradient checkpointing on: its layers then ignore "
            "the cache, and plain generate writes wrong tokens without a warning that it fails. Call model.eval(), or "
            "model.gradient_checkpointing_disable(), before generate."
        )
    # A PeftModel generates with the model it wraps, and sets this method of it to one of its own.
    owner = getattr(self.prepare_inputs_for_generation, "__self__", self)
    peft_config = getattr(owner, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        raise CallRefusedError(
            f"The target has {peft_config.peft_type} virtual tokens, which shift every position; prompt learning is "
            "not supported. Use a LoRA adapter, or the target without an adapter."
        )
    try:
        _check_pair(self, drafter)
    except ValueError as error:
        raise CallRefusedError(str(error)) from error
    report_unused(config, mode_kwargs, drafter)
    return None


# Arguments of `_assisted_decoding` that are not passed to the model.
_OF_LOOP = {"synced_gpus", "streamer", "inputs_tensor", "assistant_tokenizer", "tokenizer"}
_OF_CALL = {"input_ids", "logits_processor", "stopping_criteria", "generation_config"}

_WRAPS: dict[tuple[Any, str], Callable[..., Any]] = {
    (GenerationMixin, "generate"): _generate,
    (GenerationMixin, "_assisted_decoding"): _assisted_decoding,
    (GenerationMixin, "_get_candidate_generator"): _get_candidate_generator,
    (GenerationMixin, "_validate_generation_mode"): _validate_generation_mode,
    (pipelines, "load_assistant_model"): _load_assistant_model,
}


@without_cudnn_attention()
def _check_pair(model: PreTrainedModel, drafter: Drafter) -> None:
    """Raises ValueError if a target cannot be drafted for, or not by this drafter."""
    with contextlib.suppress(TreesRefusedError):  # then chains are verified
        check_supported(model)
    drafter.check_options()
    drafter.check_target(model)


def _is_padded(mask: Any) -> bool:
    return mask is not None and not bool(mask.all())


def _decode_trees(
    model: PreTrainedModel,
    drafter: Drafter,
    hooked: bool,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **others: Any,
) -> Any:
    """Runs our loop, which verifies trees. With hooks of the user (`hooked`), rows stay in the batch."""
    model_kwargs = {name: value for name, value in others.items() if name not in _OF_LOOP}
    stats = drafter.stats = SpeculationStats(method=drafter.method)
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    records = TokenRecords(generation_config, len(input_ids), model_kwargs.get(cache_name(model)), layer_types)
    if drafter.options.same_bits:
        trouble = why_not_same_bits(model, len(input_ids), padded=_is_padded(model_kwargs.get("attention_mask")))
        stats.same_bits = trouble is None
        if trouble is not None:
            _warn_of_rounding(trouble)
    relaxed = _relaxed_rule(model, drafter)
    target = TargetModel(
        model,
        drafter.feature_layers(model),
        compile_mode=drafter.options.compile_mode,
        same_bits=stats.same_bits,
        output_attentions=records.keeps_attentions,
        output_hidden_states=records.keeps_hidden_states,
        reads_states=relaxed is not None and relaxed.reads_states,
    )
    if hooked:
        target.bound_rows = len(input_ids)
    loops = _PREPARED.get()
    policy = DraftingPolicy() if loops is not None else drafter.drafting_policy(model, len(input_ids), stats)
    observers = _OBSERVERS.get() if drafter.trace is None else (drafter.trace, *_OBSERVERS.get())
    decoding = SpeculativeDecoding(
        target,
        drafter.candidate_generator,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        stats=stats,
        records=records,
        policy=policy.restrict(*limits_of_drafts(generation_config)),
        observers=observers if loops is None else (),
        streamer=others.get("streamer"),
        networks=drafter.networks,
        relaxed=relaxed,
    )
    if loops is not None:
        reasons = {
            "its forward has hooks, which would see other rows": hooked or target.bound_rows is not None,
            f"it has {len(input_ids)} rows": len(input_ids) > 1,
            "it returns a cache, scores or states": decoding.returns_cache,
            "same_bits=True is for the rows of one call": target.same_bits,
            f"compile_mode={target.compile_mode!r} captures forwards of one shape": target.compile_mode != "none",
        }
        if any(reasons.values()):
            raise TreesRefusedError(next(reason for reason, holds in reasons.items() if holds))
        loops.append(decoding)
        return input_ids
    if all(runs_in_inference_mode(network) for network in (model, *drafter.networks)):
        return decoding.run()
    with without_inference_mode():
        return decoding.run()


def _warn_of_rounding(reason: str) -> None:
    warnings.warn(
        f"same_bits=True has no effect: {reason}. The output is the target's own up to rounding.", stacklevel=2
    )


def _relaxed_rule(model: PreTrainedModel, drafter: Drafter) -> Relaxed | None:
    """The acceptance rule of this call if it is not the lossless one; warns that it is not.

    Raises:
        ValueError: it reads states that target or drafter do not have.
    """
    rule = acceptance_rule(drafter.acceptance)
    if rule is None:
        return None
    rule.check(model.config.get_text_config(decoder=True).hidden_size, model.name_or_path)
    if rule.reads_states and not drafter.states_at_nodes:
        raise ValueError(
            f"acceptance={rule!r} reads the target's states at every node, but {type(drafter).__name__} verifies "
            "without them. Use acceptance='typical', or another drafter."
        )
    warnings.warn(
        f"acceptance={rule!r} accepts tokens that the target did not choose: this output is NOT the target's own. Set "
        "drafter.acceptance = None for lossless decoding.",
        stacklevel=2,
    )
    return rule


def _decode_plainly(model: PreTrainedModel, drafter: Drafter, reason: str, *args: Any, **kwargs: Any) -> Any:
    """Runs transformers' decoding without drafts, with the arguments of `_assisted_decoding`; warns with `reason`."""
    warnings.warn(f"{reason}: the target decodes it plainly.", stacklevel=2)
    stats = drafter.stats = SpeculationStats(method=drafter.method, same_bits=True)
    stats.begin(args[0] if args else kwargs["input_ids"])
    stats.has_begun = True
    started = time.perf_counter()
    output = sample(model, *args, **kwargs)
    stats.total_time_s = time.perf_counter() - started
    return output


def _decode_chains(
    model: PreTrainedModel,
    drafter: Drafter,
    reason: str,
    run: Callable[..., Any],
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **others: Any,
) -> Any:
    """Runs transformers' own loop, with the likeliest path of each tree as a chain.

    Args:
        model: the target.
        drafter: the drafter.
        reason: why trees cannot be verified.
        run: transformers' `_assisted_decoding` of the target.
        input_ids: argument of `_assisted_decoding`, as all that follow.
        logits_processor: see there.
        stopping_criteria: see there.
        generation_config: see there.
        others: further arguments.
    """
    stats = drafter.stats = SpeculationStats(method=drafter.method)
    stats.begin(input_ids)
    if drafter.options.same_bits:
        _warn_of_rounding("transformers' own loop verifies several tokens under one mask")
    target = TargetModel(model, drafter.feature_layers(model))
    chains = AssistedChains(
        target,
        drafter.drafting_policy(model, 1, stats).restrict(*limits_of_drafts(generation_config)),
        stats,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        do_sample=generation_config.do_sample,
        max_length=generation_config.max_length,
        observers=_OBSERVERS.get(),
    )
    how = f"{drafter.method!r} drafts chains, which transformers' own loop verifies"
    generator = drafter.candidate_generator(target)
    embeddings = others.get("inputs_embeds")
    if generator.reads_cache and embeddings is not None and embeddings.shape[1] > input_ids.shape[1]:
        chains.drafts = False
        how = f"nothing is drafted, because {drafter.method!r} needs the ids of the prompt, given as inputs_embeds only"
    warnings.warn(f"{reason}. In this call {how}.", stacklevel=2)
    generator.assisted = chains
    cache = others[CACHE] if CACHE in others else new_cache(model)
    arguments = others | {CACHE: cache, "assistant_model": generator}
    if others.get("streamer") is not None:
        arguments["streamer"] = OneByOne(others["streamer"])
    if embeddings is not None:  # it would be cut to the number of ids; it has no padding
        arguments.pop("attention_mask", None)
    if tokens_in(cache):
        chains.start_after(
            cache, input_ids, {name: value for name, value in others.items() if name not in _OF_LOOP | {CACHE}}
        )
    stats.has_begun = True
    try:
        with target.tapping(), recording(cache), nullcontext() if can_be_cut_back(model) else replaying(model, cache):
            output = run(input_ids, logits_processor, stopping_criteria, generation_config, **arguments)
        generator.count(stats)
        return output
    finally:
        generator.close()
        stats.total_time_s = sum(stats.stopwatch.seconds.values())


enable()

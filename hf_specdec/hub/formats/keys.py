"""Which keys of a `config.json` each reader knows. Unknown keys raise an error or are reported, never ignored silently.

A `Section` lists the keys of one object of a config: keys that the reader reads, keys that it need not read, and keys
that it need not read if they have certain values. Every `Format` has one, except that of plain language models. Readers
check the values. `hf_specdec/unsafe_keys.py` first drops the keys by which transformers would load or run something.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.unsafe_keys import MOST_SHOWN, listed, shown

Config = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """The keys of one object of a config.

    Attributes:
        read: keys that the reader reads.
        idle: keys that do not change what the drafter computes.
        only: keys that may change it, with the values that do not.
        nested: objects in it, by their keys.
        descriptive: whether no key in it changes what the drafter computes.
    """

    read: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    nested: Mapping[str, Section] = field(default_factory=dict)
    descriptive: bool = False


def check_keys(section: Section, fields: Config, defaults: Mapping[str, Any], file: str, format: str) -> list[str]:
    """Compares the keys of a config with those that its reader knows.

    Args:
        section: the keys that the reader knows.
        fields: the config.
        defaults: defaults of transformers' config class, if known; an unknown key with its default value is ignored.
        file: name of the file and of the drafter, for messages.
        format: name of the layout, for messages.

    Returns:
        The unknown keys without effect, with their values.

    Raises:
        ValueError: an unknown key may change what the drafter computes; names all such keys, with their values.
    """
    refused, idle = [], []
    for place, key, value, part in _unknown(section, fields, ""):
        found = shown(place, key, value)
        if key in part.only:
            allowed = " or ".join(sorted({repr(each) for each in part.only[key] if each is not None}))
            refused.append(f"{found} (supported is {allowed})")
        elif value is None or part.descriptive:
            idle.append(found)
        elif place or key not in defaults or defaults[key] != value:
            known = [*part.read, *part.only, *part.nested] if len(refused) < MOST_SHOWN else []
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            refused.append(f"{found}{f' (did you mean {near[0]}?)' if near else ''}")
    if refused:
        raise ValueError(
            f"{file} has {listed(refused)}: the reader of {format} does not know what the drafter computes with "
            "that. Update hf_specdec, or use another drafter; if you know that a key has no effect, remove it from a "
            "copy of the checkpoint."
        )
    return idle


def _unknown(section: Section, fields: Config, place: str) -> Iterator[tuple[str, str, Any, Section]]:
    """Place, key, value and section of each unknown key."""
    for key, value in fields.items():
        if key in section.nested:
            if isinstance(value, dict):
                yield from _unknown(section.nested[key], value, f"{place}{key}.")
        elif key in section.only:
            if value is not None and value not in section.only[key]:
                yield place, key, value, section
        elif key not in section.read and key not in section.idle:
            yield place, key, value, section


# Keys that transformers, or an earlier version of it, writes into every config, and that no drafter uses.
TRANSFORMERS = frozenset(
    (
        # About the file and the outputs.
        "architectures", "chunk_size_feed_forward", "dtype", "is_encoder_decoder", "model_type", "name_or_path",
        "output_attentions", "output_hidden_states", "return_dict", "tokenizer_class", "torch_dtype", "torchscript",
        "transformers_version", "use_bfloat16", "use_cache", "use_return_dict",
        # For classifiers, encoders and other decoders.
        "add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "id2label", "is_decoder", "label2id",
        "num_labels", "prefix", "problem_type", "pruned_heads", "task_specific_params", "tf_legacy_loss",
        "tie_encoder_decoder",
        # For training.
        "attention_dropout", "initializer_range", "pretraining_tp",
        # For generation, where the target's are used.
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
        "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
        "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "pad_token_id", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
        "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
        # Whether a drafter has embeddings and a head follows from the tensors.
        "tie_word_embeddings",
    )
)  # fmt: skip
# Keys of targets with experts, since drafters' configs are often copies of them: draft layers have no experts.
EXPERTS = frozenset(
    (
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
        "num_experts_per_tok", "num_local_experts", "output_router_logits", "router_aux_loss_coef",
    )
)  # fmt: skip
ROPE = Section(
    read=frozenset(
        (
            "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
            "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_theta",
            "rope_type", "short_factor", "truncate", "type",
        )
    ),
    # For images: positions of text are the same on all axes.
    idle=frozenset(("mrope_interleaved", "mrope_section")),
    only={"partial_rotary_factor": (1,)},
)  # fmt: skip
ROPES = {"rope_parameters": ROPE, "rope_scaling": ROPE}
DECODER = frozenset(
    (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "max_position_embeddings", "max_window_layers", "mlp_bias", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "rope_theta", "sliding_window", "use_sliding_window", "vocab_size",
    )
)  # fmt: skip
WHOLE_ROTARY = {"partial_rotary_factor": (1,), "rope_interleaved": (False,)}
# Keys that this library writes into the configs of drafters.
OURS = frozenset(("drafting_options", "target_name_or_path", "target_revision", "target_tokenizer_sha256"))


def decoder(
    *read: str,
    idle: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    nested: Mapping[str, Section] | None = None,
) -> Section:
    """The section of a decoder's config with further keys."""
    limited = {key: values for key, values in {**WHOLE_ROTARY, **(only or {})}.items() if key not in idle}
    return Section(DECODER.union(read), TRANSFORMERS | EXPERTS.union(idle), limited, {**ROPES, **(nested or {})})

"""Whether a drafter was trained for a target, where the shapes do not show it.

A wrong pair still gives the target's own output, but slowly. So most checks warn and say which side to change. Another
vocabulary is an error, because then no draft makes sense. Each check needs information that the checkpoint may lack.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.drafting.fingerprint import has_fingerprint, local_tokenizer, tokenizer_fingerprint
from hf_specdec.drafting.registry import is_hub_id, name_of


def check_names(name: str, config: Any, model: PreTrainedModel) -> None:
    """Warns if the config names another target, or another commit of it, than the given one.

    Args:
        name: the drafter's, for messages.
        config: the drafter's; `target_name_or_path` and `target_revision` are None if unknown.
        model: the target. A target loaded from a folder has no Hub id and is not compared.
    """
    stated, found = config.target_name_or_path, model.name_or_path
    if not (stated and found and is_hub_id(stated) and is_hub_id(found)):
        return
    if stated.lower() != found.lower():
        warnings.warn(
            f"Drafter {name!r} was trained for target {stated!r}, but the target is {found!r}. Unless the two are "
            f"the same weights, few drafts will be accepted: load {stated!r} as target, or a drafter trained for "
            f"{found!r}.",
            stacklevel=2,
        )
        return
    revision, commit = config.target_revision, getattr(model.config, "_commit_hash", None)
    if revision and commit and re.fullmatch(r"[0-9a-f]{40}", revision) and revision != commit:
        warnings.warn(
            f"Drafter {name!r} was trained for {stated!r} at commit {revision}, but the target was loaded at commit "
            f"{commit}. If its weights have changed, fewer drafts will be accepted: load the target with "
            f"revision={revision!r}, or a newer drafter.",
            stacklevel=2,
        )


def check_taps(name: str, config: Any, record: dict[str, Any] | None, model: PreTrainedModel) -> None:
    """Warns if the checkpoint reads the target's last layer, because there are two definitions of its hidden state.

    Args:
        name: the drafter's, for messages.
        config: the drafter's; `target_layer_ids` are 0-based layers, None if a rule gives them.
        record: of its training. Not None means it was trained with hf_specdec, with our definition.
        model: the target.
    """
    last = model.config.get_text_config(decoder=True).num_hidden_layers - 1
    listed = getattr(config, "target_layer_ids", None) or ()
    if record is None and last in listed:
        warnings.warn(
            f"Drafter {name!r} reads layers {list(listed)} of the target, and {last} is its last layer. Its output is "
            "read before the final norm, as in serving engines, but the last of transformers' hidden_states is taken "
            "after the norm. If the drafter was trained on that, few of its drafts will be accepted: ask its "
            "publisher, or use a drafter that reads earlier layers.",
            stacklevel=2,
        )


def check_tokenizer(name: str, config: Any, model: PreTrainedModel) -> bool:
    """Compares the target's tokenizer with the one recorded at training.

    Returns:
        Whether they were compared, which needs a record and a local tokenizer. Tokens added to the target's tokenizer
        after the training are ignored.

    Raises:
        ValueError: they differ.
    """
    recorded = config.target_tokenizer_sha256
    if recorded is None:
        return False
    tokenizer = local_tokenizer(model.name_or_path)
    if tokenizer is None:
        return False
    if not has_fingerprint(tokenizer, recorded):
        raise ValueError(
            f"Drafter {name!r} was trained with the tokenizer of {config.target_name_or_path or 'its target'!r} "
            f"(vocabulary sha256 {recorded[:12]}...), but target {model.name_or_path!r} has another one (sha256 "
            f"{tokenizer_fingerprint(tokenizer)[:12]}..., {len(tokenizer)} tokens): the same ids are other tokens. Use "
            "the target it was trained for, or a drafter trained for this target."
        )
    return True


def warn_of_sizes(name: str, own_size: int, model: PreTrainedModel) -> None:
    """Warns if two vocabularies differ in size; for pairs whose tokenizers cannot be compared.

    Args:
        name: the drafter's, for the message.
        own_size: tokens of the drafter.
        model: the target.
    """
    size = num_tokens(model)
    if own_size != size:
        warnings.warn(
            f"Drafter {name!r} has a vocabulary of {own_size}, and target "
            f"{name_of(model)!r} one of {size}. The difference is assumed to be padding or "
            "added tokens, since no tokenizers were found to compare. If the two have different tokenizers, few "
            "drafts will be accepted: use a drafter for this tokenizer.",
            stacklevel=3,
        )


def check_mode(name: str, record: dict[str, Any] | None, model: PreTrainedModel, input_ids: Tensor) -> None:
    """Warns if a prompt differs from the drafter's training text in chat template or thinking.

    Args:
        name: the drafter's, for messages.
        record: its training record. `chat_template` says whether its text was in the target's chat template, and
            `thinking` whether the target's answers contained reasoning; a missing field is not compared.
        model: the target, whose tokenizer is loaded from `name_or_path`.
        input_ids: [batch, seq] int64; only the first row is checked.
    """
    chat, thinking = ((record or {}).get(key) for key in ("chat_template", "thinking"))
    if chat is None and thinking is None:
        return
    tokenizer = local_tokenizer(model.name_or_path)
    if tokenizer is None or not tokenizer.chat_template:
        return
    found = text_mode(tokenizer, tokenizer.decode(input_ids[0]))
    if found is None:
        return
    is_chat, thinks = found
    if chat is not None and chat != is_chat:
        has, trained, change = (
            ("no chat template", "in the target's chat template", "pass it through tokenizer.apply_chat_template")
            if chat
            else ("the chat template", "plain text", "leave the chat template out")
        )
        warnings.warn(
            f"Drafter {name!r} was trained on {trained}, but the prompt has {has}: few drafts will be accepted. If you "
            f"can, {change}; else use a drafter trained on such text.",
            stacklevel=2,
        )
    if thinking is not None and thinks is not None and thinks != thinking:
        warnings.warn(
            f"Drafter {name!r} was trained with thinking {'on' if thinking else 'off'}, but the prompt was made with "
            f"thinking {'off' if thinking else 'on'}: few drafts will be accepted. Pass enable_thinking={thinking} to "
            "tokenizer.apply_chat_template, or use a drafter that was trained so.",
            stacklevel=2,
        )


def text_mode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[bool, bool | None] | None:
    """Whether a text is in the tokenizer's chat template, and whether its last answer has thinking enabled.

    Args:
        tokenizer: the target's.
        text: a prompt, or one with its answer; special tokens included.

    Returns:
        Both; the second is None if the text does not show it. None, with a warning, if the template cannot be rendered
        with a single user message.
    """
    if not tokenizer.chat_template:
        return False, None
    try:
        endings = {mode: _ending(tokenizer, mode) for mode in (True, False)}
    except Exception as error:  # a template is foreign code and may raise anything
        warnings.warn(
            f"The chat template of {tokenizer.name_or_path!r} cannot be rendered for comparison "
            f"({type(error).__name__}: {error}), so it is not known whether a text is in it.",
            stacklevel=3,
        )
        return None
    is_chat = any(_opening(ending) in text for ending in endings.values())
    # Where the last answer begins. One ending may be a prefix of the other, which adds an empty thought.
    starts = {mode: (text.rfind(ending.strip()), len(ending)) for mode, ending in endings.items()}
    last = max(starts, key=lambda mode: starts[mode])
    if endings[True] == endings[False] or starts[last][0] < 0:
        return is_chat, None
    return is_chat, last


def _ending(tokenizer: PreTrainedTokenizerBase, thinking: bool) -> str:
    """What the chat template appends to the last user message, with thinking on or off."""
    question = "a question that is in no template"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return str(text).rpartition(question)[2]


def _opening(ending: str) -> str:
    """The first line of an ending, which is the same in every chat."""
    return ending.strip().partition("\n")[0]

"""What shapes cannot show about a drafter and a target: whether they were meant for each other.

A wrong pair still gives the target's own output, only slowly, so most of this warns, and says which side to change;
another vocabulary is an error, since then every draft is noise. All of it is looked at where a checkpoint states it.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafters.card import Record, is_hub_id
from hf_specdec.drafters.fingerprint import has_fingerprint, tokenizer_at_hand, tokenizer_fingerprint


def check_names(name: str, config: Any, model: PreTrainedModel) -> None:
    """Warns if the drafter names another target, or another commit of it, than the one at hand.

    Args:
        name: the drafter's, for messages.
        config: the drafter's; `target_name_or_path` and `target_revision` are None where unknown.
        model: the target. One from a folder has no Hub id to be compared.
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


def check_taps(name: str, config: Any, record: Record | None, model: PreTrainedModel) -> None:
    """Warns if a published list names the target's last layer, whose state goes by that name in two ways.

    Args:
        name: the drafter's, for messages.
        config: the drafter's; `target_layer_ids` are outputs of 0-based layers, None where a rule gives them.
        record: of its training; one that was trained here has learned what is read here.
        model: the target.
    """
    last = model.config.get_text_config(decoder=True).num_hidden_layers - 1
    listed = getattr(config, "target_layer_ids", None) or ()
    if record is None and last in listed:
        warnings.warn(
            f"Drafter {name!r} reads layers {list(listed)} of the target, the last one ({last}) among them. It is read "
            "as it leaves that layer, before the final norm, as serving engines do; the last of transformers' "
            "hidden_states has passed the norm. If the drafter was trained on that, few of its drafts will be "
            "accepted: ask its publisher, or use one that reads earlier layers.",
            stacklevel=2,
        )


def check_tokenizer(name: str, config: Any, model: PreTrainedModel) -> bool:
    """Compares the target's tokenizer with the one recorded at training, where both are at hand.

    Returns:
        Whether they were compared. Tokens that were added to the target's since then are no difference.

    Raises:
        ValueError: they are not the same.
    """
    recorded = config.target_tokenizer_sha256
    if recorded is None:
        return False
    tokenizer = tokenizer_at_hand(model.name_or_path)
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
    """Warns if two tables differ in size; to be asked where no tokenizers could be compared.

    Args:
        name: the drafter's, for the message.
        own_size: tokens of the drafter.
        model: the target.
    """
    size = model.get_input_embeddings().num_embeddings
    if own_size != size:
        warnings.warn(
            f"Drafter {name!r} has a vocabulary of {own_size}, and target "
            f"{model.name_or_path or type(model).__name__!r} one of {size}. The difference is taken for "
            "padding or added tokens, since there are no tokenizers here to be compared. If the two have different "
            "tokenizers, few drafts will be accepted: use a drafter for this tokenizer.",
            stacklevel=3,
        )


def check_mode(name: str, record: Record | None, model: PreTrainedModel, input_ids: Tensor) -> None:
    """Warns if a prompt is of another kind than the text that the drafter was trained on.

    Args:
        name: the drafter's, for messages.
        record: its training record. `chat_template` says whether its text was in the target's chat template, and
            `thinking` whether the target thought in it; a record without them is not compared.
        model: the target, whose tokenizer is looked for where it was loaded from.
        input_ids: [batch, seq] int64; the first row is looked at.
    """
    chat, thinking = ((record or {}).get(key) for key in ("chat_template", "thinking"))
    if chat is None and thinking is None:
        return
    tokenizer = tokenizer_at_hand(model.name_or_path)
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
            "tokenizer.apply_chat_template, or use a drafter trained the other way.",
            stacklevel=2,
        )


def text_mode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[bool, bool | None] | None:
    """Whether a text is in the tokenizer's chat template, and whether its last answer is one with thinking.

    Args:
        tokenizer: the target's.
        text: a prompt, or one with its answer; special tokens included.

    Returns:
        The two; the second is None where the text does not tell. None, with a warning, where the template cannot be
        asked: one that wants more than one question, or several of which none is the default.
    """
    if not tokenizer.chat_template:
        return False, None
    try:
        endings = {mode: _ending(tokenizer, mode) for mode in (True, False)}
    except Exception as error:  # a template is code of others, and may raise anything
        warnings.warn(
            f"The chat template of {tokenizer.name_or_path!r} cannot be asked what a prompt looks like "
            f"({type(error).__name__}: {error}), so whether a text is in it is not known.",
            stacklevel=3,
        )
        return None
    is_chat = any(_opening(ending) in text for ending in endings.values())
    # Where the last answer begins; a longer ending may begin like the shorter one, with an empty thought behind it.
    places = {mode: (text.rfind(ending.strip()), len(ending)) for mode, ending in endings.items()}
    last = max(places, key=lambda mode: places[mode])
    if endings[True] == endings[False] or places[last][0] < 0:
        return is_chat, None
    return is_chat, last


def _ending(tokenizer: PreTrainedTokenizerBase, thinking: bool) -> str:
    """What the chat template puts behind the last question, with thinking on or off."""
    question = "a question that is in no template"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    return str(text).rpartition(question)[2]


def _opening(ending: str) -> str:
    """The part of an ending that every chat has: up to its first line break, or all of it."""
    return ending.strip().partition("\n")[0]

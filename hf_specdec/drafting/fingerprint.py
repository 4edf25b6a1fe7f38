"""Comparing tokenizers: a fingerprint of the vocabulary, and the first id in which two vocabularies differ."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MOST_ADDED = 32  # added tokens that `has_fingerprint` removes at most: each takes a tenth of a second
# All files of a tokenizer.
TOKENIZER_FILES = (
    *_VOCABULARIES,
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hex, over the vocabulary as sorted (token, id) pairs, added tokens included.

    Recorded at training as `target_tokenizer_sha256` in the drafter's config. Templates and normalisation do not change
    it: a drafter reads and writes ids, so only the mapping between ids and tokens matters.
    """
    return _fingerprint(tokenizer.get_vocab())


def has_fingerprint(tokenizer: PreTrainedTokenizerBase, recorded: str) -> bool:
    """Whether a recorded fingerprint is the tokenizer's, or was so before tokens were added to it.

    Args:
        tokenizer: the target's.
        recorded: of `tokenizer_fingerprint`.
    """
    vocabulary = dict(tokenizer.get_vocab())
    if _fingerprint(vocabulary) == recorded:
        return True
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    for token_id in sorted(tokens.keys() & tokenizer.added_tokens_decoder.keys(), reverse=True)[:MOST_ADDED]:
        vocabulary.pop(tokens[token_id])
        if _fingerprint(vocabulary) == recorded:
            return True
    return False


def _fingerprint(vocabulary: dict[str, int]) -> str:
    pairs = json.dumps(sorted(vocabulary.items()), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(pairs.encode()).hexdigest()


def local_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model from a folder or the Hub cache; None if there are no tokenizer files on this machine.

    Warns and returns None if the files cannot be read, because generation needs only ids. The files are checked first,
    because AutoTokenizer would create an empty tokenizer without them.
    """
    if not name_or_path:
        return None
    try:
        if Path(name_or_path).is_dir():
            known = any((Path(name_or_path) / file).is_file() for file in _VOCABULARIES)
        else:
            known = any(isinstance(try_to_load_from_cache(name_or_path, file), str) for file in _VOCABULARIES)
        if not known:
            return None
        return AutoTokenizer.from_pretrained(name_or_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign files, read by the class that they name: any exception is possible
        warnings.warn(
            f"The tokenizer of {name_or_path!r} cannot be read here ({type(error).__name__}: {error}), so it is "
            "not compared: check that drafter and target have the same tokenizer.",
            stacklevel=2,
        )
        return None


def first_difference(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[int, str, str] | None:
    """The lowest id that means different tokens, with both tokens; None if there is none.

    Only ids that both have are compared: tokens may have been added to either.
    """
    tokens, others = ({token_id: token for token, token_id in each.get_vocab().items()} for each in (one, other))
    for token_id in sorted(tokens.keys() & others.keys()):
        if tokens[token_id] != others[token_id]:
            return token_id, tokens[token_id], others[token_id]
    return None

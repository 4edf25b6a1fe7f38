"""A fingerprint of a tokenizer's vocabulary, so that a drafter can be told from one for another tokenizer."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hex, over the vocabulary as sorted (token, id) pairs, added tokens included.

    Recorded at training as `target_tokenizer_sha256` in the drafter's config. Templates and normalisation leave it as
    it is: a drafter reads and writes ids, and what it needs is that the same id is the same token.
    """
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()

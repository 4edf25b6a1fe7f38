"""MedusaConfig: the shape of Medusa heads. Published configs do not tell it; `hub/formats/medusa.py` counts tensors."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

ARCHITECTURE = "MedusaDrafter"


class MedusaConfig(PreTrainedConfig):
    """Shape of Medusa-1 heads.

    Args:
        vocab_size: the target's; None where the heads use the target's own matrix and no file says it.
        hidden_size: the target's.
        medusa_num_heads: heads; head i, from 0, is for the token i + 1 places after the root.
        medusa_num_layers: residual blocks of a head.
        own_head: each head has an output matrix; else all use the target's.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    model_type = "hf_specdec_medusa"

    def __init__(
        self,
        vocab_size: int | None = 32000,
        hidden_size: int = 4096,
        medusa_num_heads: int = 5,
        medusa_num_layers: int = 1,
        own_head: bool = True,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.medusa_num_heads = medusa_num_heads
        self.medusa_num_layers = medusa_num_layers
        self.own_head = own_head
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        sizes = {"hidden_size": 1, "medusa_num_heads": 1, "medusa_num_layers": 0} | (
            {"vocab_size": 1} if self.own_head else {}
        )
        for field, least in sizes.items():
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{field} is {value!r}; it must be an integer of at least {least}.")

"""DFlashConfig: the published z-lab layout of a DFlash checkpoint, read and written unchanged.

The file on disk says `model_type: "qwen3"` and keeps what is particular to DFlash under `dflash_config`; older files
have `block_size` at the top. Source: shared facts on formats, section 1; z-lab/dflash.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

ARCHITECTURE = "DFlashDraftModel"


def default_target_layer_ids(num_taps: int, num_target_layers: int) -> list[int]:
    """Evenly spaced target layers, for checkpoints that name none.

    Example:
        >>> default_target_layer_ids(5, 36)
        [1, 9, 17, 25, 33]
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_taps - 1)) for index in range(num_taps)]


class DFlashConfig(Qwen3Config):
    """A Qwen3 decoder shape plus what DFlash adds.

    Args:
        dflash_config: `mask_token_id` (id in the target's vocabulary, written into the slots to be filled),
            `target_layer_ids` (0-based target layers whose outputs are joined in this order) and, in newer
            checkpoints, `block_size`; also `causal`, `use_swa`, `swa_window_size`.
        block_size: slots of a block, the root's included, where it is not in `dflash_config`.
        num_target_layers: depth of the target, needed only where `target_layer_ids` is absent.
        is_causal: attention inside a block for every layer; None applies the rule of `block_is_causal`.
        final_logit_softcapping: tanh cap on the borrowed head's logits.
        target_name_or_path: the target it was trained for, if known.
    """

    def __init__(
        self,
        dflash_config: dict[str, Any] | None = None,
        block_size: int | None = None,
        num_target_layers: int | None = None,
        is_causal: bool | None = None,
        final_logit_softcapping: float | None = None,
        target_name_or_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        window = kwargs.get("sliding_window")
        super().__init__(**kwargs)
        if "sliding_attention" in self.layer_types:
            # Qwen3's own config drops the window unless use_sliding_window is set; published drafters set either.
            self.sliding_window = window
        self.dflash_config = dict(dflash_config or {})
        self.block_size = self.dflash_config.get("block_size", block_size)
        self.num_target_layers = num_target_layers
        self.is_causal = is_causal
        self.final_logit_softcapping = final_logit_softcapping
        self.target_name_or_path = target_name_or_path
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field and where it lives, if the drafter cannot be built from this config."""
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size!r} in this DFlash config (top level or dflash_config); it must be an "
                "integer of at least 2: the root's slot and one to fill."
            )
        if self.mask_token_id is None:
            raise ValueError("dflash_config.mask_token_id is missing: the id to write into the slots to be filled.")
        if "target_layer_ids" not in self.dflash_config and self.num_target_layers is None:
            raise ValueError(
                "This DFlash config has neither dflash_config.target_layer_ids nor num_target_layers, so the target "
                "layers it reads are unknown; add one of them to its config.json."
            )

    @property
    def mask_token_id(self) -> int | None:
        """Id written into the slots to be filled."""
        return self.dflash_config.get("mask_token_id")

    @property
    def target_layer_ids(self) -> list[int]:
        """0-based target layers, outputs joined in this order."""
        explicit = self.dflash_config.get("target_layer_ids")
        return explicit or default_target_layer_ids(self.num_hidden_layers, self.num_target_layers)

    def window(self, layer: int) -> int | None:
        """Positions a draft layer looks back, itself included; None without a limit."""
        if self.dflash_config.get("use_swa"):
            return self.dflash_config.get("swa_window_size", self.sliding_window)
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def block_is_causal(self, layer: int) -> bool:
        """Whether a slot sees only earlier slots of its block.

        An explicit setting wins; else sliding layers are causal inside the block and full layers are not, as the
        drafters were trained; `use_swa` without `layer_types` means sliding and not causal.
        """
        explicit = self.is_causal if self.is_causal is not None else self.dflash_config.get("causal")
        if explicit is not None:
            return bool(explicit)
        return self.layer_types[layer] == "sliding_attention"

    def to_dict(self) -> dict[str, Any]:
        """The published layout, which every DFlash loader reads."""
        return super().to_dict() | {"model_type": "qwen3", "architectures": [ARCHITECTURE]}


def is_dflash(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of the z-lab DFlash layout; its `model_type` says nothing."""
    return "dflash_config" in config or any(name.startswith("DFlash") for name in config.get("architectures") or ())

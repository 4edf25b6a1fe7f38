"""DFlashConfig: the published z-lab layout of a DFlash checkpoint, read and written unchanged.

The file has `model_type: "qwen3"` and DFlash's own fields under `dflash_config`; older files have a top-level
`block_size`. Source: shared facts on formats, section 1; z-lab/dflash.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from hf_specdec.drafters.options import TreeOptions
from hf_specdec.drafters.registry import MARGINAL_METHODS, unknown_name


def default_target_layer_ids(num_taps: int, num_target_layers: int) -> list[int]:
    """Evenly spaced target layers, for checkpoints that list none.

    Example:
        >>> default_target_layer_ids(5, 36)
        [1, 9, 17, 25, 33]
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_taps - 1)) for index in range(num_taps)]


@strict  # checks the type of vocab_size
class DFlashConfig(Qwen3Config):
    """The config of a Qwen3 decoder and what DFlash adds.

    Args:
        vocab_size: rows of the target's embedding; None if the checkpoint does not state it, and then not compared.
        dflash_config: `mask_token_id` (id in the target's vocabulary, the input of slots to be filled),
            `target_layer_ids` (0-based target layers whose outputs are concatenated in this order; -1 is the input of
            the first) and, in newer checkpoints, `block_size`; also `causal`, JetSpec's `causal_head`, `use_swa`,
            `swa_window_size`. Fields for drafters of other layouts: `sample_from_anchor`, `own_embeddings`, `own_head`,
            and `draft_vocab_size`, the number of tokens that can be drafted if not all: rows of the drafter's own head,
            or selected rows of the target's.
        block_size: slots of a block, root included, if not in `dflash_config`.
        num_target_layers: of the target, needed only without `target_layer_ids`.
        is_causal: whether attention inside a block is causal in every layer; None for the rule of `block_is_causal`.
        final_logit_softcapping: tanh cap on the logits of the target's head.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    vocab_size: int | None = 151936
    architecture: ClassVar[str] = "DFlashDraftModel"

    def __init__(
        self,
        dflash_config: dict[str, Any] | None = None,
        block_size: int | None = None,
        num_target_layers: int | None = None,
        is_causal: bool | None = None,
        final_logit_softcapping: float | None = None,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._as_published: dict[str, Any] | None = None  # the content of the file that was loaded
        window, layer_types = kwargs.get("sliding_window"), kwargs.get("layer_types")
        super().__init__(**kwargs)
        self.dflash_config = dict(dflash_config or {})
        if self.use_swa and layer_types is None:
            # Every layer has the window and none is causal. With use_sliding_window Qwen3's rule would change that.
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if "sliding_attention" in self.layer_types or self.use_swa:
            # Qwen3Config drops the window unless use_sliding_window is set; published drafters set only one of the two.
            self.sliding_window = window
        self.block_size = self.dflash_config.get("block_size", block_size)
        self.num_target_layers = num_target_layers
        self.is_causal = is_causal
        self.final_logit_softcapping = final_logit_softcapping
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [self.architecture]

    def check(self) -> None:
        """Raises ValueError, naming the field and its section, if the drafter cannot be built from this config."""
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size!r} in this DFlash config (top level or dflash_config); it must be an "
                "integer of at least 2: the root's slot and one to fill."
            )
        if not isinstance(self.mask_token_id, int):
            raise ValueError(
                f"dflash_config.mask_token_id is {self.mask_token_id!r}; it must be the id that is the input of the "
                "slots to be filled."
            )
        layers = self.dflash_config.get("target_layer_ids") or []
        if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
            raise ValueError(f"dflash_config.target_layer_ids is {layers!r}; it must be a list of 0-based layers.")
        if not layers and self.num_target_layers is None:
            raise ValueError(
                "This DFlash config has neither dflash_config.target_layer_ids nor num_target_layers, so the target "
                "layers it reads are unknown; add one of them to its config.json."
            )
        for key in ("is_neox_style", "rope_is_neox_style"):
            if getattr(self, key, True) is False:  # keys of some published files that are not in Qwen3Config
                raise ValueError(f"{key} is false in this DFlash config: interleaved rotary positions are unsupported.")
        if self.vocab_size is None:
            if self.own_embeddings or self.own_head or self.draft_vocab_size is not None:
                raise ValueError(
                    "This DFlash config has no vocab_size, which the drafter's own embeddings and head need: add "
                    "the target's to its config.json."
                )
        elif not 1 <= (self.draft_vocab_size or 0) <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and vocab_size {self.vocab_size} in this DFlash config; "
                "a draft vocabulary must be a part of the target's."
            )
        if self.use_swa and self.window(0) is None:
            raise ValueError(
                "dflash_config.use_swa is set, but neither swa_window_size nor sliding_window gives the window of the "
                "draft layers: add the one that the drafter was trained with."
            )
        if self.dflash_config.get("attention_sink_bias"):
            raise ValueError("dflash_config.attention_sink_bias is set: attention sinks in a drafter are unsupported.")

    @property
    def mask_token_id(self) -> Any:
        """Id that is the input of the slots to be filled."""
        return self.dflash_config.get("mask_token_id")

    @property
    def target_layer_ids(self) -> list[int]:
        """0-based target layers, whose outputs are concatenated in this order."""
        explicit = self.dflash_config.get("target_layer_ids")
        if explicit:
            return explicit
        assert self.num_target_layers is not None, "check() requires one of the two"
        return default_target_layer_ids(self.num_hidden_layers, self.num_target_layers)

    @property
    def use_swa(self) -> bool:
        """Whether every layer has a window, independent of `layer_types`."""
        return bool(self.dflash_config.get("use_swa"))

    @property
    def sample_from_anchor(self) -> bool:
        """Whether slot k, from 0, predicts the token k + 1 positions after the root; else slot k, from 1, the k-th."""
        return bool(self.dflash_config.get("sample_from_anchor"))

    @property
    def first_slot(self) -> int:
        """The first slot that drafts: the root's own, 0, with `sample_from_anchor`, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def own_embeddings(self) -> bool:
        """Whether the checkpoint has token embeddings; if not, the target's are used."""
        return bool(self.dflash_config.get("own_embeddings"))

    @property
    def own_head(self) -> bool:
        """Whether the checkpoint has a head; if not, the target's is used."""
        return bool(self.dflash_config.get("own_head"))

    @property
    def draft_vocab_size(self) -> Any:
        """Number of tokens that can be drafted; None for the target's if the config has no `vocab_size`."""
        return self.dflash_config.get("draft_vocab_size", self.vocab_size)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.vocab_size

    def window(self, layer: int) -> int | None:
        """Window of a draft layer in positions, its own included; None for no limit."""
        if self.use_swa:
            return self.dflash_config.get("swa_window_size", self.sliding_window)
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def block_is_causal(self, layer: int) -> bool:
        """Whether a slot attends only to itself and earlier slots of its block.

        An explicit setting takes precedence. Otherwise sliding layers are causal inside the block and full layers are
        not, as the drafters were trained; `use_swa` without `layer_types` means sliding and not causal.
        """
        for explicit in (self.is_causal, self.dflash_config.get("causal"), self.dflash_config.get("causal_head")):
            if explicit is not None:
                return bool(explicit)
        return self.layer_types[layer] == "sliding_attention"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Reads a `config.json` and stores the original, to write it back unchanged."""
        as_published = {key: copy.deepcopy(value) for key, value in config_dict.items() if not key.startswith("_")}
        # transformers completes nested fields in place.
        read = super().from_dict(copy.deepcopy(config_dict), **kwargs)
        config = read[0] if isinstance(read, tuple) else read
        config._as_published = as_published
        return read

    def to_dict(self) -> dict[str, Any]:
        """All fields, in the published layout, for all DFlash loaders."""
        fields = super().to_dict() | {"model_type": "qwen3", "architectures": [self.architecture]}
        del fields["_as_published"]
        if "block_size" in fields["dflash_config"]:
            fields["dflash_config"]["block_size"] = fields.pop("block_size")
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: the loaded file, unknown keys included, with all changed fields.

        For other loaders the presence of a key has a meaning (`use_swa` without `layer_types`, a top-level
        `rope_theta`), so no keys are added to a loaded file.
        """
        if self._as_published is None:
            fields = super().to_diff_dict()
            fields = {key: value for key, value in fields.items() if value is not None or key not in _OPTIONAL}
            # Loaders older than rope_parameters read the base at the top level, with 10000 as default.
            return fields | _legacy_rope(fields["rope_parameters"])
        before = type(self)(**copy.deepcopy(self._as_published)).to_dict()
        fields = self.to_dict()
        changed = {key: value for key, value in fields.items() if key not in before or before[key] != value}
        changed.pop("_name_or_path", None)
        written = copy.deepcopy(self._as_published)
        if written.get("block_size") is not None:  # dflash_config may have another one, and both are read
            written["block_size"] = self.block_size
        if "dtype" in changed and "torch_dtype" in written:
            written["torch_dtype"] = changed["dtype"]
        if "rope_parameters" in changed:
            written.pop("rope_scaling", None)
            changed |= _legacy_rope(changed["rope_parameters"])
        return {"model_type": "qwen3", "architectures": [self.architecture]} | written | changed


# Our own fields, which are not written if they are None.
_OPTIONAL = (
    "final_logit_softcapping",
    "is_causal",
    "num_target_layers",
    "target_name_or_path",
    "target_revision",
    "target_tokenizer_sha256",
)


def _legacy_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


@dataclass(slots=True, kw_only=True)
class DFlashOptions(TreeOptions):
    """Drafting options of a DFlash drafter.

    Attributes:
        method: `"ddtree"` for the best-first tree, `"dflash"` for the greedy chain, or any other method that drafts
            from per-position marginals.
        tree_budget: see `TreeOptions`; DDTree's B. An integer does not affect `"dflash"`: its chain always has
            block_size - 1 tokens, one more with `sample_from_anchor`. `"auto"` shortens chains too.
        block_size: slots of a block, root included; at most the trained number, which None selects. Shorter blocks
            draft fewer tokens per forward.
    """

    method: str = "ddtree"
    tree_budget: int | Literal["auto"] = 64
    block_size: int | None = None

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `DFlashConfig`."""
        TreeOptions.validate(self, config)
        if self.method not in tuple(MARGINAL_METHODS):
            raise unknown_name("method", self.method, MARGINAL_METHODS)
        check_block_option(self.block_size, config.block_size)


def check_block_option(size: object, trained: int) -> None:
    """Raises ValueError unless the option `block_size` is None or at most the trained size."""
    if size is not None and (type(size) is not int or not 2 <= size <= trained):
        raise ValueError(
            f"block_size={size!r} must be an integer from 2 to {trained}, the block this checkpoint was trained with "
            "(root included), or None for that size."
        )

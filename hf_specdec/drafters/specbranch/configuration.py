"""SpecBranchConfig: the shape of H-RAD, the pair of models it was trained for, and where the draft model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

ARCHITECTURE = "SpecBranchDrafter"
OWN_DRAFT_MODEL = "draft_model"  # the folder of a checkpoint that holds its draft model itself


class SpecBranchConfig(PreTrainedConfig):
    """A pair of models, and the predictor of draft lengths between them.

    Args:
        draft_model: where the draft model is: a Hub id, a folder relative to this checkpoint (it then begins with a
            dot), or `"draft_model"`, the folder of that name inside this checkpoint.
        draft_hidden_size: the draft model's, as H-RAD was trained with it; None where it was not trained.
        draft_num_layers: likewise.
        h_rad: whether the checkpoint has an H-RAD.
        target_hidden_size: the target's.
        num_target_layers: the target's decoder layers.
        num_feature_layers: K, how many of the target's last layers H-RAD reads.
        h_rad_sizes: its hidden layers.
        dropout: behind each of them, in training.
        min_confidence: epsilon, the default of the drafting option.
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
    """

    model_type = "hf_specdec_specbranch"

    def __init__(
        self,
        draft_model: str | None = None,
        draft_hidden_size: int | None = None,
        draft_num_layers: int | None = None,
        h_rad: bool = True,
        target_hidden_size: int = 4096,
        num_target_layers: int = 32,
        num_feature_layers: int = 4,
        h_rad_sizes: Sequence[int] = (256, 64),
        dropout: float = 0.4,
        min_confidence: float = 0.4,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.draft_model = draft_model
        self.draft_hidden_size = draft_hidden_size
        self.draft_num_layers = draft_num_layers
        self.h_rad = h_rad
        self.target_hidden_size = target_hidden_size
        self.num_target_layers = num_target_layers
        self.num_feature_layers = num_feature_layers
        self.h_rad_sizes = list(h_rad_sizes)
        self.dropout = dropout
        self.min_confidence = min_confidence
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256
        self.architectures = [ARCHITECTURE]

    def check(self) -> None:
        """Raises ValueError, naming the field, if no H-RAD can be built from this config."""
        fields = ("target_hidden_size", "num_target_layers", "num_feature_layers")
        sizes = {field: getattr(self, field) for field in fields}
        sizes |= {f"h_rad_sizes[{index}]": size for index, size in enumerate(self.h_rad_sizes)}
        for field, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be an integer of at least 1.")
        if self.num_feature_layers > self.num_target_layers:
            raise ValueError(
                f"num_feature_layers={self.num_feature_layers} is more than num_target_layers={self.num_target_layers}."
            )


def is_specbranch(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is what `SpecBranchDrafter.save_pretrained` writes."""
    return config.get("model_type") == SpecBranchConfig.model_type

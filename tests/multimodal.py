"""Tiny random targets of image-text and audio-text classes, and prompts with pictures or sound.

Built from a family's own default config, with all sizes cut down by the names of fields (`support_table.py` has those
of text); inputs are made by the names of the forward's arguments. Nothing here is downloaded.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from tests.support_table import HEAD_DIM, LAYERS, OVERRIDES, SIZES, VOCAB

MARK = VOCAB - 1  # the token of pictures and sound
SIDE, PATCH, FRAMES, MELS = 16, 4, 16, 8  # of a picture in pixels, of its patches; of sound
_ENCODER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "vision_output_dim", "hidden_dim"), 32),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "projector_hidden_size", "output_dim"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers", "layers", "num_global_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_mel_bins", "input_dim", "feature_size"), MELS),
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "head_dim": HEAD_DIM,
    "image_size": SIDE,
    "initializer_range": 0.3,
    "max_source_positions": FRAMES // 2,
    "n_window": 4,
    "n_window_infer": 8,
    "num_key_value_heads": 4,
    "num_position_embeddings": 64,
    "patch_size": PATCH,
    "position_embedding_size": 8,
    "window_size": 8,
}
_MARKS = ("image", "img", "audio", "video", "media")
# What the names of fields do not tell, by part of the config ("" for the whole).
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_WITH_AXES = ("glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
_STARTS = ("vision_start_token_id", "audio_start_token_id")
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    **{name: {"text_config": _AXES} for name in _WITH_AXES},
    **{name: {"text_config": {**_AXES, "model_type": "glm4v_text"}} for name in ("glm46v", "glmga")},
    "gemma3": {"": {"mm_tokens_per_image": 4}},
    "kosmos-2": {"": {"latent_query_num": 4}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [24, 24],
            "rope_parameters": {**_AXES["rope_parameters"], "mrope_section": [1, 1, 2]},
        }
    },
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_AXES["rope_parameters"], "partial_rotary_factor": 1.0}},
    },
    "glmasr": {"audio_config": {"intermediate_size": 128}},  # of the vectors that its projector joins
    "llama4": {
        "vision_config": {
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        }
    },
    "qwen2_5_omni_thinker": {"": dict.fromkeys(_STARTS, MARK - 3), "text_config": _AXES},
    "qwen3_omni_moe_thinker": {"": dict.fromkeys(_STARTS, MARK - 3)},
    "shieldgemma2": {"": {"mm_tokens_per_image": 4}},
    "voxtral": {"": {"audio_token_id": MARK}, "audio_config": {"intermediate_size": 128}},
    **{name: {"": {"image_grid_pinpoints": [[SIDE, SIDE]]}} for name in ("llava_next", "llava_onevision")},
    **{name: {"": {"scale_factor": 2}} for name in ("idefics3", "smolvlm")},
}
# How many tokens of the prompt a picture or sound replaces, where no method of the model tells.
ENTRIES = {"git": 0, "idefics": 0, "kosmos-2": 4, "qwen2_audio": 4}


def families() -> list[str]:
    """All of the installed transformers."""
    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A family's own default config with every size cut down."""
    usual = AutoConfig.for_model(model_type)
    return _cut(usual, PARTS.get(model_type, {}), "")


def _cut(usual: PreTrainedConfig, overrides: dict[str, dict[str, Any]], place: str) -> PreTrainedConfig:
    text = usual.get_text_config(decoder=True)
    given: dict[str, Any] = {}
    for name, part_class in usual.sub_configs.items():
        part = getattr(usual, name, None)
        if part is None or not isinstance(part, PreTrainedConfig):
            part = None if part_class is AutoConfig else part_class()
        if part is not None and part is not usual:
            given[name] = _cut(part, overrides, name).to_dict()
    known = usual.to_dict()
    of_text = any(word in place for word in ("text", "llm", "language", "decoder")) if place else usual is text
    sizes = SIZES if of_text else _ENCODER if place else {"vocab_size": VOCAB, "hidden_size": 32, "projection_dim": 32}
    for name, size in sizes.items():
        if known.get(name, getattr(type(usual), name, None)) is not None and name not in given:
            given[name] = size
    if of_text:
        kinds = list(getattr(usual, "layer_types", None) or ())
        if kinds:
            order = list(dict.fromkeys(kinds))
            given["layer_types"] = [order[index % len(order)] for index in range(LAYERS)]
        if known.get("num_key_value_heads") == known.get("num_attention_heads") and "num_key_value_heads" in given:
            given["num_key_value_heads"] = 4
        rope = copy.deepcopy(getattr(usual, "rope_parameters", None))
        if isinstance(rope, dict) and "mrope_section" in rope:
            given["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
        given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        given |= OVERRIDES.get(usual.model_type, {})
    if not place or of_text:
        for name, value in known.items():
            is_mark = name.endswith(("_token_id", "_token_index", "_token")) and any(each in name for each in _MARKS)
            if is_mark and isinstance(value, int) and not isinstance(value, bool):
                start_or_end = any(word in name for word in ("start", "end", "begin", "boi", "eoi", "video"))
                given[name] = MARK - 1 - (sum(map(ord, name)) % 3) if start_or_end else MARK
    given |= overrides.get(place, {})
    given = {name: value for name, value in given.items() if value is not None}
    problem: Exception | None = None
    for dropped in ((), ("layer_types",), ("head_dim",), ("layer_types", "head_dim")):
        try:
            return type(usual)(**{name: value for name, value in given.items() if name not in dropped})
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def tiny_model(model_type: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A family's multimodal model with random weights."""
    config = tiny_config(model_type)
    model_class = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type])
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if not bool(parameter.isfinite().all()):
            parameter.data = 0.1 * torch.randn_like(parameter)
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return model.eval()


def picture(model: PreTrainedModel, number: int = 0) -> dict[str, Tensor]:
    """The arguments of a forward for one picture or sound; `number` chooses content and, if it varies, size."""
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(number)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(model.dtype)

    if "image_grid_thw" in parameters:
        vision = model.config.vision_config
        height, width = ((4, 4), (4, 8), (8, 4))[number % 3]
        depth = getattr(vision, "temporal_patch_size", 1) or 1
        values = noise(height * width, 3 * depth * PATCH * PATCH)
        if model.config.model_type == "paddleocr_vl":
            values = values[:, : 3 * PATCH * PATCH].view(-1, 3, PATCH, PATCH)
        given = {"pixel_values": values, "image_grid_thw": torch.tensor([[1, height, width]])}
        return given | ({"image_merge_sizes": torch.tensor([1])} if "image_merge_sizes" in parameters else {})
    if "pixel_values" in parameters:
        given = {"pixel_values": noise(1, 3, SIDE, SIDE)}
        if model.config.model_type in ("idefics", "idefics2", "idefics3", "smolvlm"):
            given["pixel_values"] = given["pixel_values"].unsqueeze(1)
        if model.config.model_type in ("llava_next", "llava_onevision"):
            given["pixel_values"] = noise(1, 2, 3, SIDE, SIDE)  # the whole picture, and its only part
        if model.config.model_type in ("lighton_ocr", "llava_next", "llava_next_video", "llava_onevision", "mistral3"):
            given["image_sizes"] = torch.tensor([[SIDE, SIDE]])
        return given
    if "input_features" in parameters:
        given = {"input_features": noise(1, MELS, FRAMES)}
        for name in ("feature_attention_mask", "input_features_mask"):
            if name in parameters:
                given[name] = torch.ones(1, FRAMES, dtype=torch.int64)
        return given
    raise NotImplementedError("no input of a known name")


def num_entries(model: PreTrainedModel, given: dict[str, Tensor]) -> int:
    """How many tokens of the prompt the features of a picture or sound replace."""
    if model.config.model_type in ENTRIES:
        return ENTRIES[model.config.model_type]
    name = "get_image_features" if "pixel_values" in given else "get_audio_features"
    owner = model if hasattr(model, name) else model.model
    found = getattr(owner, name)(**given)
    if not isinstance(found, (Tensor, list, tuple)):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return _rows(found)


def _rows(found: Any) -> int:
    """Vectors in a tensor or in nested lists of them."""
    return found.numel() // found.shape[-1] if isinstance(found, Tensor) else sum(map(_rows, found))


@torch.no_grad()
def prompt(
    model: PreTrainedModel, pictures: Sequence[int | None], lengths: Sequence[int] = (9, 4, 7)
) -> dict[str, Any]:
    """A left-padded batch of rows of text with a picture behind the second token; None for a row without."""
    rows, given = [], []
    for row, number in enumerate(pictures):
        ids = torch.randint(3, VOCAB - 4, (lengths[row],), generator=torch.Generator().manual_seed(row)).tolist()
        if number is not None:
            given.append(picture(model, number))
            ids[2:2] = [MARK] * num_entries(model, given[-1])
        rows.append(ids)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    for name in given[0] if given else ():
        inputs[name] = torch.cat([each[name] for each in given])
    parameters = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters and given:
            inputs[name] = (ids == MARK).long()
    if "image_embeds_position_mask" in parameters and given:
        inputs["image_embeds_position_mask"] = (ids == MARK).long()
    if "image_attention_mask" in parameters and given:
        inputs["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.int64)
    return inputs

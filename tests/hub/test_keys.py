"""Keys of a config that its reader does not know are named in every layout; those that load or run are dropped."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from transformers import PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafting.registry import FAMILIES
from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.formats.keys import DECODER, OURS, TRANSFORMERS, Section, check_keys
from hf_specdec.hub.formats.library import find_own_layout
from hf_specdec.hub.loading import registered_formats
from hf_specdec.hub.recognition import known_layouts
from hf_specdec.methods.dflash.layouts import ZLAB
from hf_specdec.methods.dflash2 import DFLASH2
from hf_specdec.methods.dspark import DSPARK
from hf_specdec.methods.eagle3.layouts import SAFEAILAB, SPECFORGE
from hf_specdec.methods.specblock.layouts import SPECBLOCK
from hf_specdec.unsafe_keys import without_unsafe_keys
from tests.hub.layouts import CASES, LAYERS, build
from tests.method_table import METHODS
from tests.targets import make_target, one_prompt


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, num_hidden_layers=LAYERS)


# The objects of a config that each layout has, at the first case of it. An unknown key in a descriptive one warns.
CHANGES: list[tuple[str, str]] = [
    ("z-lab, a list of layers, block size nested", ""),
    ("z-lab, a list of layers, block size nested", "dflash_config"),
    ("z-lab, rotary base as parameters", "rope_parameters"),
    ("specblock, default taps, offsets", ""),
    ("safeailab, default taps, offsets, no rotary base", ""),
    ("nvidia, a norm before fc", "eagle_config"),
    ("specforge, layer ids", ""),
    ("specforge, layer ids", "eagle_config"),
    ("speculators, no rotary base", ""),
    ("speculators, no rotary base", "transformer_layer_config"),
    ("deepspec eagle3, five taps", ""),
    ("speculators dflash, converted", ""),
    ("speculators dflash, converted", "transformer_layer_config"),
    ("deepspec dflash, the root's slot predicts and nothing says so", ""),
    ("gemma4 assistant, a tied head", ""),
    ("gemma4 assistant, a tied head", "text_config"),
]


def change(folder: Path, section: str, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("case", "section"), CHANGES)
def test_unknown_key_is_named_in_an_error_and_without_a_value_in_a_warning(
    case: str, section: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    CASES[case].save(build(CASES[case], CASES[case].target(target)), tmp_path)
    place = f"{section}." if section else ""
    change(tmp_path, section, gate_of_next_year=None)
    with pytest.warns(UserWarning, match=f"has {place}gate_of_next_year=None, which the reader of .* does not know"):
        load_drafter(tmp_path)
    found = inspect_drafter(tmp_path)
    assert found.problems == []
    assert any(f"{place}gate_of_next_year=None" in note for note in found.notes)
    assert "notes:" in str(found)
    change(tmp_path, section, gate_of_next_year=[1, 2])
    message = rf"config.json of .* has {place}gate_of_next_year=\[1, 2\]: the reader of {CASES[case].format.split()[0]}"
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    found = inspect_drafter(tmp_path)
    [problem] = found.problems
    assert f"has {place}gate_of_next_year=[1, 2]" in problem
    assert (found.format, found.family) == (CASES[case].format, None)


@pytest.mark.parametrize(
    ("case", "section", "key"),
    [
        ("JetSpec, full layers said to be causal", "dflash_config", "causal_head"),
        ("z-lab, full layers said to be causal", "", "is_causal"),
        ("speculators, hidden-state ids, missing flags", "", "norm_before_residual"),
    ],
)
def test_a_switch_that_is_a_text_is_refused(
    case: str, section: str, key: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    CASES[case].save(build(CASES[case], target), tmp_path)
    change(tmp_path, section, **{key: "false"})
    with pytest.raises(ValueError, match=f"has {key}='false'; it must be true or false"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("method", ["eagle3", "gemma4_assistant", "medusa", "specblock", "specbound", "specbranch"])
def test_unknown_key_of_our_own_layouts_is_named(method: str, target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS[method](target).save_pretrained(tmp_path)  # type: ignore[attr-defined]
    change(tmp_path, "", gate_of_next_year=True)
    with pytest.raises(ValueError, match="has gate_of_next_year=True: the reader of"):
        load_drafter(tmp_path)
    assert "gate_of_next_year" in inspect_drafter(tmp_path).problems[0]


def test_about_engines_an_unknown_key_only_warns(target: PreTrainedModel, tmp_path: Path) -> None:
    case = CASES["speculators, no rotary base"]
    case.save(build(case, target), tmp_path)
    change(tmp_path, "speculators_config", pace="fast")
    with pytest.warns(UserWarning, match="has speculators_config.pace='fast'"):
        load_drafter(tmp_path)
    assert inspect_drafter(tmp_path).problems == []


@pytest.mark.parametrize(
    ("section", "key", "fine", "wrong"),
    [
        ("dflash_config", "attention_mode", "mha", "mla"),
        ("dflash_config", "use_aux_hidden_state", True, False),
        ("dflash_config", "projector_type", "dflash", "other"),
        ("", "output_multiplier", 1.0, 0.5),
        ("", "partial_rotary_factor", 1.0, 0.5),
        ("dflash_config", "layer_ids", [2, 3, 6], [2, 3, 5]),
        ("dflash_config", "num_target_layers", LAYERS, LAYERS + 1),
        ("dflash_config", "runtime_block_size", 3, None),
    ],
)
def test_key_that_is_right_only_with_some_values(
    section: str, key: str, fine: Any, wrong: Any, target: PreTrainedModel, tmp_path: Path
) -> None:
    case = CASES["z-lab, a list of layers, block size nested"]
    case.save(build(case, target), tmp_path)
    change(tmp_path, section, **{key: fine})
    load_drafter(tmp_path, target)
    if wrong is not None:
        change(tmp_path, section, **{key: wrong})
        with pytest.raises(ValueError, match=key):
            load_drafter(tmp_path, target)
        assert key in inspect_drafter(tmp_path).problems[0]


def test_misspelt_key_is_answered_with_the_nearest(target: PreTrainedModel, tmp_path: Path) -> None:
    case = CASES["z-lab, use_swa"]
    case.save(build(case, target), tmp_path)
    change(tmp_path, "dflash_config", swa_windowsize=4)
    with pytest.raises(ValueError, match=r"has dflash_config.swa_windowsize=4 \(did you mean swa_window_size\?\)"):
        load_drafter(tmp_path)


def test_thousands_of_unknown_keys_are_named_in_short(target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS["dflash"](target).save_pretrained(tmp_path)  # type: ignore[attr-defined]
    change(tmp_path, "", **{f"{'key' * 1000}{number}": "value" * 1000 for number in range(3000)})
    with pytest.raises(ValueError, match="and 2994 more: the reader of dflash") as error:
        load_drafter(tmp_path)
    assert len(str(error.value)) < 1500


def test_key_of_a_newer_host_at_its_default_says_nothing() -> None:
    section, later = Section(read=frozenset(("hidden_size",))), {"hidden_size": 8, "later": 0}
    assert check_keys(section, later, {"later": 0}, "it", "its layout") == []
    for value in (1, [0]):
        with pytest.raises(ValueError, match="it has later="):
            check_keys(section, later | {"later": value}, {"later": 0}, "it", "its layout")


# What trainers write by their own examples, and other published files are known to have.
PUBLISHED: dict[str, tuple[Format, dict[str, Any]]] = {
    "SpecForge, EAGLE-3": (
        SPECFORGE,
        {
            "decoder_sparse_step": 1, "max_window_layers": 48, "pretraining_tp": 1, "sliding_window": 512,
            "target_model_type": "gemma3_text", "use_sliding_window": False, "fc_norm": True, "norm_output": True,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33], "use_aux_hidden_state": True},
        },
    ),
    "nvidia": (
        SAFEAILAB,
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7,
                "mscale_all_dim": 0.7, "original_max_position_embeddings": 4096, "truncate": False,
            },
            "eagle_config": {
                "use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
                "use_input_layernorm_in_first_layer": True, "norm_before_fc": True,
            },
            "truncated_vocab_size": 64,
        },
    ),
    "SpecForge, DFlash": (
        ZLAB,
        {
            "dtype": "bfloat16", "max_window_layers": 5, "rope_scaling": None, "sliding_window": 2048,
            "layer_types": ["full_attention"], "initializer_range": 0.02, "auto_map_unused": None,
        },
    ),
    "SpecBlock": (SPECBLOCK, {"max_window_layers": 36, "rank_classes": 4, "sliding_window": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_that_published_files_have_are_known(name: str) -> None:
    format, fields = PUBLISHED[name]
    assert format.keys is not None
    notes = check_keys(format.keys, fields, {}, "it", "its layout")
    assert all("auto_map_unused" in note for note in notes)


def test_every_layout_but_that_of_the_host_says_which_keys_it_knows() -> None:
    formats = [format for format in known_layouts() if isinstance(format, Format) and format.family != "causal_lm"]
    assert formats
    assert all(format.keys is not None for format in formats)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.load is None])
def test_fields_of_our_config_classes_are_known(family: str) -> None:
    published = {"dflash": ZLAB, "dflash2": DFLASH2, "dspark": DSPARK, "specblock": SPECBLOCK}
    own = published.get(family) or find_own_layout({"model_type": f"hf_specdec_{family}"}, "", registered_formats())
    assert own is not None
    assert own.keys is not None
    config_class: Any = FAMILIES[family].drafter.config_class
    fields = {field.name for field in dataclasses.fields(config_class)}
    fields |= {name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")}
    known = own.keys.read | own.keys.idle | set(own.keys.nested) | set(own.keys.only)
    assert fields - known == set()
    assert known >= OURS
    assert known >= TRANSFORMERS
    assert known >= DECODER or not issubclass(config_class, transformers.LlamaConfig)


# Keys that make transformers load or run something.

KERNELS = [
    {"_attn_implementation": "owner/kernel"},
    {"attn_implementation": "owner/kernel@main:forward"},
    {"attn_implementation": {"": "owner/kernel"}},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": "owner/kernel"},
    {"fusion_config": {"patch_embeddings": True}},
]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a kernel or patches classes fails."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise AssertionError("transformers was asked for what a checkpoint names")

    monkeypatch.setattr(
        transformers.modeling_utils, "is_kernel", lambda name: fail() if name and "/" in name else False
    )
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fail)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("fields", KERNELS, ids=str)
@pytest.mark.parametrize("kind", ["dflash", "causal_lm_tree"])
def test_kernels_that_a_config_names_are_not_asked_for(
    kind: str, fields: dict[str, Any], target: PreTrainedModel, tmp_path: Path
) -> None:
    METHODS[kind](target).save_pretrained(tmp_path)  # type: ignore[attr-defined]
    change(tmp_path, "", **fields)
    [key] = fields
    with pytest.warns(UserWarning, match=f"has {key}=.*, by which transformers would load or run .*: dropped"):
        drafter = load_drafter(tmp_path, target)
    [note] = inspect_drafter(tmp_path).notes
    assert f"has {key}=" in note
    settings = {"max_new_tokens": 6, "do_sample": False}
    output = target.generate(**one_prompt(), **settings, assistant_model=drafter)
    assert output.tolist() == target.generate(**one_prompt(), **settings).tolist()
    drafter.save_pretrained(tmp_path / "again")  # type: ignore[attr-defined]
    assert key.removeprefix("_") not in (tmp_path / "again" / "config.json").read_text()


@pytest.mark.usefixtures("no_kernels")
def test_draft_model_of_a_pair_and_generation_settings_name_no_kernel(target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS["specbranch"](target).save_pretrained(tmp_path)  # type: ignore[attr-defined]
    change(tmp_path / "draft_model", "", _attn_implementation="owner/kernel", experts_implementation="owner/kernel")
    settings = tmp_path / "draft_model" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"_attn_implementation": "owner/kernel"}))
    with pytest.warns(UserWarning, match=r"draft_model' has _attn_implementation='owner/kernel', .*: dropped"):
        drafter: Any = load_drafter(tmp_path, target)
    assert drafter.draft_model.config._attn_implementation == "sdpa"
    for text, message in (
        ("[]", "holds a list, but must hold a JSON object"),
        ('{"model_type": "x"}', "has architectures None and model_type 'x'"),
    ):
        (tmp_path / "draft_model" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_drafter(tmp_path, target)
    (tmp_path / "draft_model" / "config.json").unlink()
    with pytest.raises(OSError, match="draft_model' has no config.json"):
        load_drafter(tmp_path, target)


def test_nested_keys_are_dropped_and_named() -> None:
    vision = {"attn_implementation": "owner/kernel", "auto_map": {"AutoModel": "code.Model"}, "width": 1}
    parts = [{"_experts_implementation": "owner/experts"}, 3]
    kept, dropped = without_unsafe_keys({"_name_or_path": "x", "vision_config": vision, "parts": parts, "auto_map": {}})
    assert kept == {"vision_config": {"width": 1}, "parts": [{}, 3], "auto_map": {}}
    assert dropped == [
        "vision_config.attn_implementation='owner/kernel'",
        "vision_config.auto_map={'AutoModel': 'code.Model'}",
        "parts._experts_implementation='owner/experts'",
    ]


def test_code_that_a_config_names_is_noted(target: PreTrainedModel, tmp_path: Path) -> None:
    METHODS["dflash"](target).save_pretrained(tmp_path)  # type: ignore[attr-defined]
    change(tmp_path, "", auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    load_drafter(tmp_path)  # published drafters name it, so nothing is said
    assert inspect_drafter(tmp_path).notes == ["config.json names Python code (auto_map), which is never run here."]

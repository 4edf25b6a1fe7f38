"""Multi-token prediction: tiny targets whose checkpoints hold such a layer, against the equations, token for token."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.mtp import MTPDrafter, find_layout
from tests.support_table import HIDDEN, VOCAB, tiny_config
from tests.targets import one_prompt, ragged_prompts
from tests.watched import Watched

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
WEIGHTS = "model.safetensors"


class Family(NamedTuple):
    """A family's checkpoint, and how its layer is run; source: shared facts on formats of 2026, 7.1 and 7.4.

    Attributes:
        model_type: of the target.
        prefix: of all names below.
        names: norm of the embedding, norm of the state, projection, final norm or None.
        parts: prefix of each decoder layer -> the target's layer that its attention is of, and that its MLP is of.
        settings: further ones of the config.
        renamed: part of a name as transformers saves the target's layers -> as this checkpoint has it.
        head: name of an output head of its own.
        eager: the family has eager attention only.
        plus_one: norms multiply by 1 + weight.
        window: most entries that a query sees.
    """

    model_type: str
    prefix: str
    names: tuple[str, str, str, str | None]
    parts: dict[str, tuple[int, int]]
    settings: dict[str, Any] = {}  # noqa: RUF012 (no test changes it)
    renamed: tuple[str, str] = ("", "")
    head: str | None = None
    eager: bool = False
    plus_one: bool = False
    window: int | None = None
    state_first: bool = False
    state_normed: bool = True
    recurs_normed: bool = True
    zero_first: bool = False


_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_FINAL = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_LAST = {"": (3, 3)}
_FIRST = {"layers.0.": (3, 3)}
_MIXED = ["full_attention", "sliding_attention"] * 2
FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family("deepseek_v3", "model.layers.4.", _DEEPSEEK, _LAST, zero_first=True),
    "deepseek_v32": Family("deepseek_v32", "model.layers.4.", _DEEPSEEK, _LAST, zero_first=True),
    "glm_moe_dsa": Family("glm_moe_dsa", "model.layers.4.", _DEEPSEEK, _LAST, zero_first=True),
    "glm4_moe": Family("glm4_moe", "model.layers.4.", _DEEPSEEK, _LAST, zero_first=True, recurs_normed=False),
    "glm4_moe_lite": Family("glm4_moe_lite", "model.layers.4.", _DEEPSEEK, _LAST, recurs_normed=False),
    "hy_v3": Family("hy_v3", "model.layers.4.", _FINAL, _LAST, zero_first=True),
    "bailing_hybrid": Family("bailing_hybrid", "model.layers.4.", _FINAL, _LAST, zero_first=True),
    "qwen3_next": Family("qwen3_next", "mtp.", _QWEN, _FIRST, plus_one=True),
    "qwen3_5": Family("qwen3_5_text", "mtp.", _QWEN, _FIRST, plus_one=True),
    "qwen3_5_moe": Family("qwen3_5_moe_text", "mtp.", _QWEN, _FIRST, plus_one=True),
    "olmo_hybrid": Family("olmo_hybrid", "mtp.", _QWEN, _FIRST),
    "exaone_moe": Family("exaone_moe", "mtp.", _QWEN, {"layers.0.": (3, 0)}),
    "mellum": Family("mellum", "mtp.", _QWEN, _FIRST, {"layer_types": _MIXED, "num_mtp_layers": 1}, window=6),
    "ernie4_5_moe": Family(
        "ernie4_5_moe", "model.", ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None),
        {"mtp_block.0.": (0, 0)}, zero_first=True,
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash", "model.mtp.layers.0.", _FINAL, {"": (3, 0)}, renamed=("post_attention_", "pre_mlp_"),
        eager=True, window=6,
    ),
    # transformers has no class for MiMo 1 and Step 3.5: a layer as theirs beside targets that it has.
    "mimo": Family(
        "qwen2", "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), _LAST,
        state_first=True, state_normed=False, zero_first=True,
    ),
    "step3p5": Family(
        "qwen3", "model.layers.4.", ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"), _LAST,
        renamed=("mlp", "transformer.mlp"), head="transformer.shared_head.output", state_normed=False,
        recurs_normed=False,
    ),
    "nemotron_h": Family(
        "nemotron_h", "mtp.", ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm"),
        {"layers.0.": (2, 2), "layers.1.": (1, 1)},
    ),
}  # fmt: skip


class Made(NamedTuple):
    """A target; the tensors of its checkpoint that transformers leaves out; the decoder layers among them."""

    target: Any
    stored: dict[str, Tensor]
    layers: list[nn.Module]


def make_target(family: str, folder: Path, *, counting: bool = False) -> Made:
    """A target saved with a layer of its own kind for the next token, and loaded again, which leaves that out.

    Args:
        family: of `FAMILIES`.
        folder: to save it in.
        counting: whether layers add next to nothing, so that the next token depends on the last alone, and the layer's
            projection passes on the embedding.
    """
    row = FAMILIES[family]
    if row.model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {row.model_type}")
    config = tiny_config(row.model_type)
    config.update(row.settings)
    if "num_mtp_layers" in row.settings:
        config = type(config)(**{**config.to_dict(), "mtp_layer_types": None, "mtp_mlp_layer_types": None})
    implementation = "eager" if row.eager else "sdpa"
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        if counting and re.search(r"layers.*(o_proj|out_proj|down_proj)", name):
            parameter.data *= 1e-3
    embeddings = model.get_input_embeddings().weight.data
    embeddings[0] = embeddings[1:].mean(0)  # for zeros, as of a pad token, an indexer's scores are all equal
    model.save_pretrained(folder)

    twin = copy.deepcopy(model)  # saved with the new layers, which gives their names in files
    twins: Any = decoder_layers(twin)
    for attention, mlp in row.parts.values():
        if mlp != attention:
            twins[attention].mlp = copy.deepcopy(twins[mlp].mlp)
        for parameter in twins[attention].parameters():
            parameter.data += 0 if counting else 0.1 * torch.randn_like(parameter)
    twin.save_pretrained(folder / "twin")
    saved, stored = load_file(folder / "twin" / WEIGHTS), {}
    for prefix, (attention, _) in row.parts.items():
        for name, tensor in saved.items():
            if found := re.fullmatch(rf"\w+\.layers\.{attention}\.(.*)", name):
                stored[prefix + found[1].replace(*row.renamed)] = tensor
    for norm in (*row.names[:2], row.names[3]):
        if norm is not None:
            stored[f"{norm}.weight"] = torch.full((HIDDEN,), 0.0 if row.plus_one else 1.0)
            stored[f"{norm}.weight"] += 0 if counting else torch.randn(HIDDEN)
    projection = 0.3 * torch.randn(HIDDEN, 2 * HIDDEN)
    if counting:
        ours = getattr(model.get_decoder(), "norm", None)
        assert ours is not None
        stored |= {f"{norm}.weight": ours.weight.data.clone() for norm in (row.names[0], row.names[3])}
        half = [torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)]
        projection = torch.cat(half[::-1] if row.state_first else half, 1)
    stored[f"{row.names[2]}.weight"] = projection
    if row.head is not None:
        stored[f"{row.head}.weight"] = 0.3 * torch.randn(VOCAB, HIDDEN)
    if row.names == _DEEPSEEK:  # copies of the target's tables, which are not read
        stored["embed_tokens.weight"] = model.get_input_embeddings().weight.data
        stored["shared_head.head.weight"] = model.get_output_embeddings().weight.data
    stored = {f"{row.prefix}{name}": tensor.clone().contiguous() for name, tensor in stored.items()}
    save_file(load_file(folder / WEIGHTS) | stored, folder / WEIGHTS)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    loaded.config._experts_implementation = "eager"
    loaded.generation_config.update(eos_token_id=None, pad_token_id=0)
    return Made(loaded, stored, [twins[attention] for attention, _ in row.parts.values()])


@functools.cache
def _made(family: str, folder: Path) -> Made:
    return make_target(family, folder)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the target of a family, made once."""
    folder = tmp_path_factory.mktemp("targets")
    return lambda family: _made(family, folder / family)


def expected_chain(made: Made, text: Tensor, depth: int, row: Family) -> list[int]:
    """The greedy draft by the equations, all pairs of the text in one plain forward each time, without a cache."""
    base, config = made.target.get_decoder(), made.target.config
    eps = next(getattr(config, name) for name in vars(config) if re.fullmatch(r"(rms|layer)_?norm_eps(ilon)?", name))
    table = made.target.get_input_embeddings().weight
    head = made.stored[f"{row.prefix}{row.head}.weight"] if row.head else made.target.get_output_embeddings().weight

    def norm(place: int, states: Tensor) -> Tensor:
        if (name := row.names[place]) is None:
            return states
        weight = made.stored[f"{row.prefix}{name}.weight"]
        scale = (states.square().mean(-1, keepdim=True) + eps).rsqrt()
        return states * scale * (1 + weight if row.plus_one else weight)

    kept: list[Any] = []
    hook = decoder_layers(made.target)[-1].register_forward_hook(lambda module, args, output: kept.append(output))
    states = base(text[:, :-1]).last_hidden_state
    hook.remove()
    features = states if row.state_normed else kept[0] if isinstance(kept[0], Tensor) else kept[0][0]
    tokens = text[:, 1:]
    drafted: list[int] = []
    for _ in range(depth):
        embedded = table[tokens].clone()
        if row.zero_first:
            embedded[:, 0] = 0
        joined = [norm(0, embedded), norm(1, features)]
        projection = made.stored[f"{row.prefix}{row.names[2]}.weight"]
        hidden = torch.cat(joined[::-1] if row.state_first else joined, -1) @ projection.T
        count = tokens.shape[1]
        positions = torch.arange(count).unsqueeze(0)
        seen = torch.ones(count, count).tril() if row.window is None else torch.ones(count, count).tril().triu(
            1 - row.window
        )  # fmt: skip
        mask = torch.zeros(count, count).masked_fill(seen == 0, torch.finfo(torch.float32).min)[None, None]
        turned = None
        if getattr(base, "rotary_emb", None) is not None:
            kind = ["full_attention" if row.window is None else "sliding_attention"]
            typed = row.model_type in ("mellum", "mimo_v2_flash")
            axes = positions.expand(3, -1, -1) if row.model_type.startswith("qwen3_5") else positions
            turned = base.rotary_emb(hidden, axes, *(kind if typed else []))
        for layer in made.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        normed = norm(3, hidden)
        token = int((normed @ head.T)[0, -1].argmax())
        drafted.append(token)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        features = torch.cat([features, (normed if row.recurs_normed else hidden)[:, -1:]], 1)
    return drafted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafts_are_those_of_the_equations(family: str, targets: Any) -> None:
    made = targets(family)
    drafter = load_drafter("mtp", made.target, depth=4, top_k=1, tree_budget=4)
    assert isinstance(drafter, MTPDrafter)
    watched = Watched(drafter)
    output = made.target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    assert len(watched.rounds) > 4
    for drafted in watched.rounds:
        text = output[:, : drafted.context.lengths[0]]
        assert drafted.tree.token_ids[0, 1:].tolist() == expected_chain(made, text, 4, FAMILIES[family])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["glm4_moe", "mellum", "deepseek_v32"])  # a window or an indexer meets the padding
@torch.no_grad()
def test_padding_changes_no_draft(family: str, targets: Any) -> None:
    made = targets(family)
    watched = Watched(load_drafter("mtp", made.target, depth=3, top_k=1, tree_budget=3))
    prompts = ragged_prompts()
    made.target.generate(**prompts, **GREEDY, assistant_model=watched)
    for drafted in watched.rounds[:4]:
        for row, padding in enumerate((prompts["attention_mask"] == 0).sum(1).tolist()):
            text = torch.tensor([drafted.text(row)[padding:]])
            expected = expected_chain(made, text, 3, FAMILIES[family])
            assert drafted.tree.token_ids[row, 1:].tolist() == expected


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_behind_a_given_cache_a_window_holds_as_many_tokens_as_ever(targets: Any) -> None:
    made, row = targets("mellum"), FAMILIES["mellum"]
    assert row.window is not None
    text = one_prompt(length=4 * row.window)["input_ids"]
    cache = made.target(text[:, : 2 * row.window])[CACHE]
    watched = Watched(load_drafter("mtp", made.target, depth=3, top_k=1, tree_budget=3))
    output = made.target.generate(text, **GREEDY, **{CACHE: cache}, assistant_model=watched)
    assert len(watched.rounds) > 4
    for drafted in watched.rounds:
        # It has read as many tokens as the window holds, so that those before have no effect.
        expected = expected_chain(made, output[:, : drafted.context.lengths[0]], 3, row)
        assert drafted.tree.token_ids[0, 1:].tolist() == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_and_drafts_are_made(family: str, targets: Any) -> None:
    target = targets(family).target
    drafter = load_drafter(target.name_or_path, target, depth=3, top_k=3, tree_budget=9)
    assert isinstance(drafter, MTPDrafter), "the target's own name means its own layer"
    for prompts in (one_prompt(), ragged_prompts()):
        alone = target.generate(**prompts, **GREEDY)
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats is not None
        assert drafter.stats.num_draft_tokens > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "exaone_moe", "mimo_v2_flash", "mimo"])
def test_a_layer_that_knows_the_target_is_accepted(family: str, tmp_path: Path) -> None:
    target = make_target(family, tmp_path, counting=True).target
    drafter = load_drafter("mtp", target, depth=3, top_k=2, tree_budget=16)
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.mean_acceptance_length > 3


def _files_with(made: Made, changes: dict[str, Tensor | None], **config: Any) -> None:
    """Writes a target's files again with other tensors, None for none, and other keys in the config."""
    folder = Path(made.target.name_or_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_8_bits_are_dequantised(tmp_path: Path) -> None:
    made = make_target("hy_v3", tmp_path)
    changes: dict[str, Tensor | None] = {}
    name = "model.layers.4.self_attn.o_proj.weight"  # [32, 32]
    changes[name] = made.stored[name].to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [3.0, 4.0], [0.25, 1.0]])  # of blocks of 12 rows and 20 columns, the last cut
    changes[f"{name}_scale_inv"] = scales
    _files_with(made, changes, quantization_config={"quant_method": "fp8", "weight_block_size": [12, 20]})
    drafter: Any = load_drafter("mtp", made.target)
    expected = torch.empty(32, 32)
    for row in range(32):
        for column in range(32):
            expected[row, column] = changes[name][row, column].float() * scales[row // 12, column // 20]  # type: ignore
    torch.testing.assert_close(drafter.blocks[0].layer.self_attn.o_proj.weight, expected, rtol=0, atol=0)

    for wrong, message in (
        (
            {f"{name}_scale_inv": scales[:2]},
            r"o_proj.weight_scale_inv are \[2, 2\], which does not fit weight_block_size",
        ),
        (
            {f"{name}_scale_inv": None},
            "quantised in a way that is not supported: .*o_proj.weight is torch.float8_e4m3fn",
        ),
        ({name: None, f"{name}_scale_inv": scales}, "o_proj.weight of .* is missing and its scales"),
    ):
        _files_with(made, wrong)
        with pytest.raises(ValueError, match=message):
            load_drafter("mtp", made.target)


@pytest.mark.filterwarnings("ignore")
def test_experts_may_be_stored_joined(tmp_path: Path) -> None:
    made = make_target("glm4_moe", tmp_path)
    apart: Any = load_drafter("mtp", made.target)
    prefix = "model.layers.4."
    joined = {f"{prefix}{name}": tensor for name, tensor in made.layers[0].state_dict().items()}
    _files_with(made, {name: None for name in made.stored if ".experts." in name} | joined)
    together: Any = load_drafter("mtp", made.target)
    for name, tensor in apart.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    made = make_target("glm4_moe", tmp_path)
    other = make_target("glm4_moe", tmp_path / "other").target
    with pytest.raises(ValueError, match="is the multi-token-prediction layer of target"):
        other.generate(**one_prompt(), **GREEDY, assistant_model=load_drafter("mtp", made.target))
    prefix = "model.layers.4."
    for name, tensor, message in (
        (
            "self_attn.q_proj.weight",
            None,
            r"are not those .*: model.layers.4.self_attn.q_proj.weight missing\. The file",
        ),
        ("self_attn.q_proj.weight", torch.ones(3, 32), r"q_proj.weight \(3, 32\), where \(32, 32\) belongs"),
        ("mlp.experts.1.up_proj.weight", None, "mlp.experts.gate_up_proj cannot be made of its parts"),
        ("mlp.extra.weight", torch.ones(1), "model.layers.4.mlp.extra.weight not expected"),
        ("enorm.weight", None, r"model.layers.4.enorm: .*\s.*Missing key.* \"weight\""),
        (
            "eh_proj.weight",
            torch.ones(32, 32),
            r"4.eh_proj: .*\s.*size mismatch for weight: .*32, 32.*32, 64",
        ),
        (
            "mlp.gate.weight",
            torch.full((4, 32), float("nan")),
            "NaN or infinite numbers in model.layers.4.mlp.gate.weight",
        ),
    ):
        _files_with(made, {f"{prefix}{name}": tensor})
        with pytest.raises(ValueError, match=message):
            load_drafter("mtp", made.target)
        _files_with(made, {f"{prefix}{name}": made.stored.get(f"{prefix}{name}")})
    load_drafter("mtp", made.target)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass the loaded model, load_drafter\('mtp', target\)"):
        load_drafter("mtp")
    plain: Any = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ValueError, match="The target has no name_or_path"):
        load_drafter("mtp", plain)
    plain.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no multi-token-prediction layer that is known here: looked for eh_proj"):
        load_drafter("mtp", plain)
    for name, needs in (
        ("model.mtp.layers.0.input_proj.weight", "a decoder layer with short convolutions"),
        ("model.mtp.other.weight", "model.mtp.other.weight and 0 more are of a layout that is not supported"),
    ):
        _files_with(Made(plain, {}, []), {name: torch.ones(1)})
        with pytest.raises(ValueError, match=needs):
            load_drafter("mtp", plain)
        _files_with(Made(plain, {}, []), {name: None})


@pytest.mark.filterwarnings("ignore")
def test_targets_whose_modules_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    target = make_target("olmo_hybrid", tmp_path).target
    weight = target.model.layers[3].self_attn.o_proj.weight
    for data, message in (
        (weight.to(torch.float8_e4m3fn), "are quantised: load it in bfloat16, with quant"),
        (weight.to("meta"), "are offloaded: load it without offloading"),
    ):
        target.model.layers[3].self_attn.o_proj.weight = nn.Parameter(data, requires_grad=False)
        with pytest.raises(ValueError, match=message):
            load_drafter("mtp", target)


@pytest.mark.filterwarnings("ignore")
def test_layers_with_states_are_refused(tmp_path: Path) -> None:
    made = make_target("nemotron_h", tmp_path)
    made.target.config.mtp_layers_block_type = ["linear_attention", "moe"]
    prefix, saved = "mtp.layers.0.", load_file(tmp_path / WEIGHTS)
    changes: dict[str, Tensor | None] = {name: None for name in made.stored if name.startswith(f"{prefix}mixer")}
    for name, tensor in saved.items():
        if found := re.fullmatch(r"backbone\.layers\.0\.(mixer.*)", name):
            changes[prefix + found[1]] = tensor
    _files_with(made, changes)
    with pytest.raises(ValueError, match="is one of linear_attention, whose states a draft tree"):
        load_drafter("mtp", made.target)


@pytest.mark.filterwarnings("ignore")
def test_inspecting_a_target_tells_of_the_layer(tmp_path: Path) -> None:
    made = make_target("glm4_moe", tmp_path)
    found = inspect_drafter(tmp_path)
    assert not found.problems
    layer = "It holds a multi-token-prediction layer at model.layers.4.eh_proj: as a target it drafts for itself"
    assert found.notes == [f"{layer}, with load_drafter('mtp', target)."]
    _files_with(made, {}, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    quantised = inspect_drafter(tmp_path)
    assert "quantised drafters are not supported" in quantised.problems[0]
    assert quantised.notes == found.notes, "as a target it may be quantised"
    _files_with(made, dict.fromkeys(made.stored))
    assert not inspect_drafter(tmp_path).notes
    inkling = {"mtp.layers.0.input_proj.weight": torch.ones(1)}
    _files_with(made, inkling)
    assert "does not support: the layer needs a decoder layer with short conv" in inspect_drafter(tmp_path).notes[0]


@pytest.mark.filterwarnings("ignore")
def test_sharded_checkpoints_are_read_by_their_index(tmp_path: Path) -> None:
    made = make_target("qwen3_5", tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    drafter: Any = load_drafter("mtp", made.target)
    (tmp_path / WEIGHTS).unlink()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = {name: second if name in made.stored else first for name in whole}
    for shard in (first, second):
        save_file({name: tensor for name, tensor in whole.items() if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    again: Any = load_drafter("mtp", made.target)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    for place, message in (
        (first, f"says that {first} holds mtp.fc.weight, but it does not"),
        ("../elsewhere.safetensors", "shards must be safetensors files in its folder"),
        (1, "has a weight_map that does not name a file per tensor"),
    ):
        index = {"weight_map": shards | {"mtp.fc.weight": place}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            load_drafter("mtp", made.target)


def test_layouts_are_told_by_names_of_tensors() -> None:
    deep = [f"model.layers.{name}.weight" for name in ("3.mlp.up_proj", "4.eh_proj", "4.final_layernorm")]
    found = find_layout(deep, 4, "hy_v3")
    assert found is not None
    assert (found.final_norm, found.recurs_normed, found.zero_first) == ("model.layers.4.final_layernorm", True, True)
    assert find_layout(deep, 5, "hy_v3") is None
    nested = find_layout(["model.language_model.layers.16.eh_proj.weight"], 16, "glm_ocr")
    assert nested is not None
    assert (nested.layers, nested.recurs_normed, nested.zero_first) == (
        ("model.language_model.layers.16.",),
        False,
        False,
    )
    longcat = find_layout([f"model.mtp.layers.0.{name}.weight" for name in ("eh_proj", "enorm.m")], 4, "longcat_flash")
    assert longcat is not None
    assert "one attention and one dense MLP" in str(longcat.needs)
    several = find_layout(["mtp.fc.weight"], 4, "qwen4_exp_text")
    assert several is not None
    assert "residual streams" in str(several.needs)

"""The page docs/support.md: how drafts are verified on each decoder-only family of the installed transformers.

    python -m tests.support_table            # writes it
    python -m tests.support_table llama bart # prints these families only; "pictures" before them for the second table

Every family of `AutoModelForCausalLM` is built tiny, with random weights, from its own default config cut down by the
names of its fields; then drafts that are right in part are verified, one row and a padded batch. The second table has
the families of `AutoModelForMultimodalLM` (`multimodal.py` builds them), with text, a picture or sound, two rows with
different ones, and a second turn on the cache of the first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec.decoding.upstream import CACHE
from tests.scripted import right_for

FILE = Path(__file__).parents[1] / "docs" / "support.md"
VOCAB, LAYERS, HIDDEN, HEADS, HEAD_DIM, NEW, SECONDS = 64, 4, 32, 4, 8, 20, 60
MEANINGS = {
    "trees": "Draft trees are verified, in batches too.",
    "chains": "Draft trees cannot be verified; transformers' own loop verifies chains, one row at a time.",
    "plain": "Nothing is drafted in some or all calls: they are decoded plainly, with a warning.",
    "other tokens": "The output differs from plain decoding: a defect.",
    "error": "A call fails: a defect.",
    "no plain decoding": "Not tested: the tiny model does not decode plainly, or not twice in the same way.",
    "not built": "Not tested: no tiny model could be built from the default config.",
}
KINDS = tuple(MEANINGS)

# Sizes by the name of the field, in all configs that have it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "encoder_vocab_size", "decoder_vocab_size"), VOCAB),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("dim_model", "embed_dim", "emb_dim", "attention_hidden_size", "lru_width"), HIDDEN),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_inner", "decoder_ffn_dim", "dense_intermediate_size", "dim_ff"),
        48,
    ),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dff", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), HIDDEN),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_zero_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("head_dim", "global_head_dim", "attention_head_dim", "kv_channels", "dim_head"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "o_lora_rank"), 16),
    "index_topk": 8,
    "index_n_heads": 32,  # with few, many scores are exactly 0, and which of equal ones are read is by chance
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_attention_window"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), HEAD_DIM),
    **dict.fromkeys(("mamba_d_ssm", "mamba_intermediate_size"), 64),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "laurel_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "hidden_size_per_layer_input": HEAD_DIM,
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 2,
    "query_pre_attn_scalar": HEAD_DIM,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_cache": True,
}
_LINEAR = ["linear_attention", "full_attention"] * 2
_MAMBA = {"mamba_expand": 2, "mamba_d_conv": 4}
_DOTS3 = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 2 * HEAD_DIM,
    "swa_qk_nope_head_dim": HEAD_DIM,
    "swa_qk_rope_head_dim": HEAD_DIM,
    "swa_v_head_dim": HEAD_DIM,
}
# What the names of fields do not tell.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "codegen": {"rotary_dim": HEAD_DIM},
    "deepseek_v2": {"topk_method": "greedy"},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "falcon": {"head_dim": None},
    "gemma4_text": {"head_dim": HEAD_DIM, "global_head_dim": HEAD_DIM},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": HEAD_DIM},
    "granitemoehybrid": {"layer_types": _LINEAR, **_MAMBA},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "num_heads": HEADS, "expand": 2},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": 2},
    "xlnet": {"max_position_embeddings": None},
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 16,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "mamba_expand": 2,
        "n_mamba_heads": 2,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [1, 3],
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "mamba_expand": 2,
        "num_key_value_heads": HEADS,
        "num_mem_blocks": 1,
    },
}


def tiny_config(model_type: str) -> Any:
    """A family's own default config with every size cut down."""
    usual = AutoConfig.for_model(model_type).get_text_config(decoder=True)
    known = usual.to_dict()
    given = {
        name: size for name, size in SIZES.items() if known.get(name, getattr(type(usual), name, None)) is not None
    }
    given |= {name: size for name, size in SIZES.items() if name in ("is_decoder", "is_encoder_decoder", "use_cache")}
    kinds = list(getattr(usual, "layer_types", None) or ())
    if kinds:  # each kind as early as it can be
        order = list(dict.fromkeys(kinds))
        given["layer_types"] = [order[place % len(order)] for place in range(LAYERS)]
    if "num_key_value_heads" in given and known.get("num_key_value_heads") == known.get("num_attention_heads"):
        given["num_key_value_heads"] = HEADS
    given |= OVERRIDES.get(model_type, {})
    given = {name: value for name, value in given.items() if value is not None}
    problem: Exception | None = None
    # Some families derive a field from others, or check one against another.
    for dropped in ((), ("layer_types",), ("head_dim",), ("layer_types", "head_dim")):
        attempt = {name: value for name, value in given.items() if name not in dropped}
        try:
            return type(usual)(**attempt, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def tiny_model(model_type: str) -> PreTrainedModel:
    """A family's causal language model with random weights, in float64."""
    config = tiny_config(model_type)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    embeddings = model.get_input_embeddings().weight
    embeddings.data[0] = embeddings.data[1:].mean(
        0
    )  # the pad token's are zeros, on which scores of an indexer are equal
    model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return model.eval()


def prompts() -> Iterator[dict[str, Tensor]]:
    """One row, and three with left padding."""
    ids = torch.randint(3, VOCAB - 2, (3, 9), generator=torch.Generator().manual_seed(2))
    yield {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1])}
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    yield {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def outcome(model_type: str) -> tuple[str, str]:
    """One of `KINDS`, and why."""
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    kinds, reasons = set(), []
    for number, prompt in enumerate(prompts()):
        if number:  # in float64 transformers' eager attention turns padding into NaN
            model.float()
        arguments: dict[str, Any] = {**prompt, "max_new_tokens": NEW, "do_sample": False, "use_cache": True}
        try:
            alone = model.generate(**arguments)
        except Exception as error:
            if number == 0:
                return "no plain decoding", f"{type(error).__name__}: {error}"
            continue
        if number == 0 and not alone.equal(model.generate(**arguments)):
            return "no plain decoding", "two calls give different tokens"
        for right in (0, 3, [2, 0, 5, 1]):
            # Beside wrong siblings, and in one chain without them: of a tree transformers' loop gets the first path.
            drafter = right_for(right, alone, siblings=0 if right == 3 else 2, vocab=VOCAB)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    same = bool(model.generate(**arguments, assistant_model=drafter).equal(alone))
                except Exception as error:
                    return "error", f"{type(error).__name__}: {error}"
            said = [text for each in caught if re.search("In this call|decodes it plainly", text := str(each.message))]
            if not same:
                return "other tokens", said[0] if said else f"{'batch' if number else 'one row'}, {right} right"
            kinds.add("trees" if not said else "plain" if "Nothing is drafted" in said[0] else "chains")
            reasons += said
        if number == 0 and kinds != {"trees"}:  # rows of a batch are decoded plainly then
            break
    return next(kind for kind in ("plain", "chains", "trees") if kind in kinds), reasons[0] if reasons else ""


COLUMNS = ("text", "one picture", "two rows", "second turn")
UNTESTED = ("no plain decoding", "not built")


def multimodal_outcome(model_type: str) -> tuple[str, str]:
    """One of `KINDS` for each of `COLUMNS`, separated by slashes, and the first reason of one that is not trees."""
    from tests import multimodal

    results: dict[str, tuple[str, str]] = {}
    for dtype in (torch.float64, torch.float32):  # some families do not run in float64
        try:
            model = multimodal.tiny_model(model_type, dtype)
        except Exception as error:
            results |= dict.fromkeys(COLUMNS, ("not built", f"{type(error).__name__}: {error}"))
            break
        for column, pictures in zip(COLUMNS, ([None], [0], [1, 2], [0]), strict=True):
            if results.get(column, ("no plain decoding",))[0] == "no plain decoding":
                results[column] = _multimodal_cell(model, pictures, column == "second turn")
    kinds = " / ".join(results[column][0] for column in COLUMNS)
    reasons = sorted((kind in UNTESTED, reason) for kind, reason in results.values() if reason and kind != "trees")
    return kinds, reasons[0][1] if reasons else ""


def _multimodal_cell(model: PreTrainedModel, pictures: list[int | None], turns: bool) -> tuple[str, str]:
    from tests import multimodal

    def run(drafters: list[Any]) -> list[Tensor]:
        inputs, texts = multimodal.prompt(model, pictures), []
        settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        if turns:
            settings[CACHE] = DynamicCache(config=model.config.get_text_config(decoder=True))
        for turn, drafter in enumerate(drafters):
            if turn:
                ids = torch.cat([texts[-1], multimodal.prompt(model, [None])["input_ids"]], 1)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            texts.append(model.generate(**inputs, **settings, assistant_model=drafter))
        return texts

    number = 2 if turns else 1
    try:
        alone = run([None] * number)
        if any(not one.equal(other) for one, other in zip(alone, run([None] * number), strict=True)):
            return "no plain decoding", "two calls give different tokens"
    except Exception as error:
        return "no plain decoding", f"{type(error).__name__}: {error}"
    kinds, reasons = set(), []
    for right in (0, 3, [2, 0, 5, 1]):
        drafters = [right_for(right, text, siblings=0 if right == 3 else 2, vocab=VOCAB) for text in alone]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                assisted = run(drafters)
            except Exception as error:
                return "error", f"{type(error).__name__}: {error}"
        said = [text for each in caught if re.search("In this call|decodes it plainly", text := str(each.message))]
        if any(not one.equal(other) for one, other in zip(alone, assisted, strict=True)):
            return "other tokens", said[0] if said else f"{right} right"
        # Of a class with a `generate` of its own the drafts may never arrive.
        drafted = all(each.stats is not None and each.stats.num_draft_tokens for each in drafters)
        kinds.add("trees" if not said and drafted else "chains" if drafted else "plain")
        reasons += said
    return next(kind for kind in ("plain", "chains", "trees") if kind in kinds), reasons[0] if reasons else ""


def _send(find: Callable[[str], tuple[str, str]], model_type: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    pipe.send(find(model_type))


def outcome_apart(model_type: str, find: Callable[[str], tuple[str, str]] = outcome) -> tuple[str, str]:
    """`find` in a process of its own, which may crash, or take too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(find, model_type, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return tuple(receiver.recv())  # type: ignore[return-value]
        return "not built", f"no answer within {SECONDS} s: its parts keep their usual sizes"
    except EOFError:
        return "error", "the process ended"
    finally:
        process.kill()
        process.join()


def families() -> list[str]:
    """All of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page(found: dict[str, tuple[str, str]]) -> str:
    """The page as Markdown."""
    of_kind = {kind: sorted(name for name in found if found[name][0] == kind) for kind in KINDS}
    lines = [
        "# Families of transformers",
        "",
        f"How drafts are verified on each of the {len(found)} families of `AutoModelForCausalLM` ([what that means]"
        "(targets.md)), as",
        "`python -m tests.support_table` finds it: tiny models with random weights, drafts that are right in part.",
        f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()} CPU,",
        f"{date.today()}.",
    ]
    for kind, names in of_kind.items():
        if not names:
            continue
        lines += ["", f"## {kind.capitalize()}: {len(names)}", "", MEANINGS[kind], ""]
        if not any(found[name][1] for name in names):
            lines += textwrap.wrap(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)
            continue
        lines += ["| family | reason |", "|---|---|"]
        lines += [f"| `{name}` | {short(found[name][1])} |" for name in names]
    return "\n".join(lines) + "\n"


HEADING = "# Families with pictures and sound"


def multimodal_part(found: dict[str, tuple[str, str]]) -> str:
    """The second table as Markdown."""
    tested = {name: each for name, each in found.items() if set(each[0].split(" / ")) - set(UNTESTED)}
    names = sorted(found.keys() - tested.keys())
    reasons = textwrap.wrap(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)
    lines = [
        "",
        HEADING,
        "",
        f"The same for {len(tested)} of the {len(found)} families of `AutoModelForMultimodalLM`: with text, a picture",
        "or sound, a batch of two rows with different ones, and a second turn on the cache of the first. An empty cell",
        "was not tested: no inputs were built, or the tiny model does not decode plainly.",
        f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()} CPU,",
        f"{date.today()}.",
        "",
        f"| family | {' | '.join(COLUMNS)} | reason |",
        f"|{'---|' * (len(COLUMNS) + 2)}",
    ]
    for name, (kinds, reason) in sorted(tested.items()):
        cells = ["" if kind in UNTESTED else kind for kind in kinds.split(" / ")]
        shown = short(reason) if any(cell not in ("trees", "") for cell in cells) else ""
        lines.append(f"| `{name}` | {' | '.join(cells)} | {shown} |")
    lines += ["", "Not built, or without plain decoding in all columns:", "", *reasons] if names else []
    return "\n".join(lines) + "\n"


def read_multimodal_part(text: str) -> dict[str, list[str]]:
    """The cells of each family that was tested, from the page."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|[^|]*\|$", text.partition(HEADING)[2], re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def short(reason: str) -> str:
    """The first sentence, for a cell of a table."""
    sentence = " ".join(reason.split()).split(". ")[0].replace("|", "/")
    return textwrap.shorten(sentence, 240, placeholder=" ...").removesuffix(".")


def read_page(text: str) -> dict[str, str]:
    """The kind of each family, from the page."""
    found = {}
    for section in text.partition(HEADING)[0].split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        table = re.findall(r"^\| `([^`]+)`", body, re.MULTILINE)
        found |= dict.fromkeys(table or re.findall(r"`([^`]+)`", body), heading.split(":")[0].lower())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    given = parser.parse_args().families
    from tests import multimodal

    tables: list[dict[str, tuple[str, str]]] = []
    for key, all_families, find in (
        ("text", families(), outcome), ("pictures", multimodal.families(), multimodal_outcome),
    ):  # fmt: skip
        chosen = given[1:] if given[:1] == [key] else given if key == "text" and given[:1] != ["pictures"] else []
        tables.append({})
        for name in chosen or ([] if given and given != [key] else all_families):
            tables[-1][name] = outcome_apart(name, find)
            print(name, *tables[-1][name], file=sys.stderr, flush=True)
    if given in ([], ["text"], ["pictures"]):
        before, _, after = FILE.read_text().partition(f"\n{HEADING}")
        first = page(tables[0]) if tables[0] else before
        second = multimodal_part(tables[1]) if tables[1] else f"\n{HEADING}{after}"
        FILE.write_text(first + second)
        print(f"wrote {FILE.name}")


if __name__ == "__main__":
    main()

"""`same_bits`: logits of rounds with the bits of plain decoding, in low precision."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_specdec.decoding.speed import same_bits
from hf_specdec.verification import verify_lossless
from tests.method_table import METHODS
from tests.scripted import random_trees
from tests.targets import PROMPTS, fresh_target, make_target

# Widths that the option requires.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 20,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def wide_target(dtype: torch.dtype, family: str = "llama", seed: int = 3) -> Any:
    target = fresh_target(family, "sdpa", dtype, seed, **WIDE)
    reason = same_bits.why_not(target)
    if reason is not None and reason.startswith("on this processor"):
        pytest.skip(reason)
    return target


def random_pair(seed: int) -> tuple[Any, dict[str, Any], int]:
    """A random target, a prompt or a batch of them, and the number of nodes of its trees."""
    dtype = torch.float16 if seed % 4 == 3 else torch.bfloat16
    heads, kv_heads = [(2, 1), (4, 2), (4, 4), (3, 1)][seed % 4 if seed % 5 else 3]
    shape = {
        "hidden_size": 64 * heads, "intermediate_size": 64 * (1 + seed % 4), "num_hidden_layers": 1 + seed % 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64,
    }  # fmt: skip
    target = fresh_target(["llama", "qwen3", "qwen2"][seed % 3], "sdpa", dtype, seed, **shape)
    return target, list(PROMPTS.values())[seed % 2](), 4 + seed % 20


def has_plain_bits(seed: int) -> bool | None:
    """Whether the logits of a random pair are bitwise those of plain decoding; None where that is not claimed."""
    target, prompts, nodes = random_pair(seed)
    plain = target.generate(**prompts, **SETTINGS)
    drafter = random_trees(plain.sequences, nodes=nodes, seed=seed)
    drafter.set_options(same_bits=True)
    assisted = target.generate(**prompts, **SETTINGS, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0
    same = assisted.sequences.tolist() == plain.sequences.tolist() and all(
        map(torch.equal, assisted.logits, plain.logits)
    )
    return same if drafter.stats.same_bits else None


@pytest.mark.filterwarnings("ignore:same_bits=True has no effect. on this processor")  # of float16, beside bfloat16
@pytest.mark.parametrize("seed", range(16))
def test_logits_of_trees_have_the_bits_of_plain_decoding(seed: int) -> None:
    wide_target(torch.bfloat16)  # skips where the processor does not allow it
    assert has_plain_bits(seed) is not False


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_bits_of_plain_decoding(method: str) -> None:
    target, prompts = wide_target(torch.bfloat16), PROMPTS["batch of one"]()
    plain = target.generate(**prompts, **SETTINGS)
    drafter = METHODS[method](target)
    drafter.set_options(same_bits=True)
    assisted = target.generate(**prompts, **SETTINGS, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.same_bits
    assert all(map(torch.equal, assisted.logits, plain.logits))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {}, "multiples of 64"),
        ("qwen3-mixed", WIDE, "a part of the text"),
        ("qwen3-moe", WIDE, "of an unknown kind"),
    ],
)
def test_call_without_the_same_bits_says_why(family: str, settings: dict[str, int], reason: str) -> None:
    target, prompts = make_target(family, "sdpa", torch.bfloat16, **settings), PROMPTS["batch of one"]()
    drafter = random_trees(target.generate(**prompts, max_new_tokens=4, do_sample=False))
    drafter.set_options(same_bits=True)
    with pytest.warns(UserWarning, match=f"same_bits=True has no effect.*{reason}.*up to rounding"):
        target.generate(**prompts, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert drafter.stats is not None
    assert not drafter.stats.same_bits


class EightBits(nn.Linear):
    """As transformers keeps weights of 8 bits, which count as floating point."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


def test_weights_of_8_bits_are_quantised() -> None:
    target, prompts = make_target("llama", "sdpa", torch.bfloat16, **WIDE), PROMPTS["batch of one"]()
    up: Any = target.model.layers[0].mlp.up_proj
    target.model.layers[0].mlp.up_proj = EightBits(up.in_features, up.out_features, bias=False)
    weight = nn.Parameter(up.weight.to(torch.float8_e4m3fn), requires_grad=False)
    target.model.layers[0].mlp.up_proj.weight = weight
    alone = target.generate(**prompts, max_new_tokens=4, do_sample=False)
    drafter = random_trees(alone)
    drafter.set_options(same_bits=True)
    with pytest.warns(UserWarning, match="same_bits=True has no effect.*has quantised layers"):
        found = target.generate(**prompts, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert found.tolist() == alone.tolist()


def test_no_call_has_the_same_bits_unless_asked() -> None:
    target, prompts = make_target("llama", "sdpa", torch.bfloat16, **WIDE), PROMPTS["batch of one"]()
    drafter = random_trees(target.generate(**prompts, max_new_tokens=4, do_sample=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert drafter.stats is not None
    assert not drafter.stats.same_bits


def test_compiled_forwards_are_refused() -> None:
    drafter = random_trees(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="compile_mode='reduce-overhead', but compiled"):
        drafter.set_options(same_bits=True, compile_mode="reduce-overhead")


def test_rows_that_get_other_bits_seldom_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with bfloat16 instructions of AVX-512: of several rows, few differ from a row alone."""
    multiply = torch.nn.Linear.forward

    def forward(layer: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        products = multiply(layer, rows)
        if rows.dim() == 3 and rows.shape[1] > 1:
            seldom = rows[..., 0].abs() > 2  # one row of 20
            products = products.where(~seldom.unsqueeze(-1), products * 1.01)
        return products

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    target = fresh_target("llama", "sdpa", torch.bfloat16, **WIDE)
    drafter = METHODS["ngram"](target)
    drafter.set_options(same_bits=True)
    with pytest.warns(UserWarning, match="the rows of a product in torch.bfloat16 depend on how many there are"):
        target.generate(**PROMPTS["batch of one"](), max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert not drafter.stats.same_bits


def test_report_says_which_of_the_two_it_was() -> None:
    target = wide_target(torch.bfloat16)
    drafter = METHODS["ngram"](target)
    assert "(the same up to rounding)" in str(verify_lossless(target, drafter, max_new_tokens=8, verbose=False))
    drafter.set_options(same_bits=True)
    report = verify_lossless(target, drafter, max_new_tokens=8, verbose=False)
    assert report.same_bits
    assert "identical (the same bits)" in str(report)


if __name__ == "__main__":  # for more pairs than the suite has time for: python -m tests.decoding.test_same_bits 2000
    found = [has_plain_bits(seed) for seed in range(int(sys.argv[1]))]
    print(f"{len(found)} pairs: {found.count(True)} have the same bits, {found.count(False)} do not, "
          f"of {found.count(None)} it is not claimed")  # fmt: skip

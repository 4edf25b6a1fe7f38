"""Recipes: what a method adds to the training command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_specdec.training import command
from hf_specdec.training.recipe import RECIPES, Recipe, register_recipe
from hf_specdec.training.source import trained_mode
from tests.drafting.test_pairing import TEMPLATE
from tests.targets import make_target, tiny_tokenizer


def test_unknown_method_to_train_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown method to train 'dflsh'. Did you mean 'dflash'\?"):
        command.main(["--method", "dflsh", "--target", "nowhere", "--output", "nowhere"])


def test_second_recipe_of_a_name_is_refused():
    with pytest.raises(ValueError, match="A training recipe 'dflash' is registered already"):
        register_recipe(Recipe("dflash", RECIPES["dflash"].options, RECIPES["dspark"].prepare))


@pytest.mark.parametrize("method", sorted(RECIPES))
def test_help_lists_only_the_options_of_its_method(method, capsys):
    with pytest.raises(SystemExit):
        command.main(["--method", method, "--help"])
    shown = capsys.readouterr().out
    assert "--write-minutes" in shown
    assert ("--gamma" in shown) == (method in ("dflash", "dspark"))
    assert ("--rank-start" in shown) == (method == "specblock")


@pytest.mark.parametrize("method", sorted(RECIPES))
def test_every_method_is_trained_with_the_loss_that_is_asked_for(method):
    """Two losses give two values on one drafter and one batch, and no loss is named that is not known."""
    target = make_target("llama", "sdpa", torch.float32)
    kind = RECIPES[method].options
    further = {"mask_token_id": 1} if hasattr(kind, "mask_token_id") else {}
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "first_anchor": torch.tensor([4, 5]), "length": torch.tensor([24, 20])}
    values = {}
    for loss in ("ce", "kl", "tv", "lk"):
        options = kind(target="target", output=Path("drafter"), text=Path("text"), loss=loss, **further)
        torch.manual_seed(0)
        drafter, step = RECIPES[method].prepare(options, target, None)
        values[loss] = step(drafter, batch, training=False).loss.item()
    assert len(set(values.values())) == 4
    # TV is at most 1 a position; the sums over heads, slots and passes are alike.
    assert values["tv"] < values["kl"]
    assert min(values["tv"], values["kl"]) - 1e-6 <= values["lk"] <= max(values["tv"], values["kl"]) + 1e-6


def test_text_is_required_where_no_corpus_is_given(capsys):
    with pytest.raises(SystemExit):
        command.main(["--target", "nowhere", "--output", "nowhere"])
    assert "one of the arguments --text --data is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dflash", "--steps -5", "argument --steps: -5 must be at least 1"),
        ("dflash", "--steps 0", "argument --steps: 0 must be at least 1"),
        ("dflash", "--steps some", "argument --steps: invalid int value: 'some'"),
        ("dflash", "--layers 0", "argument --layers: 0 must be at least 1"),
        ("dflash", "--intermediate-size 0", "argument --intermediate-size: 0 must be at least 1"),
        ("dflash", "--warmup 3", "argument --warmup: 3.0 must be between 0 and 1"),
        ("dflash", "--warmup nan", "argument --warmup: nan must be between 0 and 1"),
        ("dflash", "--clip -1", "argument --clip: -1.0 must be a finite number of at least 0"),
        ("dflash", "--minutes 0", "argument --minutes: 0.0 must be a finite number above 0"),
        ("dflash", "--write-minutes inf", "argument --write-minutes: inf must be a finite number of at least 0"),
        ("dflash", "--batch-size 0", "argument --batch-size: 0 must be at least 1"),
        ("dflash", "--new-tokens 0", "argument --new-tokens: 0 must be at least 1"),
        ("dflash", "--learning-rate nan", "argument --learning-rate: nan must be a finite number above 0"),
        ("dflash", "--seed 99999999999999999999", "--seed: 99999999999999999999 must be between 0 and 4294967295"),
        ("dflash", "--rows 0", "argument --rows: 0 must be at least 1"),
        ("dflash", "--plain-share 1", "argument --plain-share: 1.0 must be at least 0 and less than 1"),
        ("dflash", "--prompt-tokens 0 4", "argument --prompt-tokens: 0 must be at least 1"),
        ("dflash", "--prompt-tokens 6 4", "argument --prompt-tokens: [6, 4] must be MIN MAX with MIN <= MAX"),
        ("dflash", "--prompt-tokens 6", "argument --prompt-tokens: [6] must be MIN MAX with MIN <= MAX"),
        ("dflash", "--anchors 0", "argument --anchors: 0 must be at least 1"),
        ("dflash", "--gamma -1", "argument --gamma: -1.0 must be a finite number of at least 0"),
        ("specblock", "--rank-budget 0", "argument --rank-budget: 0 must be at least 1"),
        ("specblock", "--window 0", "argument --window: 0 must be at least 1"),
        ("specbound", "--lora-rank 0", "argument --lora-rank: 0 must be at least 1"),
        ("specbound", "--exit-layers 1 0", "argument --exit-layers: 0 must be at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_with_their_option(method, options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--method", method, "--target", "no", "--output", "no", "--text", "no.txt", *options.split()])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: hf-specdec train ")
    assert message in printed


@pytest.mark.parametrize(
    ("documents", "record"),
    [
        (["hello"] * 3, {"chat_template": False}),
        (["xxuserhelloxxassistantzzthinkzzdoneyes"] * 2 + ["hello"], {"chat_template": True, "thinking": False}),
        (["xxuserhelloxxassistantyes"] * 2 + ["hello"], {"chat_template": True, "thinking": True}),
        (["xxuserhelloxxassistantyes"] + ["hello"] * 2, {"chat_template": False}),
    ],
)
def test_record_tells_the_kind_of_text_by_the_targets_template(documents, record):
    plain = tiny_tokenizer()
    chat = type(plain)(tokenizer_object=plain._tokenizer, pad_token="a", unk_token="a")
    chat.chat_template = TEMPLATE
    assert trained_mode(chat, documents) == record
    assert trained_mode(plain, documents) == {"chat_template": False}

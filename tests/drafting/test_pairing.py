"""What is told about a drafter and a target that do not belong together, at loading and at the first generate."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.drafting.fingerprint import tokenizer_fingerprint
from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.method_table import FREE, METHODS, make_ddtree
from tests.targets import fresh_target, one_prompt, tiny_tokenizer

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
# In the manner of Qwen3's: an empty thought where thinking is off.
TEMPLATE = (
    "{% for message in messages %}xxuser{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}xxassistant{% if not enable_thinking %}zzthinkzzdone{% endif %}{% endif %}"
)


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", dtype=torch.float32)


@pytest.fixture
def drafter(target: PreTrainedModel) -> DFlashDrafter:
    return make_ddtree(target)


def generate(target: PreTrainedModel, drafter: DFlashDrafter, **inputs: Any) -> None:
    target.generate(**(inputs or one_prompt()), max_new_tokens=2, do_sample=False, assistant_model=drafter)


def named(target: PreTrainedModel, name: str, commit: str | None = None) -> PreTrainedModel:
    target.name_or_path = name
    target.config._commit_hash = commit
    return target


@pytest.mark.parametrize("method", FREE)
def test_a_drafter_that_was_paired_can_be_pickled(target: PreTrainedModel, method: str) -> None:
    drafter: Any = METHODS[method](target)
    generate(target, drafter)
    read: Any = pickle.loads(pickle.dumps(drafter))
    generate(target, read)
    assert read.stats.num_spec_steps == drafter.stats.num_spec_steps


def test_another_targets_name_warns_once(target: PreTrainedModel, drafter: DFlashDrafter) -> None:
    drafter.config.target_name_or_path = "owner/right"
    named(target, "owner/wrong")
    message = "trained for target 'owner/right', but the target is 'owner/wrong'.*load 'owner/right' as target, or a"
    with pytest.warns(UserWarning, match=message):
        generate(target, drafter)
    generate(target, drafter)  # a second warning would be an error here


def test_another_targets_name_warns_when_loaded_with_it(
    target: PreTrainedModel, drafter: DFlashDrafter, tmp_path: Path
) -> None:
    drafter.config.target_name_or_path = "owner/right"
    drafter.save_pretrained(tmp_path)
    named(target, "owner/wrong")
    with pytest.warns(UserWarning, match="trained for target 'owner/right', but the target is 'owner/wrong'"):
        loaded = load_drafter(tmp_path, target)
    generate(target, loaded)


@pytest.mark.parametrize("name", ["owner/right", "Owner/Right", "", "/models/copy"])
def test_the_same_name_or_none_is_fine(target: PreTrainedModel, drafter: DFlashDrafter, name: str) -> None:
    drafter.config.target_name_or_path = "owner/right"
    generate(named(target, name), drafter)


def test_another_commit_warns(target: PreTrainedModel, drafter: DFlashDrafter) -> None:
    drafter.config.target_name_or_path, drafter.config.target_revision = "owner/right", COMMIT
    generate(named(target, "owner/right", COMMIT), drafter)
    other = named(fresh_target("llama", dtype=torch.float32), "owner/right", OTHER_COMMIT)
    message = f"at commit {COMMIT}, but the target was loaded at commit {OTHER_COMMIT}.*revision='{COMMIT}'"
    with pytest.warns(UserWarning, match=message):
        generate(other, drafter)


def test_branch_is_not_compared_with_a_commit(target: PreTrainedModel, drafter: DFlashDrafter) -> None:
    drafter.config.target_name_or_path, drafter.config.target_revision = "owner/right", "main"
    generate(named(target, "owner/right", COMMIT), drafter)


@pytest.fixture
def with_tokenizer(target: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    """A target from a folder with its tokenizer, which has a chat template."""
    tokenizer = tiny_tokenizer()
    chat = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, pad_token="a", unk_token="a")
    chat.chat_template = TEMPLATE
    chat.save_pretrained(tmp_path / "target")
    return named(target, str(tmp_path / "target"))


def test_another_tokenizer_raises_at_the_first_generate(
    with_tokenizer: PreTrainedModel, drafter: DFlashDrafter
) -> None:
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tiny_tokenizer(63))
    with pytest.raises(ValueError, match="has another one .* 64 tokens.*Use the target it was trained for"):
        generate(with_tokenizer, drafter)


def prompt_ids(text: str) -> torch.Tensor:
    return tiny_tokenizer()(text.replace(" ", ""), return_tensors="pt")["input_ids"]


@pytest.mark.parametrize(
    ("record", "prompt", "message"),
    [
        ({"thinking": True}, "xxuser hello xxassistant zzthink zzdone", "thinking on, but .* thinking off.*=True"),
        ({"thinking": False}, "xxuser hello xxassistant", "thinking off, but .* thinking on.*enable_thinking=False"),
        ({"thinking": True}, "xxuser hello xxassistant", None),
        ({"thinking": False}, "xxuser hello xxassistant zzthink zzdone", None),
        ({"chat_template": True}, "hello", "in the target's chat template, but the prompt has no chat template"),
        ({"chat_template": False}, "xxuser hello xxassistant", "on plain text, but the prompt has the chat template"),
        ({"chat_template": True}, "xxuser hello xxassistant", None),
        ({"chat_template": False, "thinking": False}, "hello", None),
        ({"data": "something"}, "hello", None),
        (None, "hello", None),
    ],
)
def test_prompt_of_another_kind_warns(
    record: Any, prompt: str, message: str | None, with_tokenizer: PreTrainedModel, drafter: DFlashDrafter
) -> None:
    drafter.training_record = record
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            generate(with_tokenizer, drafter, input_ids=prompt_ids(prompt))
    told = [str(warning.message) for warning in caught if "Drafter" in str(warning.message)]
    assert len(told) == (0 if message is None else 1)
    assert message is None or re.search(message, told[0])


@pytest.mark.parametrize("template", [{"rag": "a", "tools": "b"}, "{{ messages[0].content + 5 }}", "{{ a.b() }}"])
def test_template_that_cannot_be_asked_warns_once_and_stops_nothing(
    template: Any, with_tokenizer: PreTrainedModel, drafter: DFlashDrafter
) -> None:
    chat = AutoTokenizer.from_pretrained(with_tokenizer.name_or_path)
    chat.chat_template = template
    (Path(with_tokenizer.name_or_path) / "chat_template.jinja").unlink()
    chat.save_pretrained(with_tokenizer.name_or_path)
    drafter.training_record = {"chat_template": True}
    with pytest.warns(UserWarning, match="chat template of '.*target' cannot be rendered for comparison"):
        generate(with_tokenizer, drafter)
    generate(with_tokenizer, drafter)  # a second warning would be an error here


def test_tokenizer_that_cannot_be_read_warns_and_stops_nothing(
    with_tokenizer: PreTrainedModel, drafter: DFlashDrafter
) -> None:
    (Path(with_tokenizer.name_or_path) / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Later"}}')
    drafter.config.target_tokenizer_sha256 = tokenizer_fingerprint(tiny_tokenizer())
    with pytest.warns(UserWarning, match="tokenizer of '.*target' cannot be read here .*not compared"):
        generate(with_tokenizer, drafter)
    generate(with_tokenizer, drafter)


def test_list_that_names_the_last_layer_is_warned_of_unless_trained_here(
    target: PreTrainedModel, drafter: DFlashDrafter
) -> None:
    last = target.config.num_hidden_layers - 1
    drafter.config.dflash_config["target_layer_ids"] = [0, last]
    drafter.name_or_path = "somebody/drafter"
    with pytest.warns(UserWarning, match=rf"and {last} is its last layer.*before the final norm"):
        drafter.check_pairing(target)
    ours = make_ddtree(target)
    ours.config.dflash_config["target_layer_ids"] = [0, last]
    ours.name_or_path, ours.training_record = "ours/drafter", {"data": "text"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.check_pairing(target)

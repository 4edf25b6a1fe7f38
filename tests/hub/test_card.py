"""The generated model card: what it states, and that it states nothing it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_specdec import load_drafter
from hf_specdec.hub.card import check_measurements, model_card
from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.method_table import make_causal_lm, make_dflash, make_medusa

MEASUREMENTS: dict[str, Any] = {
    "target": "owner/target",
    "command": "python bench.py",
    "date": "2026-05-01",
    "methods": {
        "ddtree": {"mean_acceptance_length": 3.136, "speedup": 2.254, "identical": True},
        "dflash": {"mean_acceptance_length": 2, "speedup": 1.5},
        "plain": {"mean_acceptance_length": None, "speedup": 1.0},
    },
    "sampled": {"temperature": 0.8, "methods": {"ddtree": {"mean_acceptance_length": 2.5, "speedup": 1.75}}},
}


def card(**settings: Any) -> ModelCard:
    given = {
        "name": "me/drafter",
        "summary": "It drafts.",
        "fits": "One target.",
        "facts": {},
        "tags": ["dflash"],
        "target": "owner/target",
    }
    return model_card(**(given | settings))


def test_card_states_what_was_measured_and_how() -> None:
    text = card(measurements=MEASUREMENTS).text
    assert "| greedy | ddtree | 3.14 | 2.25x | yes |" in text
    assert "| greedy | dflash | 2.00 | 1.50x |  |" in text
    assert "| greedy | plain |  | 1.00x |  |" in text
    assert "| temperature 0.8 | ddtree | 2.50 | 1.75x |  |" in text
    assert "| date | 2026-05-01 |" in text
    assert "```\npython bench.py\n```" in text


def test_metadata_holds_the_measured_figures_as_the_hub_reads_them() -> None:
    made = card(
        measurements=MEASUREMENTS | {"prompts": "30 prompts"},
        training={"datasets": ["owner/talks"], "data": "owner/talks"},
        license="mit",
    )
    read = ModelCard(made.content).data  # from the text alone, as the Hub does
    assert (read.base_model, read.base_model_relation) == ("owner/target", "adapter")
    assert (read.datasets, read.license, read.model_name) == (["owner/talks"], "mit", "me/drafter")
    assert read.eval_results is not None
    assert {result.dataset_name for result in read.eval_results} == {"30 prompts"}
    assert {result.metric_name: result.metric_value for result in read.eval_results} == {
        "Mean acceptance length, ddtree, greedy": 3.136,
        "Speedup, ddtree, greedy": 2.254,
        "Mean acceptance length, dflash, greedy": 2,
        "Speedup, dflash, greedy": 1.5,
        "Speedup, plain, greedy": 1.0,
        "Mean acceptance length, ddtree, temperature 0.8": 2.5,
        "Speedup, ddtree, temperature 0.8": 1.75,
    }


def test_metadata_claims_nothing_that_is_not_known() -> None:
    read = ModelCard(card(target="/home/me/target").content).data.to_dict()
    assert not {"model-index", "datasets", "base_model", "base_model_relation", "license"} & set(read)


def test_card_names_its_limits() -> None:
    assert "The figures above" in card(measurements=MEASUREMENTS).text
    limits = card().text.partition("## Limitations")[2].partition("##")[0]
    assert "never the output" in limits
    assert "figures" not in limits


def test_card_states_rollback_where_it_was_measured() -> None:
    methods = {
        "in turn": {"mean_acceptance_length": 3, "speedup": 2, "rollback_rate": 0.259},
        "other": {"mean_acceptance_length": 2, "speedup": 1, "speedup_over_in_turn": 0.5, "identical": True},
    }
    text = card(measurements=MEASUREMENTS | {"methods": methods, "sampled": None}).text
    assert "| same tokens as the target | over in turn | rollback rate |" in text
    assert "| greedy | in turn | 3.00 | 2.00x |  |  | 0.26 |" in text
    assert "| greedy | other | 2.00 | 1.00x | yes | 0.50x |  |" in text
    assert "Rollback rate is" in text
    plain = card(measurements=MEASUREMENTS).text
    assert "rollback" not in plain.lower()
    assert "in turn" not in plain


def test_card_states_acceptance_by_group_where_it_was_measured() -> None:
    methods = {
        "ddtree": {"mean_acceptance_length": 3, "speedup": 2, "acceptance_by_group": {"code": 3.5, "chat": 2.25}},
        "dflash": {"mean_acceptance_length": 2, "speedup": 1, "acceptance_by_group": {"chat": 2}},
    }
    text = card(measurements=MEASUREMENTS | {"methods": methods, "sampled": None}).text
    assert "| mean acceptance length of | code | chat |" in text
    assert "| greedy, ddtree | 3.50 | 2.25 |" in text
    assert "| greedy, dflash |  | 2.00 |" in text


def test_card_states_how_it_was_trained() -> None:
    text = card(
        training={"data": "a|b", "time": 2.34567, "losses": {"first": 4.0, "last_one": 1.25}, "gpus": ["x", "y"]}
    ).text
    assert "| data | a\\|b |" in text
    assert "| time | 2.346 |" in text
    assert "| losses | first: 4, last one: 1.25 |" in text
    assert "| gpus | x, y |" in text


def test_what_was_tried_with_a_drafter_has_a_section_with_tables() -> None:
    study = {
        "prompts": "24 held-out prompts",
        "mean_acceptance_length": {"all parts": 2.5, "without shift": 2},
        "policies": {"frozen": {"length": 2.5}, "bandit": {"length": 2.75, "updates": "3 s"}},
        "command": "python study.py",
    }
    text = card(training={"data": "code", "ablations_of_it": study}).text
    section = text[text.index("### Ablations of it") : text.index("## Licence")]
    assert "|  | mean acceptance length |\n| --- | --- |\n| all parts | 2.5 |\n| without shift | 2 |" in section
    assert "| policies | length | updates |\n| --- | --- | --- |\n| frozen | 2.5 |  |" in section
    assert "| bandit | 2.75 | 3 s |" in section
    assert "| prompts | 24 held-out prompts |" in section
    assert "```\npython study.py\n```" in section
    assert "study.py" not in text[: text.index("### Ablations of it")]


def test_card_says_what_is_not_known() -> None:
    text = card(target=None).text
    for said in ("| Target | not recorded |", "Not measured.", "Not recorded.", "Not stated."):
        assert said in text
    assert card(target=None).data.base_model is None
    assert card().data.license is None


def test_licence_comes_from_the_argument_or_the_training_record() -> None:
    assert card(training={"license": "mit"}).data.license == "mit"
    assert card(training={"license": "mit"}, license="apache-2.0").data.license == "apache-2.0"


@pytest.mark.parametrize(
    ("target", "base_model", "shown"),
    [("owner/target", "owner/target", "owner/target"), ("/home/me/target", None, "target"), ("gpt2", None, "gpt2")],
)
def test_base_model_is_a_hub_id_and_no_path_is_shown(target: str, base_model: str | None, shown: str) -> None:
    made = card(target=target, target_revision="v1", measurements=MEASUREMENTS | {"target": target})
    assert made.data.base_model == base_model
    assert f"| Target | `{shown}` at revision `v1` |" in made.text
    assert "/home/me" not in made.content
    assert f'from_pretrained("{shown}", revision="v1")' in made.text


def numbers(**fields: Any) -> dict[str, Any]:
    return {"mean_acceptance_length": 2.0, "speedup": 1.5} | fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, "'target' is None, but must be a str"),
        ({"command": None}, "'command' is None, but must be a str.*names its target and the command"),
        ({"methods": []}, r"'methods' is \[\], but must be a dict"),
        (
            {"methods": {"ddtree": {"speedup": 2.0}}},
            "'mean_acceptance_length' of method 'ddtree' is None, but must be a number",
        ),
        (
            {"methods": {"plain": {"speedup": None, "mean_acceptance_length": None}}},
            "'speedup' of method 'plain' is None",
        ),
        ({"methods": {"ddtree": 5}}, "method 'ddtree' is 5, but must be a dict"),
        (
            {"methods": {"ddtree": numbers(identical="yes")}},
            "'identical' of method 'ddtree' is 'yes', but must be",
        ),
        ({"methods": {"ddtree": numbers(speedup=True)}}, "'speedup' of method 'ddtree' is True, but must be a number"),
        ({"methods": {"ddtree": numbers(rollback_rate="x")}}, "'rollback_rate' of method 'ddtree' is 'x', but must be"),
        ({"sampled": 3}, "'sampled' is 3, but must be a dict"),
        ({"sampled": {"temperature": 1, "methods": [5]}}, r"'methods' of 'sampled' is \[5\], but must be a dict"),
        ({"sampled": {"temperature": 1, "methods": {"a": None}}}, "method 'a' is None, but must be a dict"),
        ({"sampled": {"methods": {}}}, r"'sampled' has \['methods'\], but needs 'temperature' and 'methods'"),
    ],
)
def test_measurements_that_lack_a_field_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_measurements(MEASUREMENTS | change)


@pytest.mark.parametrize(
    ("make", "saved", "later"),
    [
        (make_dflash, "dflash", "ddtree"),
        (make_causal_lm, "causal_lm_chain", "causal_lm_tree"),
        (make_medusa, "static_tree", "ddtree"),
    ],
)
def test_card_names_the_method_that_the_checkpoint_loads_with(
    make: Any, saved: str, later: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = make(target, method=saved)
    drafter.save_pretrained(tmp_path)
    drafter.set_options(method=later)
    drafter.write_records(tmp_path)  # as after a measurement
    assert f"| Method | {saved}" in (tmp_path / "README.md").read_text()
    assert load_drafter(tmp_path).method == saved
    drafter.save_pretrained(tmp_path)
    assert f"| Method | {later}" in (tmp_path / "README.md").read_text()
    assert load_drafter(tmp_path).method == later


def test_card_of_a_drafter_describes_it(drafter: DFlashDrafter) -> None:
    made = drafter.model_card("me/drafter")
    assert "# me/drafter" in made.text
    assert "| Block size | 5, the root's slot included |" in made.text
    assert "| Target layers read | 0, 2 |" in made.text
    assert f"| Parameters | {drafter.num_parameters():,} |" in made.text
    assert made.data.library_name == "hf_specdec"
    assert "dflash" in made.data.tags

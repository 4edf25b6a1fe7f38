"""The DFlash step: anchors, masks, what a slot can see, and that training sees what inference will see."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.methods.dflash.training import (
    DFlashStep,
    block_hidden,
    block_masks,
    choose_anchors,
    default_mask_token,
    new_drafter,
)
from hf_specdec.training.features import TargetReader
from hf_specdec.training.losses import position_weights
from tests.method_table import make_dflash
from tests.targets import VOCAB, fresh_target, one_prompt, tiny_tokenizer
from tests.watched import Watched

BLOCK = 5
# How a layer may look at its context and its block: settings of the drafter's config.
KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True},
    "mixed": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True,
    },
    "use_swa": {"dflash_config": {"use_swa": True, "swa_window_size": 5}},
}  # fmt: skip


def make_pair(**settings: object) -> tuple[PreTrainedModel, DFlashDrafter]:
    target = fresh_target()
    return target, make_dflash(target, **settings).double()


def batch_of(input_ids: Tensor, first: int = 3) -> dict[str, Tensor]:
    rows, length = input_ids.shape
    return {
        "input_ids": input_ids,
        "first_anchor": torch.full((rows,), first),
        "length": torch.full((rows,), length),
    }


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("random", [True, False])
def test_anchors_are_distinct_and_leave_a_token_to_predict(random):
    first, length = torch.tensor([0, 4, 10, 7, 3]), torch.tensor([30, 30, 13, 8, 3])
    anchors, valid = choose_anchors(first, length, 6, random=random)
    assert valid.sum(1).tolist() == [6, 6, 2, 0, 0], "as many as there are candidates, at most those wanted"
    for row in range(len(first)):
        chosen = anchors[row][valid[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert all(max(1, first[row]) <= anchor <= length[row] - 2 for anchor in chosen)
    assert (anchors[~valid] == 0).all()


def test_random_anchors_reach_every_candidate_and_even_ones_are_always_the_same():
    first, length = torch.tensor([4]), torch.tensor([12])
    drawn = {int(anchor) for _ in range(200) for anchor in choose_anchors(first, length, 2, random=True)[0][0]}
    assert drawn == set(range(4, 11))
    even = [choose_anchors(first, length, 3, random=False)[0].tolist() for _ in range(2)]
    assert even[0] == even[1] == [[4, 6, 8]]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_allow_exactly_what_the_rules_say(kind):
    config = make_pair(**KINDS[kind])[1].config
    context, anchors = 9, torch.tensor([[2, 8], [5, 6]])
    masks = block_masks(config, anchors, context, torch.float64)
    for layer, mask in enumerate(masks):
        window, causal = config.window(layer), config.block_is_causal(layer)
        assert mask.shape == (2, 1, 2 * BLOCK, context + 2 * BLOCK)
        for row in range(2):
            for query in range(2 * BLOCK):
                block, slot = divmod(query, BLOCK)
                position = int(anchors[row, block]) + slot
                for key in range(context + 2 * BLOCK):
                    if key < context:
                        visible = key < anchors[row, block] and (window is None or position - key < window)
                    else:
                        other_block, other = divmod(key - context, BLOCK)
                        visible = block == other_block and not (causal and other > slot)
                        visible = visible and (window is None or slot - other < window)
                    assert (mask[row, 0, query, key] == 0) == visible, (layer, row, query, key)
                    assert visible or mask[row, 0, query, key] == torch.finfo(torch.float64).min


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sees_nothing_from_its_anchor_on_but_the_anchor(kind):
    target, drafter = make_pair(**KINDS[kind])
    reader = TargetReader(target, drafter.feature_layers(target))
    ids, anchors = random_ids(2, 16), torch.tensor([[3, 9], [6, 12]])
    changed_ids = ids.clone()
    for row in range(2):
        changed_ids[row, anchors[row, 1] + 1 :] = 3  # everything after the second block's anchor

    def hidden_of(tokens: Tensor, blocks: Tensor) -> Tensor:
        features = reader.read(tokens).features
        hidden = block_hidden(drafter, drafter.config, target.get_input_embeddings(), tokens, features, blocks)
        return hidden.unflatten(1, (-1, BLOCK))

    with torch.no_grad():
        before, after = hidden_of(ids, anchors), hidden_of(changed_ids, anchors)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        alone = hidden_of(ids, anchors[:, 1:])
        torch.testing.assert_close(alone, before[:, 1:], rtol=1e-9, atol=1e-9)
        for position, what in ((-1, "the last context token"), (0, "the anchor")):
            changed_ids = ids.clone()
            for row in range(2):
                place = anchors[row, 1] + position
                changed_ids[row, place] = 3 + (ids[row, place] - 2) % (VOCAB - 3)
            after = hidden_of(changed_ids, anchors)
            assert (after[:, 1] - before[:, 1]).abs().max() > 1e-3, f"{what} must matter to its block"
            torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_training_forward_equals_inference_forward(kind):
    target, drafter = make_pair(**KINDS[kind])
    watched = Watched(drafter)
    output = target.generate(**one_prompt(), assistant_model=watched, max_new_tokens=14, do_sample=False)

    rounds = [(int(drafted.context.root_positions[0]), drafted.logits[0]) for drafted in watched.rounds]
    assert len(rounds) > 4
    anchors = torch.tensor([[anchor for anchor, _ in rounds]])
    step = DFlashStep(drafter, target)
    with torch.no_grad():
        features = step.reader.read(output).features
        hidden = block_hidden(drafter, drafter.config, step.embed_tokens, output, features, anchors)
        logits = step._draft_head(hidden.unflatten(1, (-1, BLOCK))[0, :, 1:])
    for trained, (anchor, inferred) in zip(logits, rounds, strict=True):
        usable = inferred.isfinite()
        torch.testing.assert_close(trained[usable], inferred[usable], msg=lambda text, at=anchor: f"root {at}: {text}")
        assert (trained[~usable] < -1000).all(), "what inference never drafts has no chance in training either"


@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk"])
def test_loss_and_hits_equal_a_block_by_block_computation(loss):
    target, drafter = make_pair()
    step = DFlashStep(drafter, target, num_anchors=4, loss=loss, gamma=2.0)
    batch = batch_of(random_ids(2, 14))
    batch["length"] = torch.tensor([14, 9])
    output = step(drafter, batch, training=False)

    from tests.training.test_losses import plain

    anchors, valid = choose_anchors(batch["first_anchor"], batch["length"], 4, random=False)
    weights = position_weights(BLOCK, 2.0).double()
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    with torch.no_grad():
        for row in range(2):
            ids = batch["input_ids"][row : row + 1]
            features = step.reader.read(ids).features
            target_logits = target(ids).logits[0].clone()
            target_logits[:, drafter.config.mask_token_id] = -1e4
            for block in range(4):
                if not valid[row, block]:
                    assert not output.labelled[row, block].any()
                    continue
                anchor = int(anchors[row, block])
                one = torch.tensor([[anchor]])
                hidden = block_hidden(drafter, drafter.config, step.embed_tokens, ids, features, one)
                logits = step._draft_head(hidden[0]).double()
                for k in range(1, BLOCK):
                    there = anchor + k < int(batch["length"][row])
                    assert output.labelled[row, block, k - 1] == there
                    if not there:
                        continue
                    token = ids[0, anchor + k]
                    value = plain_safe(plain, loss, logits[k], target_logits[anchor + k - 1], token)
                    total, weight = total + weights[k - 1] * value, weight + weights[k - 1]
                    assert output.correct[row, block, k - 1] == (logits[k].argmax() == token)
    torch.testing.assert_close(output.loss.double(), total / weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_draft_vocabulary_learns_of_its_own_tokens_alone(loss):
    """Every second token can be said: of the others nothing is learned, and they count as missed."""
    target, drafter = make_pair(dflash_config={"draft_vocab_size": VOCAB // 2})
    ids = torch.arange(0, VOCAB, 2)
    drafter.set_vocabulary(ids)
    step = DFlashStep(drafter, target, num_anchors=30, loss=loss, gamma=None)
    batch = batch_of(random_ids(1, 14))
    output = step(drafter, batch, training=False)
    anchors, _ = choose_anchors(batch["first_anchor"], batch["length"], 30, random=False)
    values = []
    with torch.no_grad():
        features, laws = step.reader.read(batch["input_ids"]).features, target(batch["input_ids"]).logits[0]
        for block, anchor in enumerate(anchors[0].tolist()):
            if not output.labelled[0, block].any():
                continue
            one = torch.tensor([[anchor]])
            hidden = block_hidden(drafter, drafter.config, step.embed_tokens, batch["input_ids"], features, one)
            said = target.lm_head(hidden[0])[:, ids].log_softmax(-1)
            for k in range(1, min(BLOCK, 14 - anchor)):
                token = int(batch["input_ids"][0, anchor + k])
                law = laws[anchor + k - 1][ids].log_softmax(-1)
                hit = token % 2 == 0 and int(said[k].argmax()) == token // 2
                assert bool(output.correct[0, block, k - 1]) == hit
                if token % 2 == 0:
                    value = -said[k][token // 2] if loss == "ce" else (law.exp() * (law - said[k])).sum()
                    values.append(value)
    torch.testing.assert_close(output.loss.double(), torch.stack(values).mean(), rtol=1e-5, atol=1e-6)


def plain_safe(plain, loss: str, draft: Tensor, target: Tensor, token: Tensor) -> Tensor:
    """The plain formula over all tokens but the mask, whose chance is 0 on both sides (0 log 0 counts as 0)."""
    keep = torch.arange(len(draft)) != 1
    shifted = token - (token > 1).long()
    return plain(loss, draft[keep].unsqueeze(0), target[keep].unsqueeze(0), shifted.unsqueeze(0))[0]


def test_cached_states_give_the_loss_of_states_on_the_fly():
    target, drafter = make_pair()
    step = DFlashStep(drafter, target, loss="kl")
    batch = batch_of(random_ids(2, 14))
    states = step.reader.read(batch["input_ids"])
    cached = batch | {"features": states.features, "last_hidden": states.last_hidden}
    torch.testing.assert_close(step(drafter, cached, training=False).loss, step(drafter, batch, training=False).loss)
    with pytest.raises(ValueError, match=r"needs last_hidden, but the cached states have none"):
        step(drafter, batch | {"features": states.features}, training=False)


def test_rows_without_room_for_a_block_give_a_loss_of_zero_that_can_be_differentiated():
    target, drafter = make_pair()
    batch = batch_of(random_ids(2, 6), first=5)
    output = DFlashStep(drafter, target)(drafter, batch, training=True)
    assert output.loss.item() == 0
    assert not output.labelled.any()
    output.loss.backward()


def test_a_mask_token_in_the_text_is_a_miss_that_costs_nothing():
    target, drafter = make_pair()
    step = DFlashStep(drafter, target, num_anchors=1)
    ids = random_ids(1, 8)
    batch = batch_of(ids, first=3) | {"length": torch.tensor([6])}  # one block, anchor 3, with labels at 4 and 5
    ids[0, 5] = drafter.config.mask_token_id
    output = step(drafter, batch, training=False)
    assert output.labelled[0, 0].tolist() == [True, True, False, False]
    assert not output.correct[0, 0, 1]
    only_first = step(drafter, batch | {"length": torch.tensor([5])}, training=False)
    torch.testing.assert_close(output.loss, only_first.loss)


def test_target_is_frozen_by_the_step():
    target, drafter = make_pair()
    step = DFlashStep(drafter, target)
    step(drafter, batch_of(random_ids(2, 14)), training=True).loss.backward()
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.parameters())
    assert all(parameter.grad is not None for parameter in drafter.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gemma2", "gpt-neox", "phi3-sliding"])
def test_new_drafter_fits_targets_of_every_kind(family):
    target = fresh_target(family)
    drafter = new_drafter(target, mask_token_id=1, block_size=4).double()
    step = DFlashStep(drafter, target, loss="lk")
    assert step(drafter, batch_of(random_ids(2, 14)), training=True).loss.isfinite()
    target.generate(**one_prompt(), assistant_model=drafter, max_new_tokens=4, do_sample=False)


def test_target_that_scales_its_logits_is_refused_for_soft_losses():
    target = fresh_target("granite")
    drafter = new_drafter(target, mask_token_id=1, block_size=4).double()
    batch = batch_of(random_ids(2, 14))
    with pytest.raises(ValueError, match=r"logits of target GraniteForCausalLM differ by .* Train with loss=\"ce\""):
        DFlashStep(drafter, target, loss="kl")(drafter, batch, training=True)
    DFlashStep(drafter, target, loss="ce")(drafter, batch, training=True)


def test_arguments_out_of_range_raise():
    target, drafter = make_pair()
    with pytest.raises(ValueError, match=r"loss='l2' is not known"):
        DFlashStep(drafter, target, loss="l2")
    with pytest.raises(ValueError, match=r"num_anchors=0 must be at least 1"):
        DFlashStep(drafter, target, num_anchors=0)
    with pytest.raises(ValueError, match=r"A drafter fits only the target it was trained for"):
        DFlashStep(drafter, fresh_target(hidden_size=64))


@pytest.mark.parametrize("field", ["own_embeddings", "own_head"])
def test_drafters_of_other_layouts_are_refused(field):
    target, drafter = make_pair(dflash_config={field: True})
    with pytest.raises(
        ValueError, match=rf"has {field} in its dflash_config, but this step trains .* train a new drafter"
    ):
        DFlashStep(drafter, target)


SPECIAL = ["<end>", "<start>", "<repo>", "<|reserved_3|>", "<file>", "<tool>", "<script>"]
FIRST = VOCAB - len(SPECIAL)  # id of the first of them; "<repo>" ends the target's texts as well


def mask_token(text: list[int], *, vocab: int = VOCAB, mask: str | None = None, template: str | None = None):
    """`default_mask_token` for a tokenizer with special tokens at the end of its vocabulary."""
    tokenizer = tiny_tokenizer(vocab - len(SPECIAL))
    tokenizer.add_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.mask_token = "<end>", "<start>", mask
    tokenizer.chat_template = template
    target = fresh_target()
    target.generation_config.eos_token_id = [FIRST, FIRST + 2]
    return default_mask_token(tokenizer, target, [[20, 21], text])


@pytest.mark.parametrize(
    ("text", "settings", "expected", "said"),
    [
        ([], {"mask": "<file>"}, FIRST + 4, "'<file>', the tokenizer's mask token"),
        ([], {"vocab": VOCAB - 4}, VOCAB - 4, "an embedding row of the target that has no token"),
        ([], {}, FIRST + 3, "'<|reserved_3|>', a special token that is not in the chat template or the text"),
        ([FIRST + 3], {}, FIRST + 6, "'<script>', a special token that is not in the chat template or the text"),
        ([FIRST + 3], {"template": "{{ '<script>' }}"}, FIRST + 5, "'<tool>', a special token that"),
    ],
)
def test_a_mask_token_is_found_that_nothing_else_uses(text, settings, expected, said):
    index, words = mask_token(text, **settings)
    assert index == expected
    assert words.startswith(said)


def test_no_token_without_a_use_raises_and_names_the_option():
    with pytest.raises(ValueError, match=r"each of its 8 special tokens is used by .* --mask-token-id"):
        mask_token([FIRST + 3, FIRST + 6], template="<tool> <file>")

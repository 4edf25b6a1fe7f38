"""Calibration: chooses exit layers, threshold, w_max and d_max from measurements on a few prompts and this machine.

The target continues the prompts alone. One forward over its text then gives, at every position and exit layer, the
head's confidence and whether it is right; layers and heads are timed on the machine. Every choice of options is rated
by the paper's speedup model (SpecBound, Eq. 3 to 5): committed tokens times the time of a token without drafting, over
the time of the rounds. Eq. 5 assumes one acceptance rate, one depth, and layers whose time does not depend on the
number of tokens. Here rounds are simulated along the text with the measured exits, hits and times instead.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import seconds_of
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.taps import decoder_states, tap_layer
from hf_specdec.drafting.fingerprint import local_tokenizer
from hf_specdec.methods.specbound.drafting import LayerSlices, PendingChain

if TYPE_CHECKING:
    from hf_specdec.methods.specbound.network import SpecBoundDrafter

THRESHOLDS = tuple(round(0.3 + 0.05 * step, 2) for step in range(14))
WIDTHS = (2, 3, 4, 6, 8, 10, 12, 16)
MOST_EXITS = 4


@dataclass(frozen=True)
class Times:
    """Measured seconds.

    Attributes:
        layer: {nodes run together: one decoder layer}.
        head: one exit head and its decision, by exit layer.
        rest: of a token without drafting, outside the layers; assumed to be the same for a round.
    """

    layer: dict[int, float]
    head: dict[int, float]
    rest: float

    def layer_of(self, nodes: int) -> float:
        """One layer over `nodes` nodes, interpolated."""
        return float(np.interp(nodes, list(self.layer), list(self.layer.values())))


@dataclass(frozen=True)
class ExitCalibration:
    """What was chosen, and from what.

    Attributes:
        chosen: the drafting options set.
        predicted_speedup: of these options on these prompts.
        summary: one line for the model card: the measured times and the prediction.
    """

    chosen: dict[str, Any]
    predicted_speedup: float
    summary: str

    def to_record(self) -> dict[str, Any]:
        """For the drafter's config."""
        return asdict(self)

    def __str__(self) -> str:
        return f"chosen: {', '.join(f'{name} {value}' for name, value in self.chosen.items())}\n{self.summary}"


@without_cudnn_attention()
def calibrate(
    drafter: SpecBoundDrafter,
    target: PreTrainedModel,
    prompts: Sequence[str | Sequence[int] | Tensor],
    *,
    new_tokens: int = 64,
    thresholds: Sequence[float] = THRESHOLDS,
    widths: Sequence[int] = WIDTHS,
) -> ExitCalibration:
    """See `SpecBoundDrafter.calibrate`."""
    rows = [_token_ids(prompt, target) for prompt in prompts]
    if not rows:
        raise ValueError("calibrate() got no prompts; give about a dozen that resemble the later ones.")
    texts, token_s = continue_alone(target, rows, new_tokens)
    confidence, right = exits_of(drafter, target, rows, texts)
    times = measure_times(drafter, target, texts[0], token_s, max(widths))
    lengths = [len(text) - len(row) for row, text in zip(rows, texts, strict=True)]
    heads, depth = drafter.config.exit_layers, drafter.config.num_target_layers
    best, chosen = 0.0, dict[str, Any]()
    choices = [
        each for count in range(1, min(len(heads), MOST_EXITS) + 1) for each in itertools.combinations(heads, count)
    ]
    for layers, threshold in itertools.product(choices, thresholds):
        depths, hits, evaluated = exits_at(layers, threshold, confidence, right)
        for width in widths:
            predicted = predicted_speedup(depths, hits, evaluated, lengths, width, times, depth, token_s)
            if predicted > best:
                best, options = predicted, {"threshold": threshold, "w_max": width}
                chosen = options | {"d_max": layers[-1], "use_exit_layers": list(layers)}
    summary = (
        f"on {len(rows)} prompts of {new_tokens} new tokens; a layer took {1e3 * times.layer_of(1):.2f} ms, a head "
        f"{1e3 * statistics.mean(times.head.values()):.2f} ms, a plain token {1e3 * token_s:.1f} ms; predicted speedup "
        f"{best:.2f}x"
    )
    result = ExitCalibration(chosen | {"alpha": drafter.options.alpha}, round(best, 4), summary)
    drafter.set_options(**chosen)
    drafter.config.calibration = result.to_record()
    return result


def _token_ids(prompt: str | Sequence[int] | Tensor, target: PreTrainedModel) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = local_tokenizer(target.name_or_path)
        if tokenizer is None:
            raise ValueError(
                f"calibrate() got text, but the tokenizer of {target.name_or_path!r} is not on this machine; give "
                "token ids."
            )
        return list(tokenizer(prompt)["input_ids"])
    return torch.as_tensor(prompt).flatten().tolist()


def continue_alone(
    target: PreTrainedModel, rows: Sequence[list[int]], new_tokens: int
) -> tuple[list[list[int]], float]:
    """Greedy continuations by the target alone, prompts included, and the median time of a token in seconds."""
    arguments: dict[str, Any] = {"do_sample": False, "pad_token_id": target.generation_config.pad_token_id or 0}
    texts, seconds = [], []
    for row in [rows[0], *rows]:  # the first one twice, as warm-up
        prompt = torch.tensor([row], device=target.device)
        arguments["attention_mask"] = torch.ones_like(prompt)
        started = time.perf_counter()
        target.generate(prompt, max_new_tokens=1, **arguments)
        first = time.perf_counter()
        text = target.generate(prompt, max_new_tokens=new_tokens, **arguments)[0].tolist()
        ended = time.perf_counter()
        texts.append(text)
        if len(text) > len(row) + 1:
            seconds.append(((ended - first) - (first - started)) / (len(text) - len(row) - 1))
    if len(seconds) < 2:
        raise ValueError("The target ends every continuation immediately; give prompts that it continues.")
    return texts[1:], statistics.median(seconds[1:])


@torch.no_grad()
def exits_of(
    drafter: SpecBoundDrafter, target: PreTrainedModel, rows: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Per exit layer the annealed confidence and whether the head is right, at all continued positions."""
    slices, rules = LayerSlices(target), drafter.exit_rules(drafter.config.exit_layers)
    states: dict[int, Tensor] = {}
    found: dict[int, list[Tensor]] = {layer: [] for layer in rules}
    hits: dict[int, list[Tensor]] = {layer: [] for layer in rules}
    handles = [tap_layer(target, layer - 1, functools.partial(states.__setitem__, layer)) for layer in rules]
    try:
        for row, text in zip(rows, texts, strict=True):
            decoder_states(target, torch.tensor([text[:-1]], device=target.device))
            labels = torch.tensor(text[len(row) :], device="cpu")
            for layer, rule in rules.items():
                logits = drafter.exit_logits(layer, states[layer][0, len(row) - 1 :], slices)
                confidence, likeliest = rule.confidence(logits)
                found[layer].append(confidence.cpu())
                hits[layer].append(drafter.to_target_ids(likeliest).cpu() == labels)
    finally:
        for handle in handles:
            handle.remove()
    return (
        {layer: torch.cat(parts).double().numpy() for layer, parts in found.items()},
        {layer: torch.cat(parts).numpy() for layer, parts in hits.items()},
    )


@torch.inference_mode()
def measure_times(
    drafter: SpecBoundDrafter, target: PreTrainedModel, text: Sequence[int], token_s: float, widest: int
) -> Times:
    """Times layers over several numbers of nodes, and every head, after a cached text."""
    bound = TargetModel(target)
    bound.prefill_alone(torch.tensor([list(text)], device=target.device), max_length=len(text) + widest)
    bound.begin_rounds(len(text) + widest)
    slices = LayerSlices(target)

    def run(nodes: int, layers: int) -> Tensor:
        chain = PendingChain(bound, slices, bound.root_positions(), nodes)
        for _ in range(nodes):
            chain.extend(torch.tensor([text[-1]], device=target.device))
        return chain.advance(layers)

    layer_s = {
        nodes: seconds_of(functools.partial(run, nodes, slices.num_layers), target.device) / slices.num_layers
        for nodes in sorted({1, 2, widest // 2, widest} - {0})
    }
    state = run(1, 1)
    head_s = {
        layer: seconds_of(lambda: rule.confidence(drafter.exit_logits(layer, state, slices))[0].tolist(), target.device)  # noqa: B023
        for layer, rule in drafter.exit_rules(drafter.config.exit_layers).items()
    }
    return Times(layer_s, head_s, max(0.0, token_s - slices.num_layers * layer_s[1]))


def exits_at(
    layers: Sequence[int], threshold: float, confidence: dict[int, np.ndarray], right: dict[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """The first exit of each position that a threshold allows.

    Args:
        layers: exits in use, ascending.
        threshold: tau.
        confidence: per exit layer [positions], annealed.
        right: per exit layer [positions] bool.

    Returns:
        [positions] layer of the exit, 0 for none; [positions] whether the token drafted there is right; and per layer
        of `layers` [positions] whether its head was evaluated.
    """
    depths = np.zeros(len(confidence[layers[0]]), dtype=int)
    hits = np.zeros(len(depths), dtype=bool)
    evaluated: dict[int, np.ndarray] = {}
    for layer in layers:
        waiting = depths == 0
        evaluated[layer] = waiting
        leaving = waiting & (confidence[layer] >= threshold)
        depths[leaving] = layer
        hits[leaving] = right[layer][leaving]
    return depths, hits, evaluated


def predicted_speedup(
    depths: np.ndarray,
    hits: np.ndarray,
    evaluated: Mapping[int, np.ndarray],
    lengths: Sequence[int],
    width: int,
    times: Times,
    num_layers: int,
    token_s: float,
) -> float:
    """Simulates rounds along the text and compares their time with decoding the same tokens without drafting (Eq. 5).

    A round drafts until a position without an exit, or the width; it commits the drafts before the first wrong one, and
    one more token. After a wrong draft the simulation continues drafting along the text, which rather overestimates
    the wasted time.

    Args:
        depths: [positions] exit layer, 0 for none.
        hits: [positions] bool, whether the draft is right.
        evaluated: per exit layer in use [positions] bool, whether its head was evaluated.
        lengths: positions of each text, in order.
        width: w_max.
        times: measured.
        num_layers: L.
        token_s: seconds of a token without drafting.
    """
    # The layers of a position without an exit are counted in the verification.
    draft_s = (depths * times.layer_of(1) + sum(mask * times.head[layer] for layer, mask in evaluated.items())).tolist()

    deep_s = [num_layers * times.layer_of(nodes) + times.rest for nodes in range(width + 1)]
    exits, right = depths.tolist(), hits.tolist()
    total_s, committed, start = 0.0, 0, 0
    for length in lengths:
        end = start + length
        root = start
        while root < end:
            last, accepted = root, 0
            while last < end - 1 and last - root < width - 1 and exits[last]:
                total_s += draft_s[last]
                if right[last] and accepted == last - root:
                    accepted += 1
                last += 1
            if last - root < width - 1 and not exits[last]:
                total_s += draft_s[last]  # its heads, which found no exit
            total_s += deep_s[last - root + 1]
            committed += accepted + 1
            root += accepted + 1
        start = end
    return committed * token_s / total_s

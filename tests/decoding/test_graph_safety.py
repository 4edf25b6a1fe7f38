"""What a graph cannot capture, looked for on the meta device: tensors of the host that a captured forward would upload.

There every tensor says where it lives without living anywhere, so that a forward runs as it would on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.speed import static_verify
from hf_specdec.decoding.speed.cuda_graphs import Workspace
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafting.growth import best_tree, level_tree
from hf_specdec.drafting.reader import NewTokens
from hf_specdec.methods.dflash import drafting as dflash
from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.eagle3 import drafting as eagle3
from hf_specdec.methods.medusa import MedusaMarginals, StaticTreeGenerator, _guesses
from hf_specdec.methods.specblock import drafting as specblock
from hf_specdec.methods.specblock.drafting import SpecBlockGenerator
from tests.method_table import make_dflash, make_eagle3, make_medusa, make_medusa_static, make_specblock
from tests.targets import fresh_target

META = torch.device("meta")
AT, WIDTH = 256, 8


class HostTensors(TorchDispatchMode):
    """Operations that read or make a tensor in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, Tensor)]
        if any(part.device != META for part in tensors):
            self.seen.append(f"{func}, {[list(part.shape) for part in tensors]}")
        return result


def ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=META)


def states(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64, device=META)


def bound_target(family: str = "qwen3-mixed") -> TargetModel:
    return TargetModel(fresh_target(family, "sdpa").to(META), feature_layers=(0, 2))


def cache(layers: int) -> TreeCache:
    made = TreeCache.empty(layers, 2, 2, 8, dtype=torch.float64, device=META, capacity=600)
    made.place_nodes(AT)
    return made


def verify(first: int = 0) -> Callable[[], object]:
    target = bound_target()
    target.cache, workspace = cache(4), Workspace()
    target.cache.continue_round(first)
    assert workspace.claim(target, target.model)
    seen = first + WIDTH
    inputs = (ids(2, WIDTH), ids(2, WIDTH), ids(2, seen), ids(2, WIDTH, seen) > 0, ids(2), ids(2))

    def run(target: TargetModel = target) -> object:
        with target.tapping():
            return static_verify._forward(workspace, inputs, AT)

    return run


def block() -> Callable[[], object]:
    target = bound_target("llama")
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    source = DFlashMarginals(make_dflash(target.model, **windows).to(META, torch.float64), target)
    source.cache = cache(2)
    return lambda: dflash._block(source, new_tokens(64), ids(2), ids(2))


def new_tokens(width: int) -> NewTokens:
    return NewTokens(AT, False, ids(2), ids(2), ids(2, WIDTH), ids(2, WIDTH), states(2, WIDTH, width))


def drafter_of_levels() -> eagle3.Eagle3Generator:
    target = bound_target("llama")
    generator = eagle3.Eagle3Generator(make_eagle3(target.model).to(META, torch.float64), target)
    generator.cache = cache(1)
    return generator


def pairs() -> Callable[[], object]:
    generator = drafter_of_levels()
    return lambda: eagle3._pairs(generator, new_tokens(64), ids(2), states(2, 1, 32))


def levels() -> Callable[[], object]:
    generator = drafter_of_levels()
    return lambda: eagle3._levels(AT, generator, states(2, 1, 32), ids(2), ids(2))


def best_of_levels() -> Callable[[], object]:
    values = (ids(2), states(2, 40), ids(2, 40), ids(2, 40), ids(2) > 0)
    return lambda: best_tree(*values, depth=4, budget=9)


def heads() -> Callable[[], object]:
    target = bound_target("llama")
    source = MedusaMarginals(make_medusa(target.model).to(META, torch.float64), target)
    return lambda: _guesses(source, states(2, 32))


def tree() -> Callable[[], object]:
    return lambda: level_tree(ids(2), states(2, 7, 64), 24)


def generator_of_blocks() -> SpecBlockGenerator:
    target = bound_target("llama")
    target.model.config._name_or_path = ""
    drafter = make_specblock(target.model).to(META, torch.float64)
    generator = SpecBlockGenerator(drafter, target)
    generator.cache = cache(2)
    return generator


def specblock_committed() -> Callable[[], object]:
    generator = generator_of_blocks()
    taps = generator.drafter.config.num_taps * 32
    last = (states(2, 1, generator.slots, 32), ids(2, 1))
    return lambda: specblock._committed(generator, new_tokens(taps), ids(2), *last)


def specblock_drafted() -> Callable[[], object]:
    generator = generator_of_blocks()
    shape = generator.shape
    values = (ids(2), ids(2), states(2, 1, generator.slots, 32), ids(2, 1), shape.branching[None], shape.index[None])
    return lambda: specblock._drafted(AT, generator, *values)


CAPTURED = {
    "verify": verify, "verify a level": lambda: verify(first=5), "dflash block": block, "eagle3 pairs": pairs,
    "eagle3 levels": levels, "eagle3 tree": best_of_levels, "medusa heads": heads, "ddtree tree": tree,
    "specblock committed": specblock_committed, "specblock drafted": specblock_drafted,
}  # fmt: skip


@pytest.mark.parametrize("part", CAPTURED)
def test_what_is_captured_touches_no_host_memory(part: str) -> None:
    run = CAPTURED[part]()
    with HostTensors() as mode, torch.inference_mode():
        run()
    assert not mode.seen


def test_a_tree_of_fixed_shape_is_on_the_device_before_the_first_round() -> None:
    drafter = make_medusa_static(bound_target("llama").model).to(META, torch.float64)
    generator = drafter.candidate_generator(bound_target("llama"))
    assert isinstance(generator, StaticTreeGenerator)
    context = DraftContext(ids(2), ids(2), ids(2, 9), [9, 9], [True, True])
    with HostTensors() as mode, torch.inference_mode():
        generator.tree(context, states(2, 3, 64))
    assert not mode.seen


def test_the_mode_sees_uploads() -> None:
    with HostTensors() as mode:
        ids(3) + torch.tensor([1, 2, 3]).to(META)
    assert mode.seen

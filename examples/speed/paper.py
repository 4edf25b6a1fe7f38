"""What a round costs on paper: operators, bytes and floating-point operations by part. Nothing is measured.

    python -m examples.speed.paper --shape qwen3-8b --contexts 1024 8192 32768 --nodes 16 64

The library's own code runs on torch's meta device, where tensors have shapes and no memory. So any shape is counted in
seconds, on any computer. Counted per operator:

- one launch; in a captured round one for each replay of a graph and for each operator outside of graphs;
- bytes: each input is read once and each output written once, as if nothing stayed in a cache of the device. Attention
  is one operator that reads queries, keys, values and mask and writes its output, as fused kernels do;
- a sort as a radix sort: each of four passes reads and writes keys and indices;
- floating-point operations of matrix products and attention, two for a multiplication and an addition.

The time of a part is at least its bytes over the device's bandwidth, and its operations over its peak. The floor of a
round is the time to read the target's weights once (`hf_specdec.benchmark.floor`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.benchmark.floor import weight_bytes
from hf_specdec.decoding import devices
from hf_specdec.decoding.accept import Acceptor
from hf_specdec.decoding.devices import Abilities
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.speed.cuda_graphs import CompileMode
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree

from .scripted import dflash_network, shapes

PARTS = ("draft", "verify", "accept", "commit")
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second, SXM, of the data sheets
PEAK = 989e12  # of both: bfloat16 operations per second, dense
META = torch.device("meta")
DEPTH = 15  # of the trees of a DFlash network with blocks of 16
LOOKUPS = ("embedding", "index", "index_select", "gather")  # read as much of a tensor as they return
WRITES = ("copy_", "fill_", "zero_")  # a whole tensor, which they do not read
PARTIAL_WRITES = ("index_copy_", "index_put_", "scatter_")  # of as much of a tensor as they are given
SORT_PASSES = 4  # of a radix sort of 32-bit keys
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh", "detach", "alias")


@dataclass
class Cost:
    """What some operators cost.

    Attributes:
        operators: that compute or copy; views are free.
        launches: of the host: operators outside of captured graphs, and graphs.
        num_bytes: read and written.
        flops: of matrix products and attention.
    """

    operators: int = 0
    launches: int = 0
    num_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.operators + other.operators,
            self.launches + other.launches,
            self.num_bytes + other.num_bytes,
            self.flops + other.flops,
        )

    def seconds(self, bandwidth: float) -> float:
        """The least time on a device with this bandwidth and `PEAK`."""
        return max(self.num_bytes / bandwidth, self.flops / PEAK)


def size_of(tensor: Tensor) -> int:
    """Bytes of memory that a tensor covers; expanded dimensions count once.

    Examples:
        >>> size_of(torch.zeros(3, 1).expand(3, 5))
        12
    """
    lengths = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(lengths) * tensor.element_size() if tensor.numel() else 0


class Counter(TorchDispatchMode):
    """Counts what operators cost while the context is open; `current` is the one that was opened last."""

    current: ClassVar[Counter]

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self.in_graph = False
        Counter.current = self

    def add(self, num_bytes: int, flops: int = 0) -> None:
        """Counts one operator."""
        self.cost += Cost(1, 0 if self.in_graph else 1, num_bytes, flops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if packet not in flop_registry:
            with self:  # in inference mode composite operators arrive whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        found = func(*args, **kwargs)
        returned = [returns.alias_info for returns in func._schema.returns]
        if name in FREE or any(alias is not None and not alias.is_write for alias in returned):
            return found
        inputs, outputs = self._tensors((args, kwargs)), self._tensors(found)
        if name in WRITES:
            num_bytes = sum(map(size_of, inputs))
        elif name in PARTIAL_WRITES:
            num_bytes = 2 * sum(map(size_of, inputs[1:]))
        elif name in LOOKUPS:
            num_bytes = 2 * sum(map(size_of, outputs)) + sum(map(size_of, inputs[1:]))
        elif name == "sort":
            num_bytes = sum(map(size_of, inputs)) + 2 * SORT_PASSES * sum(map(size_of, outputs))
        else:
            num_bytes = sum(map(size_of, inputs + outputs))
        count = flop_registry.get(packet)
        self.add(num_bytes, 0 if count is None else count(*args, **kwargs, out_val=found))
        return found

    @staticmethod
    def _tensors(values: Any) -> list[Tensor]:
        return list({id(part): part for part in tree_leaves(values) if isinstance(part, Tensor)}.values())


class FusedAttention(TorchFunctionMode):
    """Counts an attention as one operator; the meta device would compute it in parts, with a matrix of scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        mask = kwargs.get("attn_mask")
        output = query.new_empty(*query.shape[:3], value.shape[3])
        read = [query, key, value, *([] if mask is None else [mask]), output]
        products = 2 * math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
        Counter.current.add(sum(map(size_of, read)), products)
        return output


class GraphOnPaper:
    """A captured forward: its replay is one launch, and runs the operators that it was captured with."""

    def __init__(self, forward: cuda_graphs.Forward, pool: Any) -> None:
        self.forward, self.pool = forward, pool or object()
        self.outputs = forward()

    def replay(self) -> None:
        counter = Counter.current
        counter.in_graph = True
        self.forward()
        for output in self.outputs:  # copied out of the pool, see `cuda_graphs.CudaGraph`
            counter.add(2 * size_of(output))
        counter.in_graph = False
        counter.cost += Cost(launches=1)


def target_on_paper(shape: str | PreTrainedConfig) -> PreTrainedModel:
    """A target in bfloat16 without memory; `shape` is a name of `scripted.shapes`, or a config."""
    config = shapes()[shape] if isinstance(shape, str) else shape
    with META:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def round_on_paper(
    model: PreTrainedModel, context: int, nodes: int, mode: CompileMode, *, accepted: int = 5, folds_heads: bool = True
) -> dict[str, Cost]:
    """The cost of one greedy DDTree round of one row, by part, with a DFlash network of the published shape.

    Args:
        model: from `target_on_paper`.
        context: committed tokens.
        nodes: drafted nodes of the tree.
        mode: `compile_mode`: "none", or "reduce-overhead" for a round that was captured before.
        accepted: drafted tokens that the round before has kept, which the drafter reads first.
        folds_heads: see `Abilities`; False for transformers' own attention on CUDA.
    """
    network = dflash_network(model)
    network.set_options(tree_budget=nodes, compile_mode=mode)
    as_cuda: Callable[[torch.device], Abilities] = lambda device: Abilities(folds_heads=folds_heads, works_ahead=True)  # noqa: E731
    with (
        patch.dict(devices.RULES, meta=as_cuda),
        patch.object(cuda_graphs, "CudaGraph", GraphOnPaper),
        patch.object(cuda_graphs, "obstacle", lambda model, device: None),  # there is no autocast for meta tensors
        torch.no_grad(),
        FusedAttention(),
    ):
        target = TargetModel(model, network.feature_layers(model), compile_mode=mode)
        with target.tapping():
            return _round(target, network.candidate_generator(target), context, accepted)


def _round(target: TargetModel, generator: Any, context: int, accepted: int) -> dict[str, Cost]:
    """The parts of the third round; the first reads the prompt, the second captures."""
    prompt = torch.zeros(1, context - 2 * (accepted + 1), dtype=torch.int64, device=META)
    length = context + 256
    Counter()  # of the prompt's forward; not looked at
    output = target.prefill(prompt, GenerationConfig(max_length=length), {"use_cache": True})
    target.begin_rounds(length)
    generator.observe(Committed.of_prompt(prompt, target, output))
    state = RoundState(prompt[:, 0], target.root_positions())
    acceptor = Acceptor(LogitsProcessorList(), do_sample=False, keep_scores=False, lockstep=False, relaxed=None)
    costs: dict[str, Cost] = {}
    for _ in range(3):
        with Counter() as drafting:
            tree = generator.draft(
                DraftContext(state.root_ids, state.root_positions, prompt, [prompt.shape[1]], [True])
            )
        with Counter() as verifying:
            output = generator.verify(target, tree, state)
        with Counter() as accepting:
            sequences: Any = None  # not read: there are no processors
            verdict = acceptor(tree, output.logits, sequences, output.drawn, None, output.states)
        verdict.counts.known = [accepted + 1]  # what the host would read
        with Counter() as committing:
            target.cache.commit(verdict.path, verdict.counts)
            committed = Committed.of_round(tree, output, verdict, state)
            state = state.next(verdict.bonus_ids, verdict.counts)
            generator.observe(committed)
        parts = (drafting, verifying, accepting, committing)
        costs = {name: counter.cost for name, counter in zip(PARTS, parts, strict=True)}
    generator.close()
    target.close()
    return costs


def acceptance_on_paper(vocab: int, nodes: int, depth: int) -> Cost:
    """The cost of the acceptance of a round of one row that samples with temperature, top-k and top-p, at all nodes.

    Args:
        vocab: columns of the logits.
        nodes: of the tree, root included.
        depth: of its deepest node.
    """
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)])
    sequences: Any = None  # not read
    with patch.dict(devices.RULES, meta=lambda device: Abilities(works_ahead=True)), torch.no_grad():
        acceptor = Acceptor(processors, do_sample=True, keep_scores=False, device=META)
        numbers = torch.zeros(1, nodes, dtype=torch.int64, device=META)
        tree = DraftTree.from_parents(numbers, numbers, depth)
        logits = torch.zeros(1, nodes, vocab, device=META)
        acceptor(tree, logits, sequences)  # makes constants
        with Counter() as accepting:
            acceptor(tree, logits, sequences)
    return accepting.cost


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_part(model: PreTrainedModel, context: int, nodes: int) -> str:
    """The table of a round: its parts, their sum, and the floor."""
    eager = round_on_paper(model, context, nodes, "none")
    captured = round_on_paper(model, context, nodes, "reduce-overhead")
    floor = weight_bytes(model)
    rows = []
    for name in (*PARTS, "round"):
        one, other = (sum(costs.values(), Cost()) if name == "round" else costs[name] for costs in (eager, captured))
        figures = [f"{one.launches:,}", f"{other.launches:,}", f"{other.num_bytes / 1e9:.2f}"]
        figures.append(f"{other.flops / 1e12:.2f}")
        rows.append([name, *figures, *(f"{1000 * other.seconds(speed):.2f}" for speed in BANDWIDTHS.values())])
    times = [f"{1000 * floor / bandwidth:.2f}" for bandwidth in BANDWIDTHS.values()]
    rows.append(["floor", "", "", f"{floor / 1e9:.2f}", "", *times])
    return markdown(
        ["part", "launches, eager", "launches, captured", "GB", "TFLOP", *(f"ms, {name}" for name in BANDWIDTHS)], rows
    )


def of_attention(model: PreTrainedModel, contexts: Sequence[int], nodes: int) -> str:
    """Bytes by context: keys and values once; of verify with the attention of transformers, which copies, and ours."""
    config = model.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    rows = []
    for context in contexts:
        copied, folded = (
            round_on_paper(model, context, nodes, "reduce-overhead", folds_heads=folds)["verify"].num_bytes
            for folds in (False, True)
        )
        figures = [f"{value / 1e9:.2f}" for value in (context * entry, copied, folded)]
        rows.append([f"{context:,}", *figures, f"{copied / folded:.2f}"])
    return markdown(["context", "keys and values", "verify, with copies", "verify", "ratio"], rows)


def of_acceptance(model: PreTrainedModel, nodes: int, depth: int) -> str:
    """A sampled round's acceptance: at all nodes at once, as it is, and at one node per level, one after another."""
    vocab = model.config.vocab_size
    whole, one = acceptance_on_paper(vocab, 1 + nodes, depth), acceptance_on_paper(vocab, 1, 0)
    rows = []
    for name, cost, times in (("all nodes at once", whole, 1), ("one node per level", one, depth + 1)):
        seconds = [f"{1000 * times * cost.seconds(speed):.2f}" for speed in BANDWIDTHS.values()]
        rows.append([name, f"{times * cost.launches:,}", f"{times * cost.num_bytes / 1e9:.2f}", *seconds])
    return markdown(["acceptance", "launches", "GB", *(f"ms, {name}" for name in BANDWIDTHS)], rows)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="python -m examples.speed.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--shape", choices=sorted(shapes()), default="qwen3-8b", help="(default: qwen3-8b)")
    options.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768], help="committed tokens")
    options.add_argument("--nodes", type=int, nargs="+", default=[16, 64], help="drafted nodes (default: 16 64)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table of parts per number of nodes, at the first context, and those of attention and acceptance."""
    options = parser().parse_args(argv)
    model = target_on_paper(options.shape)
    for nodes in options.nodes:
        print(f"\n{options.shape}, {nodes} drafted nodes, context {options.contexts[0]:,}\n")
        print(by_part(model, options.contexts[0], nodes))
    print(f"\nGB that verify of {options.nodes[-1]} drafted nodes reads and writes\n")
    print(of_attention(model, options.contexts, options.nodes[-1]))
    print(
        f"\nAcceptance with temperature, top-k and top-p, {options.nodes[-1]} drafted nodes of up to {DEPTH} levels\n"
    )
    print(of_acceptance(model, options.nodes[-1], DEPTH))
    return 0


if __name__ == "__main__":
    sys.exit(main())

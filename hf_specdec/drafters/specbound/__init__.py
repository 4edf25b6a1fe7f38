"""SpecBound: the target drafts for itself, with exit heads on its shallow layers, stored as LoRA adapters."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

from hf_specdec.decoding.generator import DraftContext
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.registry import Serving, register
from hf_specdec.drafters.specbound.configuration import SpecBoundConfig, SpecBoundOptions
from hf_specdec.drafters.specbound.modeling import SpecBoundDrafter
from hf_specdec.drafters.specbound.pending import PendingGenerator

__all__ = ["SpecBoundConfig", "SpecBoundDrafter", "SpecBoundOptions"]


def _adapters(fields: dict[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The further files: a LoRA adapter of the target's head for each exit layer."""
    if fields.get("head", "lora") != "lora":
        return {}
    rank = fields.get("lora_rank", 64)
    parts: dict[str, tuple[int, ...]] = {
        ".lora_A.weight": (rank, fields["hidden_size"]),
        ".lora_B.weight": (fields["vocab_size"], rank),
    }
    return {f"exit-layer-{layer:02d}/adapter_model.safetensors": parts for layer in fields["exit_layers"]}


class ReplayGenerator(PendingGenerator):
    """Runs the nodes of recorded trees up to the exit layers, in turn, before they are verified.

    Args:
        drafter: that drafted the trees.
        target: of the call.
        recorded: returns the tree of a round.
    """

    def __init__(
        self, drafter: SpecBoundDrafter, target: TargetModel, recorded: Callable[[DraftContext], DraftTree]
    ) -> None:
        super().__init__(target)
        self.layers, self.recorded = tuple(drafter.exit_rules()), recorded

    def draft(self, context: DraftContext) -> DraftTree:
        tree = self.recorded(context)
        if tree.num_nodes > 1:
            chain = self.begin_chain(context.root_positions, tree.num_nodes)
            for node, layer in zip(range(tree.num_nodes), cycle(self.layers), strict=False):
                chain.extend(tree.token_ids[:, node])
                chain.advance(layer)
        return tree


register(
    "specbound",
    SpecBoundDrafter,
    own_files=_adapters,
    serving=Serving(not_exported="SpecBound changes how the target runs, and vLLM has no class for it"),
    replays=ReplayGenerator,
)

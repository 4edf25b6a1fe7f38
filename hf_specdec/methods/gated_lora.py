"""Gated LoRA: the target drafts for itself, at masks behind its text, through a LoRA that acts on the masks alone.

A mask is a position with a learned embedding instead of a token. It attends to the text before it, to the path of the
tree node that it follows, and to the masks before it. Mask k after a token predicts the token k + 1 positions after
that one; the target's own output there predicts the first. The low-rank updates are added to the outputs of attention
and feed-forward projections in the columns of the masks. All other columns are the target's, bit for bit, and never
attend to a mask.

The drafter has no network of its own. A forward hook on each projection adds its update, only during forwards with
masks, so an adapter of the user's on the same target stays active on all columns. A round drafts in one of two ways:

- Behind nodes: the forward that verifies a tree also has masks behind the nodes at which the accepted path most likely
  ends (`masked_nodes`). Those behind the last accepted node draft the next tree, whose root is then the bonus token.
- Behind the root: if the last accepted node had no masks, and in a call's first round, a forward of its own runs the
  root and masks behind it. Its first draft is the target's own choice.

A Markov head (DSpark's) may correct each draft by the token before it, which a mask does not see. Training runs the
target twice per batch: over the rows, without gradients, for keys, values and labels; then over the masks alone.

On disk the updates are a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`), which
`PeftModel.from_pretrained(target, folder)` reads; PEFT itself has no gate and would apply it to all positions. Mask
embeddings and Markov head are in `model.safetensors`.

Source: Samragh et al., arXiv 2507.11851, for masked inputs and gated LoRA. Not taken: its consistency loss, its sampler
head, an MLP, and its quadratic decoding of chains; a Markov head and trees take the place of the last two.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.speed.cuda_graphs import run
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.masks import AttentionRange, additive
from hf_specdec.decoding.targets.modules import home_of, num_tokens
from hf_specdec.decoding.targets.support import TreesRefusedError, check_supported, keeps_states
from hf_specdec.decoding.targets.taps import decoder_of
from hf_specdec.decoding.tree import DraftTree, pick
from hf_specdec.decoding.upstream import cache_layers, takes_positions
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import Slots, conditional_tree
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import Serving, name_of, register
from hf_specdec.drafting.shapes import check_shapes, way_out
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.methods.dspark import MarkovHead
from hf_specdec.training.features import TargetReader
from hf_specdec.training.losses import LossName, draft_losses, position_weights
from hf_specdec.training.options import Count, TrainOptions
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import RowSource
from hf_specdec.training.step import StepOutput, TrainingStep

__all__ = ["GatedLoraConfig", "GatedLoraDrafter", "GatedLoraOptions", "GatedLoraStep", "new_drafter"]

SIDE_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME)
MOST_MASKS = 64
PEFT_PREFIX = "base_model.model."


class GatedLoraConfig(TargetFields):
    """Masks and low-rank updates of a target.

    Args:
        vocab_size: embeddings of the target.
        hidden_size: the target's.
        num_target_layers: of the target.
        num_masks: masks behind a token; they draft as many tokens.
        lora_rank: of every update.
        projections: input and output size of the updated modules, by their names in the target. "*" in a name stands
            for the number of every decoder layer.
        markov_rank: width of the Markov head; 0: none.
    """

    model_type = "hf_specdec_gated_lora"

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_target_layers: int = 32
    num_masks: int = 4
    lora_rank: int = 16
    projections: dict[str, list[int]] | None = None
    markov_rank: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.projections is None:
            self.projections = {}
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raises ValueError, naming the field, if no drafter can be built from this config."""
        self.check_sizes("vocab_size", "hidden_size", "num_target_layers", "num_masks", "lora_rank")
        self.check_sizes("markov_rank", least=0)
        if self.num_masks > MOST_MASKS:
            raise ValueError(f"num_masks is {self.num_masks}; it must be at most {MOST_MASKS}.")
        sizes = self.projections
        if not isinstance(sizes, dict) or not sizes:
            raise ValueError(f"projections is {sizes!r}; it must give the sizes of at least one module by name.")
        for name, shape in sizes.items():
            if not isinstance(shape, (list, tuple)) or [type(size) for size in shape] != [int, int] or min(shape) < 1:
                raise ValueError(f"projections gives {shape!r} for {name!r}; it must give input and output size.")

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Input and output size of every updated module, by its full name."""
        return {
            name.replace("*", str(layer)): (shape[0], shape[1])
            for name, shape in (self.projections or {}).items()
            for layer in range(self.num_target_layers if "*" in name else 1)
        }


@dataclass(slots=True, kw_only=True)
class GatedLoraOptions(TreeOptions):
    """Drafting options of gated LoRA.

    Attributes:
        tree_budget: see `TreeOptions`.
        masked_nodes: most nodes of a tree behind which masks run when it is verified. Each adds `num_masks` positions
            to the forward. 0: masks run behind the root only, in a forward of their own.
    """

    method = "gated_lora"
    masked_nodes: int = 16

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        if type(self.masked_nodes) is not int or not 0 <= self.masked_nodes <= MOST_MASKS:
            raise ValueError(f"masked_nodes={self.masked_nodes!r} must be an integer from 0 to {MOST_MASKS}.")


class LowRank(nn.Module):
    """The update B A x of a projection's output."""

    def __init__(self, in_size: int, out_size: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(rank, in_size))
        self.lora_B = nn.Parameter(torch.zeros(out_size, rank))

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] on any device -> [..., out], in the drafter's dtype."""
        down, up = (weight.to(rows.device) for weight in (self.lora_A, self.lora_B))
        flat = rows.reshape(-1, rows.shape[-1])  # of a slice, torch would copy the weight, see `apply_head`
        return linear(linear(flat.to(down.dtype), down), up).unflatten(0, rows.shape[:-1])


class GatedLoraDrafter(PretrainedDrafter):
    """Masks and gated updates as a drafter.

    Drafting options: `GatedLoraOptions`.

    Relation to its siblings: like `medusa` and `dflash` it predicts several tokens at once, but all layers of the
    target compute them, so a few megabytes suffice. Each mask costs as much as a token that the target verifies: this
    pays where some tens of positions take as long as one, as on GPUs.
    """

    config_class = GatedLoraConfig
    config: GatedLoraConfig
    options_class = GatedLoraOptions
    options: GatedLoraOptions
    _no_split_modules: ClassVar = ["LowRank"]
    side_files: ClassVar[tuple[str, ...]] = SIDE_FILES
    saved_side_files: ClassVar[tuple[str, ...]] = SIDE_FILES
    card_summary = (
        "A gated LoRA: the target drafts for itself at mask positions, on which alone low-rank updates of its "
        "projections act; its own positions are unchanged. The updates are a PEFT adapter. hf_specdec drafts with them "
        "the likeliest tree."
    )

    def __init__(self, config: GatedLoraConfig) -> None:
        config.check()
        super().__init__(config)
        self.updates = nn.ModuleDict(
            {_key(name): LowRank(*shape, config.lora_rank) for name, shape in config.shapes().items()}
        )
        self.masks = nn.Parameter(torch.zeros(1, config.num_masks, config.hidden_size))
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            vocab = config.vocab_size
            self.markov_head = MarkovHead(
                "vanilla", config.markov_rank, vocab_size=vocab, draft_vocab_size=vocab, hidden_size=config.hidden_size
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LowRank):  # as in LoRA: the update is zero initially, and its first gradient is not
            nn.init.normal_(module.lora_A, std=module.lora_A.shape[1] ** -0.5)
            nn.init.zeros_(module.lora_B)
        elif isinstance(module, MarkovHead):
            nn.init.normal_(module.markov_w1.weight)
            nn.init.zeros_(module.markov_w2.weight)
        elif module is self:
            nn.init.normal_(self.masks, std=0.02)

    def forward(self, model: PreTrainedModel, forward: Callable[[], Any], slots: Tensor, first: int = 0) -> Any:
        """Calls a function that runs `model` once, whose columns from `first` on are masks.

        Args:
            model: the target.
            forward: the function; its token ids at the masks have no effect, but must be the same in training.
            slots: [batch, masks] int64, the number of each mask behind its token, from 0.
            first: columns before it are tokens, and are not changed.

        Returns:
            what the function returns.
        """
        thread = threading.get_ident()  # others may run the same model

        def embed(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if threading.get_ident() != thread:
                return None
            masks = self.masks[0][slots.to(self.masks.device)].to(device=output.device, dtype=output.dtype)
            return torch.cat([output[:, :first], masks], 1)

        def add(update: nn.Module, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if threading.get_ident() != thread:
                return None
            output[:, first:] += update(args[0][:, first:]).to(output.dtype)
            return output

        with ExitStack() as hooks:
            hooks.callback(model.get_input_embeddings().register_forward_hook(embed).remove)
            for name in self.config.shapes():
                hook = functools.partial(add, self.updates[_key(name)])
                hooks.callback(model.get_submodule(name).register_forward_hook(hook).remove)
            return forward()

    def corrected(self, logits: Tensor, previous_ids: Tensor) -> Tensor:
        """[..., vocab] float32 logits of masks, and the tokens [...] before their drafts -> [..., vocab] float32."""
        if self.markov_head is None:
            return logits
        bias = self.markov_head.markov_w2(self.markov_head.embed(previous_ids.to(self.device))).to(logits)
        columns = TargetVocabularyLogitsProcessor(logits.shape[-1])
        return logits + columns(None, bias)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return GatedLoraGenerator(self, target)

    def check_target(self, model: PreTrainedModel) -> None:
        config, name, target_name = self.config, name_of(self), name_of(model)
        check_shapes(
            self,
            model,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_target_layers,
            may_exceed=True,
        )
        if keeps_states(model):
            raise ValueError(
                f"Target {target_name!r} has recurrent layers, whose states would contain the masks of drafter "
                f"{name!r}. Use another method for this target."
            )
        modules = dict(model.named_modules())
        for module_name, shape in config.shapes().items():
            found = _sizes(modules[module_name]) if module_name in modules else None
            if found != shape:
                has = "no such module" if found is None else f"{list(found)} there"
                raise ValueError(
                    f"Drafter {name!r} updates {module_name} with {list(shape)} inputs and outputs, but target "
                    f"{target_name!r} has {has}. {way_out(self)}"
                )
        try:
            check_supported(model)
        except TreesRefusedError as error:
            raise ValueError(
                f"{error}. Drafter {name!r} runs masks on the cache of verified trees, so transformers' loop cannot "
                "stand in for ours; use another drafter there."
            ) from error

    def card_facts(self) -> dict[str, str]:
        config, projections = self.config, len(self.config.shapes())
        markov = f"; Markov head of rank {config.markov_rank}" if config.markov_rank else ""
        return {
            "Method": self.method,
            "Masks": f"{config.num_masks}{markov}",
            "LoRA": f"rank {config.lora_rank}, on {projections} projections of {config.num_target_layers} layers",
        }

    # On disk.

    @classmethod
    def side_tensors(cls, folder: Path, name: str) -> dict[str, Tensor]:
        if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
            return {}
        try:
            config = LoraConfig.from_pretrained(str(folder))
            tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
            scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
            other = [field for field in ("use_dora", "rank_pattern", "alpha_pattern") if getattr(config, field)]
            if other or config.bias != "none":
                raise ValueError(f"{', '.join(other) or 'bias'} is set, which is not read")
        except Exception as error:  # foreign files, read by foreign classes: any exception is possible
            raise ValueError(
                f"{CONFIG_NAME} and {SAFETENSORS_WEIGHTS_NAME} of {name!r} cannot be read as a PEFT LoRA adapter "
                f"({type(error).__name__}: {error}). Copy or download the checkpoint again."
            ) from error
        found = {}
        for key, tensor in tensors.items():
            module, _, part = key.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
            if part == "lora_B" and scale != 1:
                tensor = (tensor.float() * scale).to(tensor.dtype)
            found[f"updates.{_key(module)}.{part}"] = tensor
        return found

    def main_tensors(self) -> dict[str, Tensor] | None:
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("updates.")}

    def write_side_files(self, folder: Path) -> None:
        rank, config = self.config.lora_rank, self.config
        names = "|".join(re.escape(name).replace(r"\*", r"\d+") for name in config.projections or {})
        LoraConfig(
            r=rank,
            lora_alpha=rank,  # lora_alpha / r scales the updates: 1
            target_modules=names,
            base_model_name_or_path=config.target_name_or_path,
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(folder))
        tensors = {
            f"{PEFT_PREFIX}{_name(key)}.{part}.weight": tensor.detach().cpu().contiguous()
            for key, update in self.updates.items()
            for part, tensor in update.named_parameters()
        }
        save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def _key(name: str) -> str:
    """The name of a module as a key of a `ModuleDict`, which must not have dots."""
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")


def _sizes(module: Any) -> tuple[int, int] | None:
    """Input and output size of a linear layer, of whatever class; None for other modules."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if hasattr(module, "nx") and hasattr(module, "nf") else None


def _adapter_shapes(fields: dict[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of the adapter that a config describes, by file."""
    config = GatedLoraConfig(**{name: fields[name] for name in ("projections", "num_target_layers")})
    rank = fields.get("lora_rank", config.lora_rank)
    parts: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in config.shapes().items():
        parts[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (rank, inputs)
        parts[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (outputs, rank)
    return {SAFETENSORS_WEIGHTS_NAME: parts}


@dataclass(frozen=True)
class Behind:
    """Masks that ran behind nodes of a tree while it was verified.

    Attributes:
        nodes: [batch, bearing] int64, the nodes.
        logits: [batch, bearing, masks, vocab] float32.
    """

    nodes: Tensor
    logits: Tensor


class MaskSlots(Slots):
    """The masks behind a token as slots of a block, see `Slots`.

    Args:
        drafter: with the Markov head.
        logits: see `Slots`.
        exact: whether the first slot is the target's own output, which needs no correction.
    """

    def __init__(self, drafter: GatedLoraDrafter, logits: Tensor, *, exact: bool) -> None:
        self.drafter, self.logits, self.depth, self.exact = drafter, logits, logits.shape[1], exact

    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Slots.step`."""
        logits = self.logits[:, slot, None].expand(-1, token_ids.shape[1], -1)
        return logits if self.exact and not slot else self.drafter.corrected(logits, token_ids), state


class GatedLoraGenerator(TreeCandidateGenerator):
    """One `generate` call of a `GatedLoraDrafter`.

    Args:
        drafter: with its options.
        target: of the call.
    """

    reads_cache = True

    def __init__(self, drafter: GatedLoraDrafter, target: TargetModel) -> None:
        self.drafter, self.target = drafter, target
        self.behind: Behind | None = None  # of the latest verification
        self.ready: Tensor | None = None  # [batch, masks, vocab], logits behind the last committed token of each row

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        logits, exact = self.ready, self.ready is None
        if logits is None:
            root = DraftTree.root_only(context.root_ids)
            tree = with_masks(root, torch.zeros_like(root.token_ids), self.drafter.config.num_masks)
            logits = self._run(tree, context.root_positions, 1).logits
            self.target.num_forwards -= 1  # it counts verifications; `num_layers_run` counts this forward too
        context.lap("draft")
        ids = torch.arange(logits.shape[-1], device=logits.device)
        budget = context.at_most(self.drafter.options.node_limit)
        tree = conditional_tree(context.root_ids, MaskSlots(self.drafter, logits, exact=exact), ids, budget)
        context.lap("tree")
        return tree

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Verifies with masks behind some nodes, if the tree has drafts and the target allows more nodes."""
        masks, nodes = self.drafter.config.num_masks, tree.num_nodes
        bearing = min(self.drafter.options.masked_nodes, nodes)
        if target.same_bits:  # more rows would have other bits
            bearing = min(bearing, (target.most_rows // len(tree.token_ids) - nodes) // masks)
        self.behind = None
        if nodes == 1 or bearing < 1 or tree.no_drafts is not None:
            return target.verify(tree, state.root_positions)
        behind = likeliest_ends(tree, bearing)
        output = self._run(with_masks(tree, behind, masks), state.root_positions, nodes)
        self.behind = Behind(behind, output.logits[:, nodes:].unflatten(1, (bearing, masks)))
        return output.without_padding(nodes)

    def _run(self, tree: DraftTree, root_positions: Tensor, first: int) -> TargetOutput:
        """A forward of the target over a tree whose nodes from `first` on are masks; neither captured nor compiled."""
        target, count = self.target, self.drafter.config.num_masks
        slots = torch.arange(tree.num_nodes - first, device=self.drafter.device).remainder(count)
        static, forward = target.static, target.forward
        if static is not None:
            target.cache.place_nodes(None)
        target.static, target.forward = None, run
        try:
            output: TargetOutput = self.drafter(
                target.model,
                lambda: target.verify(tree, root_positions),
                slots.expand(len(tree.token_ids), -1),
                first,
            )
        finally:
            target.static, target.forward = static, forward
        return output

    def observe(self, committed: Committed) -> None:
        behind, self.behind, self.ready = self.behind, None, None
        if behind is None:
            return
        assert committed.path is not None
        counts = committed.counts.tensor.to(committed.path.device).unsqueeze(1)
        last = committed.path.gather(1, (counts - 1).clamp(min=0))
        found = behind.nodes == last.to(behind.nodes.device)
        has_masks = found.any(1) | (counts[:, 0] == 0).to(found.device)  # rows that have ended commit nothing
        if bool(has_masks.all()):
            index = found.int().argmax(1, keepdim=True)
            self.ready = pick(behind.logits, index.to(behind.logits.device))[:, 0]

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.ready is not None:
            self.ready = self.ready[list(rows)]

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return path_notes(tree, tree.depths.clamp(max=1))  # one forward for all depths


class ReplayGenerator(GatedLoraGenerator):
    """Verifies recorded trees with masks behind their nodes.

    Args:
        drafter: that drafted the trees.
        target: of the call.
        recorded: returns the tree of a round.
    """

    def __init__(
        self, drafter: GatedLoraDrafter, target: TargetModel, recorded: Callable[[DraftContext], DraftTree]
    ) -> None:
        super().__init__(drafter, target)
        self.recorded = recorded

    def draft(self, context: DraftContext) -> DraftTree:
        return self.recorded(context)


def likeliest_ends(tree: DraftTree, count: int) -> Tensor:
    """[batch, count] int64, the nodes at which the accepted path most likely ends, by the drafter's probabilities.

    That is a node's probability less those of its children; the first nodes if the tree states none.

    Examples:
        >>> tree = DraftTree.from_lists([[7, 1, 2]], [[-1, 0, 1]], path_logprobs=[[0.0, -0.1, -3.0]])
        >>> likeliest_ends(tree, 2)
        tensor([[1, 0]])
    """
    if tree.path_logprobs is None:
        return torch.arange(count, device=tree.token_ids.device).expand(len(tree.token_ids), -1)
    probs = tree.path_logprobs.exp().masked_fill(~tree.valid, 0)
    ends = probs.scatter_add(1, tree.parents[:, 1:].clamp(min=0), -probs[:, 1:])
    return ends.topk(count, dim=1).indices


def with_masks(tree: DraftTree, behind: Tensor, count: int) -> DraftTree:
    """The same tree with a chain of `count` nodes of token 0 behind each of the nodes `behind` [batch, bearing].

    Examples:
        >>> tree = DraftTree.from_lists([[7, 1]], [[-1, 0]])
        >>> with_masks(tree, torch.tensor([[1, 0]]), 2).parents
        tensor([[-1,  0,  1,  2,  0,  4]])
    """
    batch, bearing = behind.shape
    new = torch.arange(bearing * count, device=behind.device).view(bearing, count) + tree.num_nodes - 1
    parents = new.expand(batch, -1, -1).clone()
    parents[:, :, 0] = behind
    parents = torch.cat([tree.parents, parents.flatten(1)], 1)
    token_ids = torch.nn.functional.pad(tree.token_ids, (0, bearing * count))
    return DraftTree.from_parents(token_ids, parents, tree.max_depth + count)


# Training.


class GatedLoraStep(TrainingStep):
    """Loss of one batch of rows for a `GatedLoraDrafter`: masks behind several tokens of each row, in one forward.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        num_anchors: tokens per row and step behind which masks run; fewer in rows with fewer candidates.
        loss: "ce" with the row's own tokens, or "kl", "tv", "lk" against the target's distributions.
        gamma: see `position_weights`; for the masks behind a token.

    Raises:
        ValueError: the drafter does not fit the target, or the target's head is not supported.
    """

    def __init__(
        self,
        drafter: GatedLoraDrafter,
        target: PreTrainedModel,
        *,
        num_anchors: int = 32,
        loss: LossName = "kl",
        gamma: float | None = 4.0,
    ) -> None:
        super().__init__(drafter, target, loss)
        if not takes_positions(target):
            raise ValueError(f"Target {name_of(target)!r} takes no position_ids, so masks cannot get their positions.")
        if self.reader.wants_last_hidden:  # refuses heads whose logits it cannot compute
            self.reader.read(torch.arange(1, 4, device=home_of(target.get_input_embeddings())).unsqueeze(0))
        # Keys and values of the rows are needed besides, so nothing of a row is kept on disk.
        self.reader = TargetReader(target, ())
        self.target = TargetModel(target)
        self.num_anchors, self.num_masks = num_anchors, drafter.config.num_masks
        self.weights = position_weights(1 + self.num_masks, gamma)

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        input_ids, length = batch["input_ids"], batch["length"].unsqueeze(1)
        device = input_ids.device
        anchors, valid = self.anchors(batch["first_anchor"].unsqueeze(1), length, random=training)
        at = anchors.unsqueeze(-1) + torch.arange(self.num_masks, device=device)  # positions of the masks
        rows, hidden = self.run(model, input_ids, anchors, at)

        labelled = valid.unsqueeze(-1) & (at + 1 < length.unsqueeze(-1))
        row, at = torch.arange(len(input_ids), device=device)[:, None, None].expand_as(at)[labelled], at[labelled]
        losses, hits, _ = draft_losses(
            self.loss,
            torch.cat([hidden[labelled], self._embedded(input_ids[row, at]).to(hidden)], -1),
            functools.partial(self._draft_head, width=hidden.shape[-1]),
            input_ids[row, at + 1],
            target_hidden=rows[row, at],
            target_head=self.reader.head,
        )
        weights = self.weights.to(device).expand(labelled.shape)[labelled]
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-9) + 0.0 * hidden.sum()
        return StepOutput(loss, torch.zeros_like(labelled).masked_scatter_(labelled, hits).detach(), labelled)

    def anchors(self, first: Tensor, length: Tensor, *, random: bool) -> tuple[Tensor, Tensor]:
        """The roots that are drafted for, spread evenly: one in each of `num_anchors` equal parts of a row.

        Args:
            first: [batch, 1] int64, first position of a root; at least 1, because masks follow the token before it.
            length: [batch, 1] int64, tokens of the row; the last one is no root.
            random: draw each within its part, or take its first position.

        Returns:
            [batch, anchors] int64, and which of them exist, bool.
        """
        first = first.clamp(min=1)
        candidates = (length - 1 - first).clamp(min=0)
        order = torch.arange(self.num_anchors, device=first.device)
        # Drawn on the CPU, so that the anchors do not depend on the device.
        within = torch.rand(len(first), self.num_anchors).to(first.device) if random else 0.0
        spread = ((order + within) * candidates / self.num_anchors).long().clamp(max=(candidates - 1).clamp(min=0))
        valid = order < candidates
        return torch.where(valid, first + torch.where(candidates > self.num_anchors, spread, order), 0), valid

    def run(self, model: nn.Module, input_ids: Tensor, anchors: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """The target's last hidden states: of the rows, and of masks [batch, anchors, masks, hidden].

        Args:
            model: the drafter, or its wrapper in a distributed run.
            input_ids: [batch, seq] int64.
            anchors: [batch, anchors] int64; masks see the tokens before their anchor.
            at: [batch, anchors, masks] int64, positions of the masks.
        """
        target, decoder = self.target, decoder_of(self.target.model)[0]
        cache = TreeCache(target.num_layers, cache_layers(target.model))
        arguments = {target.cache_name: cache, "use_cache": True}
        with torch.no_grad():
            rows = decoder(input_ids=input_ids, **arguments).last_hidden_state
        masks = {
            kind: additive(self._sees(anchors, at, input_ids.shape[1], limits), target.dtype)
            for kind, limits in target.ranges.items()
        }
        positions = at.flatten(1)
        slots = torch.arange(self.num_masks, device=at.device).expand_as(at).flatten(1)

        def forward() -> Tensor:
            states: Tensor = decoder(
                input_ids=torch.zeros_like(positions),
                attention_mask=target.masks_for_host(masks),
                position_ids=positions,
                **arguments,
            ).last_hidden_state
            return states

        hidden = model(target.model, forward, slots)
        return rows.to(input_ids.device), hidden.to(input_ids.device).unflatten(1, at.shape[1:])

    def _sees(self, anchors: Tensor, at: Tensor, seq: int, limits: AttentionRange) -> Tensor:
        """[batch, all masks, seq + all masks] bool: the tokens before the own anchor, and masks up to the own one."""
        own, entries = at.flatten(1), torch.arange(seq, device=at.device)
        keys = torch.cat([entries.expand(len(at), -1), own], 1).unsqueeze(1)  # positions
        root = anchors.repeat_interleave(self.num_masks, 1)
        block = torch.arange(own.shape[1], device=at.device) // self.num_masks
        own, root = own.unsqueeze(-1), root.unsqueeze(-1)
        same = (block.unsqueeze(-1) == block).expand(len(at), -1, -1) & (keys[..., seq:] <= own)
        sees = torch.cat([entries < root, same], -1)
        if limits.window is not None:
            sees &= own - keys < limits.window
        if limits.chunk is not None:
            sees &= own // limits.chunk == keys // limits.chunk
        return sees

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """[positions, rank] of the Markov head, rank 0 without one."""
        head = self.drafter.markov_head
        return head.embed(token_ids) if head is not None else self.drafter.masks.new_empty(len(token_ids), 0)

    def _draft_head(self, head_input: Tensor, width: int) -> Tensor:
        logits, head = self.reader.head(head_input[:, :width]), self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(head_input[:, width:]).to(logits)


@torch.no_grad()
def projections_of(model: PreTrainedModel) -> dict[str, list[int]]:
    """Input and output size of the linear layers of all decoder layers that run once on every position, by name.

    That excludes the experts of a mixture and their routers. Names are as in `GatedLoraConfig`.
    """
    decoder, layers = decoder_of(model)
    inside = {id(module) for module in layers.modules()}
    calls: dict[str, list[bool]] = {}
    ids = torch.arange(1, 7, device=home_of(model.get_input_embeddings())).view(2, 3) % num_tokens(model)

    def note(name: str, sizes: tuple[int, int], module: nn.Module, args: Any, output: Any) -> None:
        is_whole = bool(args) and args[0].shape == (*ids.shape, sizes[0]) and output.shape == (*ids.shape, sizes[1])
        calls.setdefault(name, []).append(is_whole)

    found = {
        name: sizes
        for name, module in model.named_modules()
        if id(module) in inside and (sizes := _sizes(module)) is not None
    }
    with ExitStack() as hooks:
        for name, sizes in found.items():
            hook = functools.partial(note, name, sizes)
            hooks.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        decoder(input_ids=ids, use_cache=False)
    # In PEFT's wrappers there are further linear layers.
    whole = {name: list(found[name]) for name, called in calls.items() if called == [True]}
    whole = {name: sizes for name, sizes in whole.items() if not any(_is_within(name, other) for other in whole)}
    if not whole:
        raise ValueError(f"Target {name_of(model)!r} has no linear layers that run on every position.")
    prefix = next(name for name, module in model.named_modules() if module is layers)
    number = re.compile(rf"{re.escape(prefix)}\.\d+\.")
    patterns: dict[str, list[str]] = {}
    for name in whole:
        patterns.setdefault(number.sub(f"{prefix}.*.", name), []).append(name)
    named: dict[str, list[int]] = {}
    for pattern, names in patterns.items():
        alike = len(names) == len(layers) and all(whole[name] == whole[names[0]] for name in names)
        named |= {pattern: whole[names[0]]} if alike else {name: whole[name] for name in names}
    return named


def _is_within(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


@torch.no_grad()
def new_drafter(
    target: PreTrainedModel, *, num_masks: int = 4, lora_rank: int = 8, markov_rank: int = 0
) -> GatedLoraDrafter:
    """A drafter for a target: updates of zero, and masks with the mean embedding of the target's tokens.

    Args:
        target: the model to draft for.
        num_masks: see `GatedLoraConfig`.
        lora_rank: see there.
        markov_rank: see there.
    """
    config = target.config.get_text_config(decoder=True)
    drafter = GatedLoraDrafter(
        GatedLoraConfig(
            vocab_size=num_tokens(target),
            hidden_size=config.hidden_size,
            num_target_layers=config.num_hidden_layers,
            num_masks=num_masks,
            lora_rank=lora_rank,
            projections=projections_of(target),
            markov_rank=markov_rank,
            target_name_or_path=target.name_or_path or None,
        )
    )
    drafter.check_target(target)
    embeddings = target.get_input_embeddings()
    some = torch.arange(min(num_tokens(target), 4096), device=home_of(embeddings))
    drafter.masks.add_(embeddings(some).float().mean(0).to(drafter.masks.device))
    return drafter


@dataclass(kw_only=True)
class GatedLoraTrainOptions(TrainOptions):
    """Options of the training command for gated LoRA."""

    masks: Count = HfArg(default=4, help="masks behind a token; as many tokens are drafted")
    lora_rank: Count = HfArg(default=8, help="of the updates")
    markov_rank: int = HfArg(default=16, help="width of the head that reads the token before a draft; 0: none")
    anchors: Count = HfArg(default=64, help="tokens per row and step behind which masks run")
    loss: LossName = HfArg(default="kl", help="ce with the tokens of the rows; the others with the target's probs")


def _prepare(
    options: GatedLoraTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[GatedLoraDrafter, GatedLoraStep]:
    drafter = new_drafter(target, num_masks=options.masks, lora_rank=options.lora_rank, markov_rank=options.markov_rank)
    step = GatedLoraStep(drafter, target, num_anchors=options.anchors, loss=options.loss)
    return drafter, step


register(
    "gated_lora",
    GatedLoraDrafter,
    own_files=_adapter_shapes,
    serving=Serving(not_exported="gated LoRA changes how the target runs, which no layout of vLLM describes"),
    replays=ReplayGenerator,
)
register_recipe(Recipe("gated_lora", GatedLoraTrainOptions, _prepare))

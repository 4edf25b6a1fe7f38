"""Medusa: small heads on the target's last hidden state, one for each of the next tokens, independent of each other.

The drafter has no cache, no positions and no embeddings: it stores each row's last target state and runs the heads on
it once per round. The tree is built by a marginal method (`ddtree`: the likeliest paths of this round), or is the
paper's static tree with the same shape in every round. Source: Medusa, arXiv 2401.10774, Sections 2.1, 2.1.2 (tree
attention) and 2.3.3 (optimised tree construction); FasterDecoding/Medusa.

Training is Medusa-1: heads on the frozen target's last state. The loss is by default the cross entropy with the tokens
that the target wrote, of head k, from 1, with weight 0.8^k: later tokens are less certain. The blocks start at zero and
the heads' matrices as the target's own, so that training begins with the target's prediction of the next token. Source:
Section 2.2.1. Medusa-2, which trains the target too, changes its output and is not trained here.

FasterDecoding publishes a minimal config, and heads in a pickle or in safetensors. Tensors are
`{head}.{layer}.linear.weight` and `.bias`, and `{head}.{layers}.weight`, with or without the prefix `medusa_head.`.
Published configs lack the shape of the heads and give fewer heads than are stored, so the tensors decide. Source:
shared facts on formats, section 6.
"""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.speed.cuda_graphs import static_calls
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import apply_head, num_tokens
from hf_specdec.decoding.targets.taps import decoder_states
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.config import TargetFields
from hf_specdec.drafting.drafter import BlockMarginals, MarginalsGenerator
from hf_specdec.drafting.growth import StaticTree
from hf_specdec.drafting.options import TreeOptions, is_number
from hf_specdec.drafting.reader import LastStates
from hf_specdec.drafting.registry import MARGINAL_METHODS, Serving, register
from hf_specdec.drafting.shapes import check_shapes
from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, Unsupported
from hf_specdec.hub.formats.keys import decoder
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, Positive, TrainOptions
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import RowSource
from hf_specdec.training.step import StepOutput, TrainingStep

__all__ = [
    "HeadsStep", "MedusaConfig", "MedusaDrafter", "MedusaMarginals", "MedusaOptions", "MedusaStep", "new_drafter",
]  # fmt: skip

STATIC_TREE = "static_tree"
MAX_LAYERS = 256  # of all heads together


class MedusaConfig(TargetFields):
    """Shape of Medusa-1 heads.

    Args:
        vocab_size: the target's; None if the heads use the target's head and no file states the size.
        hidden_size: the target's.
        medusa_num_heads: heads; head i, from 0, predicts the token i + 1 positions after the root.
        medusa_num_layers: residual blocks of a head.
        own_head: whether each head has its own output matrix; if not, all use the target's.
    """

    model_type = "hf_specdec_medusa"

    vocab_size: int | None = 32000
    hidden_size: int = 4096
    medusa_num_heads: int = 5
    medusa_num_layers: int = 1
    own_head: bool = True

    def check(self) -> None:
        """Raises ValueError, naming the field, if no heads can be built from this config."""
        self.check_sizes("hidden_size", "medusa_num_heads", *(("vocab_size",) if self.own_head else ()))
        self.check_sizes("medusa_num_layers", least=0)
        if self.medusa_num_heads * self.medusa_num_layers > MAX_LAYERS:
            raise ValueError(
                f"medusa_num_heads is {self.medusa_num_heads} and medusa_num_layers {self.medusa_num_layers}: together "
                f"more than {MAX_LAYERS} layers, the most that can be built."
            )


@dataclass(slots=True, kw_only=True)
class MedusaOptions(TreeOptions):
    """Drafting options of Medusa heads.

    Attributes:
        method: `"ddtree"`, or any other method that drafts from per-position marginals; `"static_tree"` for the paper's
            tree, whose shape is the same in every round.
        tree_budget: see `TreeOptions`. An integer does not affect chains (`"dflash"`), which have one token per head.
        rank_accuracies: [heads][ranks], how often each prediction of each head is correct; the static tree is built
            from them (Section 2.3.3). `hf_specdec.methods.medusa.rank_accuracies` measures them; no published
            checkpoint states them. None: prediction r of head h, both from 0, is assumed to be correct with probability
            0.6 * 0.8^h * 0.4^r, which is neither measured nor from the paper. It changes only the tree, and so the
            speed.
    """

    method: str = "ddtree"
    rank_accuracies: list[list[float]] | None = None

    def validate(self, config: Any = None) -> None:
        """As for every drafter; `config` is a `MedusaConfig`."""
        TreeOptions.validate(self, config)
        self.check_choices(method=[*MARGINAL_METHODS, STATIC_TREE])
        rates = self.rank_accuracies
        if rates is not None and not (
            isinstance(rates, (list, tuple))
            and 1 <= len(rates) <= config.medusa_num_heads
            and all(isinstance(head, (list, tuple)) and len(head) for head in rates)
            and all(is_number(rate) and 0 <= rate <= 1 for head in rates for rate in head)
        ):
            raise ValueError(
                f"rank_accuracies={rates!r} must be a list of shares from 0 to 1 for each of at most "
                f"{config.medusa_num_heads} heads, or None."
            )


ASSUMED_RANKS = 10  # predictions of a head that the static tree considers without measured accuracies


class MedusaBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return states + nn.functional.silu(self.linear(states))


class MedusaHead(nn.Module):
    """Residual blocks and, unless the target's head is used, a matrix to the vocabulary."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MedusaBlock(config.hidden_size) for _ in range(config.medusa_num_layers)))
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size or 0, bias=False)

    def forward(self, states: Tensor, target_head: nn.Module | None) -> Tensor:
        """[..., hidden] -> [..., vocab] float32; the target's head is for heads without a matrix of their own."""
        head: Any = getattr(self, "lm_head", target_head)
        return apply_head(head, self.blocks(states))


class MedusaDrafter(PretrainedDrafter):
    """Medusa-1 heads as a drafter: the target is unchanged, each head predicts one position.

    Drafting options: `MedusaOptions`.

    Relation to its siblings: like `dflash` it predicts all positions at once, but from a single target state and
    without the root as input, the token that the target has just chosen. Its marginals are therefore flatter.
    """

    config_class = MedusaConfig
    config: MedusaConfig
    options_class = MedusaOptions
    options: MedusaOptions
    _no_split_modules: ClassVar = ["MedusaHead"]
    card_summary = (
        "Medusa heads: each predicts one of the next tokens from the target's last hidden state. "
        "hf_specdec drafts with them the tree of the likeliest combinations."
    )

    def __init__(self, config: MedusaConfig) -> None:
        config.check()
        super().__init__(config)
        self.heads = nn.ModuleList([MedusaHead(config) for _ in range(config.medusa_num_heads)])
        self.post_init()

    def forward(self, states: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """The logits of all heads.

        Args:
            states: [batch, hidden], the target's last hidden state after its final norm, at the last token it has read.
            lm_head: the target's head, for heads without their own matrix.

        Returns:
            [batch, heads, vocab] float32 logits. The target's own head predicts the next token, the root; head i, from
            0, predicts the token i + 1 positions after the root.
        """
        return torch.stack([head(states, lm_head) for head in self.heads], dim=1)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return (model.config.get_text_config(decoder=True).num_hidden_layers,)  # after the final norm

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(MARGINAL_METHODS)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        if self.method == STATIC_TREE:
            heads = range(self.config.medusa_num_heads)
            ranks = range(min(ASSUMED_RANKS, num_tokens(target.model)))
            assumed = [[0.6 * 0.8**head * 0.4**rank for rank in ranks] for head in heads]
            shape = StaticTree(self.options.rank_accuracies or assumed, self.options.node_limit, self.device)
            return StaticTreeGenerator(MedusaMarginals(self, target), shape)
        return MARGINAL_METHODS[self.method](MedusaMarginals(self, target), self.options)

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": f"{self.loaded_options().method}, on Medusa heads",
            "Heads": f"{config.medusa_num_heads}, each of {config.medusa_num_layers} layers",
            "Hidden size": str(config.hidden_size),
            "Vocabulary": "the target's" if config.vocab_size is None else str(config.vocab_size),
        }

    def check_target(self, model: PreTrainedModel) -> None:
        check_shapes(
            self, model, hidden_size=self.config.hidden_size, vocab_size=self.config.vocab_size, may_exceed=True
        )


@torch.no_grad()
def rank_accuracies(drafter: MedusaDrafter, model: PreTrainedModel, input_ids: Tensor, ranks: int = 10) -> Tensor:
    """How often each prediction of each head is correct, for `drafter.options.rank_accuracies = ....tolist()`.

    Args:
        drafter: the heads.
        model: their target.
        input_ids: [batch, seq] int64 without padding; longer than there are heads. Text written by the target is best.
        ranks: predictions of each head to measure.

    Returns:
        [heads, ranks] float32, shares of the positions. Medusa, arXiv 2401.10774, Section 2.3.3.
    """
    states = decoder_states(model, input_ids).to(device=drafter.device, dtype=drafter.dtype)
    batch, seq, hidden = states.shape
    logits = drafter(states.reshape(-1, hidden), model.get_output_embeddings()).unflatten(0, (batch, seq))
    found = []
    for head in range(drafter.config.medusa_num_heads):
        ahead = head + 2  # the target's own head predicts the next token
        predicted = logits[:, : seq - ahead, head].topk(ranks, dim=-1).indices
        correct = predicted == input_ids[:, ahead:].unsqueeze(-1).to(predicted.device)
        found.append(correct.float().mean((0, 1)))
    return torch.stack(found)


class MedusaMarginals(LastStates, BlockMarginals):
    """Per-position logits of all heads, from the target's state at the last token before the root."""

    def __init__(self, drafter: MedusaDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.lm_head = target.model.get_output_embeddings()
        self.calls = static_calls(self, drafter, (self.lm_head,), drafter.options.compile_mode)
        self.drafts_early = self.calls is not None

    @in_inference_mode
    def marginals(self, context: DraftContext) -> Tensor:
        states = self.last_states.to(device=self.drafter.device, dtype=self.drafter.dtype)
        if self.calls is None:
            return self.drafter(states, self.lm_head)
        return self.calls("heads", _guesses, states)[0]


def _guesses(source: MedusaMarginals, states: Tensor) -> tuple[Tensor]:
    return (source.drafter(states, source.lm_head),)


class StaticTreeGenerator(MarginalsGenerator):
    """Fills a tree of fixed shape with the heads' predictions: node (i1, ..., ik) gets prediction number ik of head k.

    Args:
        source: computes the predictions of each round.
        shape: whose accuracies are of heads and their predictions.
    """

    def __init__(self, source: MedusaMarginals, shape: StaticTree) -> None:
        super().__init__(source)
        self.shape = shape

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        best, token_ids = logits.topk(self.shape.num_ranks, dim=-1)
        drafted = token_ids[:, self.shape.levels, self.shape.ranks]
        return self.shape.filled(
            torch.cat([context.root_ids.to(logits.device).unsqueeze(1), drafted], dim=1),
            finite=best[..., 0].isfinite().all(-1),
        )


class HeadsStep(TrainingStep):
    """Loss of one batch of rows for heads of which each predicts one of the next tokens: summed over the heads.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        heads: number of them; head i, from 0, predicts the token i + 2 positions after the state that it reads.
        decay: weight of each head relative to the previous one, and of the first.
        loss: "ce" with the tokens that the target wrote, or another one of `position_losses`.

    Raises:
        ValueError: the drafter does not fit the target, or `decay` is out of range.
    """

    def __init__(
        self, drafter: Any, target: PreTrainedModel, heads: int, *, decay: float = 1.0, loss: LossName = "ce"
    ) -> None:
        super().__init__(drafter, target, loss)
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay!r} must be above 0 and at most 1.")
        self.heads, self.decay = heads, decay

    @abstractmethod
    def logits(self, model: nn.Module, states: Tensor, used: Tensor) -> Iterable[Tensor]:
        """The logits of each head, [positions, vocab].

        Args:
            model: the drafter, or its wrapper in a distributed run.
            states: [batch, seq, hidden], in the dtype of the drafter.
            used: [batch, seq] bool, the positions whose logits are wanted.
        """

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        read, input_ids = self.reader.of_batch(batch), batch["input_ids"]
        width = input_ids.shape[1]
        roots = torch.arange(1, width + 1, device=input_ids.device)  # after the state at each position
        following = roots.unsqueeze(1) + 1 + torch.arange(self.heads, device=input_ids.device)  # [seq, heads]
        labels = input_ids[:, following.clamp(max=width - 1)]
        # A token that the target wrote after a root that it wrote.
        starts = (roots >= batch["first_anchor"].unsqueeze(1)).unsqueeze(-1)
        labelled = starts & (following < batch["length"][:, None, None])
        used = labelled.any(-1)
        losses, correct = [], torch.zeros_like(labelled)
        states = read.features.to(next(model.parameters()).dtype)
        for head, logits in enumerate(self.logits(model, states, used)):
            chosen, seen, target_logits = labels[..., head][used], labelled[..., head][used], None
            if read.last_hidden is not None:  # the target predicts a token at the position before it
                with torch.no_grad():
                    before = (following[:, head] - 1).clamp(max=width - 1)
                    target_logits = self.reader.head(read.last_hidden[:, before][used])
            values = position_losses(self.loss, logits, target_logits, chosen)
            losses.append(self.decay ** (head + 1) * (values * seen).sum() / seen.sum().clamp(min=1))
            correct[..., head][used] = (logits.detach().argmax(-1) == chosen) & seen
        return StepOutput(torch.stack(losses).sum(), correct, labelled)


class MedusaStep(HeadsStep):
    """Loss of one batch of rows for a `MedusaDrafter`; `decay` is 0.8 in the paper."""

    def __init__(
        self, drafter: MedusaDrafter, target: PreTrainedModel, *, decay: float = 0.8, loss: LossName = "ce"
    ) -> None:
        super().__init__(drafter, target, drafter.config.medusa_num_heads, decay=decay, loss=loss)

    def logits(self, model: nn.Module, states: Tensor, used: Tensor) -> Iterable[Tensor]:
        logits: Tensor = model(states[used], self.reader.lm_head)  # [positions, heads, vocab]
        return logits.unbind(1)


@torch.no_grad()
def new_drafter(
    target: PreTrainedModel, *, num_heads: int = 5, num_layers: int = 1, own_head: bool = True
) -> MedusaDrafter:
    """Heads for a target that begin with the target's prediction of the next token.

    Args:
        target: the model to draft for.
        num_heads: of the drafter.
        num_layers: residual blocks of each.
        own_head: whether each head has its own output matrix, a copy of the target's; if not, all use the target's.
    """
    config = target.config.get_text_config(decoder=True)
    drafter = MedusaDrafter(
        MedusaConfig(
            vocab_size=num_tokens(target),
            hidden_size=config.hidden_size,
            medusa_num_heads=num_heads,
            medusa_num_layers=num_layers,
            own_head=own_head,
            target_name_or_path=target.name_or_path or None,
        )
    )
    head: Any
    for head in drafter.heads:
        for block in head.blocks:
            block.linear.weight.zero_()
            block.linear.bias.zero_()
        if own_head:
            output: Any = target.get_output_embeddings()
            head.lm_head.weight.copy_(output.weight)
    return drafter


@dataclass(kw_only=True)
class MedusaTrainOptions(TrainOptions):
    """Options of the training command for Medusa."""

    heads: Count = HfArg(default=5, help="heads, one for each of the tokens after the next")
    head_layers: Count = HfArg(default=1, help="residual blocks of a head")
    share_head: bool = HfArg(default=False, help="all heads use the target's output matrix, instead of copies of it")
    decay: Positive = HfArg(default=0.8, help="weight of each head relative to the previous one")
    loss: LossName = HfArg(default="ce", help="ce with the tokens of the rows; the others with the target's probs")


def _prepare(
    options: MedusaTrainOptions, target: PreTrainedModel, source: RowSource
) -> tuple[MedusaDrafter, MedusaStep]:
    drafter = new_drafter(
        target, num_heads=options.heads, num_layers=options.head_layers, own_head=not options.share_head
    )
    return drafter, MedusaStep(drafter, target, decay=options.decay, loss=options.loss)


_NAME = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")


def read_layout(fields: Config, stored: Headers | None) -> Reading | None:
    """Converts fields and tensor names of Medusa-1 heads; None before the headers of the weights are known."""
    if stored is None:
        return None  # the config has neither the hidden size nor the vocabulary size, and a wrong number of heads
    own_model = any(name.startswith("model.") for name in stored)
    if own_model:
        warnings.warn(
            "The weights hold a whole language model and Medusa heads that were trained with it (Medusa-2). The heads "
            "are loaded; they fit only that model, so load the target from the same checkpoint: "
            "AutoModelForCausalLM.from_pretrained(...), which leaves the heads out.",
            stacklevel=2,
        )
        stored = {name: tensor for name, tensor in stored.items() if name.startswith("medusa_head.")}
    names: dict[str, str] = {}
    heads: set[int] = set()
    layers = 0
    hidden_size, vocab_size = fields.get("hidden_size"), fields.get("vocab_size")
    own_head = False
    for name, tensor in stored.items():
        match = _NAME.match(name)
        if match is None:
            names[name] = name
            continue
        head, layer, kind = int(match[1]), int(match[2]), match[3]
        heads.add(head)
        if kind == "weight":
            own_head, (vocab_size, hidden_size) = True, tensor.shape
            names[name] = f"heads.{head}.lm_head.weight"
        else:
            layers = max(layers, layer + 1)
            hidden_size = tensor.shape[0]
            names[name] = f"heads.{head}.blocks.{layer}.{kind}"
    if heads != set(range(len(heads))) or layers > len(stored):
        raise ValueError(f"The stored heads have the numbers {sorted(heads)[:8]}, with gaps: the file is incomplete.")
    ours = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": layers,
        "own_head": own_head,
        # The base of Medusa-2 is the model that was trained further, not the target.
        "target_name_or_path": None if own_model else fields.get("base_model_name_or_path"),
    }
    return Reading(ours, names)


MEDUSA = Format(
    "Medusa",
    "medusa",
    read_layout,
    # Medusa-2 has the config of a decoder.
    decoder("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers"),
    other_weights=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    recognises=lambda config: "medusa_num_heads" in config,
    recognises_names=lambda names: any(re.match(r"medusa_head\.|\d+\.0\.linear\.weight$", name) for name in names),
)
OF_VLLM = Unsupported(
    "Medusa (vLLM)",
    "a reader for vLLM's names of Medusa heads",
    lambda config: str(config.get("model_type")).endswith("medusa"),
)


register(
    "medusa",
    MedusaDrafter,
    layouts=(MEDUSA,),
    not_read=(OF_VLLM,),
    serving=Serving(
        "medusa",
        "vLLM serves Medusa heads in their published layout (method medusa in --speculative-config)",
        tokens=lambda drafter: drafter.config.medusa_num_heads,
        needs_export=lambda drafter, config: False,
    ),
)
register_recipe(Recipe("medusa", MedusaTrainOptions, _prepare))

"""A target with a known continuation and a drafter with a chosen acceptance rate, to measure speed without training.

Time per round depends on shapes, not on the text. A target of any shape gets random weights with which the token after
t is t + 1; the margin is larger than any rounding error. The drafter drafts these tokens, and a wrong token at each
depth with a chosen probability. This gives real tokens per second at a chosen mean acceptance length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter, dflash_layer_ids
from hf_specdec.methods.eagle3.network import Eagle3Config, Eagle3Drafter

from .reference import HostTree

# The output projections of attention, recurrent mixers and MLPs.
WRITERS = ("o_proj", "out_proj", "down_proj", "output_linear")
WRONG = 5  # distance of a wrong draft from the right token; alternatives have larger distances


def shapes() -> dict[str, Any]:
    """Configs by name: two published 8B shapes, and a small shape for dry runs."""
    return {
        "qwen3-8b": Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
        ),
        "llama-3.1-8b": LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=False,
        ),
        "tiny": Qwen3Config(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
        ),
    }  # fmt: skip


def draft_shape(shape: str) -> Any:
    """The config of a draft model for a target of `shape` in stock assisted generation: the family's small model."""
    own = shapes()[shape]
    hidden, layers, heads = {
        "qwen3-8b": (1024, 28, 16), "llama-3.1-8b": (2048, 16, 32), "tiny": (64, 2, 4),
    }[shape]  # fmt: skip
    return type(own)(
        vocab_size=own.vocab_size, hidden_size=hidden, intermediate_size=3 * hidden if hidden < 2048 else 4 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=min(8, heads),
        head_dim=2048 // heads if hidden > 64 else 16, max_position_embeddings=own.max_position_embeddings,
        tie_word_embeddings=False,
    )  # fmt: skip


def counting_target(
    shape: str | PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    error_rate: float = 0.0,
) -> PreTrainedModel:
    """A model that counts: token t is followed by t + 1, the last token of the vocabulary by 0.

    Args:
        shape: a name from `shapes`, or a config.
        device: of the weights.
        dtype: of the weights.
        seed: of the weights and errors.
        error_rate: share of tokens, drawn at random, that are followed by a wrong token: for draft models.
    """
    torch.manual_seed(seed)
    config = shapes()[shape] if isinstance(shape, str) else shape
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        table = model.get_input_embeddings().weight.normal_()
        # The outputs of layers stay small compared with the embedding, so that the head still finds the next token.
        layers: Any = decoder_layers(model)
        for layer in layers:
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] in WRITERS:
                    module.weight.mul_(0.01)
        head = model.get_output_embeddings().weight
        head.copy_(table.roll(1, 0))
        wrong = torch.rand(len(table), device=head.device) < error_rate
        if int(wrong.sum()) > 1:  # permutes the successors of these tokens
            successors = wrong.roll(1).nonzero().squeeze(1)
            head[successors] = head[successors.roll(1)]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def network_shape(target: PreTrainedModel, *, layers: int = 5, block_size: int = 16) -> DFlashConfig:
    """Config of a DFlash network for this target."""
    own = target.config
    taps = dflash_layer_ids(layers, own.num_hidden_layers)
    return DFlashConfig(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads, head_dim=own.head_dim, num_target_layers=own.num_hidden_layers,
        max_position_embeddings=own.max_position_embeddings, block_size=block_size,
        dflash_config={"mask_token_id": 1, "target_layer_ids": sorted(set(taps))},
    )  # fmt: skip


def dflash_network(target: PreTrainedModel, *, layers: int = 5, block_size: int = 16) -> DFlashDrafter:
    """A DFlash network with random weights for this target: it has the cost of drafting, but useless drafts."""
    config = network_shape(target, layers=layers, block_size=block_size)
    with torch.device(target.device):
        return DFlashDrafter(config).to(target.dtype).eval()


def eagle3_network(target: PreTrainedModel) -> Eagle3Drafter:
    """An EAGLE-3 network with random weights for this target: one layer of its shape, a head of up to 32,000 tokens."""
    own = target.config.get_text_config(decoder=True)
    vocab = target.get_input_embeddings().num_embeddings
    config = Eagle3Config(
        vocab_size=vocab, draft_vocab_size=min(vocab, 32_000), hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size, num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads, max_position_embeddings=own.max_position_embeddings,
    )  # fmt: skip
    with torch.device(target.device):
        return Eagle3Drafter(config).to(target.dtype).eval()


NETWORKS: dict[str, Callable[[PreTrainedModel], Any]] = {"dflash": dflash_network, "eagle3": eagle3_network}


def rate_for(mean_acceptance_length: float, depth: int) -> float:
    """The acceptance probability per depth that gives this mean acceptance length on a path of `depth` nodes.

    Examples:
        >>> round(rate_for(3.0, depth=2), 3)
        1.0
        >>> 0.8 < rate_for(6.5, depth=15) < 0.9
        True
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        mean = 1 + sum(middle**level for level in range(1, depth + 1))
        low, high = (middle, high) if mean < mean_acceptance_length else (low, middle)
    return high


@dataclass(slots=True, kw_only=True)
class ScriptedOptions(DrafterOptions):
    """Options of a `ScriptedDrafter`.

    Attributes:
        tree_budget: drafted nodes: one path first, then siblings of its nodes.
        depth: of the path.
        rate: probability that the path is right at a depth, if it is right at all smaller depths.
        seed: of the errors.
    """

    method = "scripted"
    tree_budget: int = 64
    depth: int = 15
    rate: float = 0.87
    seed: int = 0

    def validate(self, config: Any = None) -> None:
        DrafterOptions.validate(self, config)
        for name in ("tree_budget", "depth"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")


class ScriptedDrafter(Drafter):
    """Drafts a path that is right at each depth with a chosen probability, and wrong siblings of its nodes.

    Args:
        network: a drafter that runs in each round for its cost; its drafts are discarded.
        drafting_options: see `ScriptedOptions`.
    """

    options_class = ScriptedOptions
    options: ScriptedOptions

    def __init__(self, network: Drafter | None = None, **drafting_options: Any) -> None:
        self.network = network
        self.options = ScriptedOptions()
        self.set_options(**drafting_options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Accepts any target; the drafts are right for a `counting_target` only."""

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return () if self.network is None else self.network.feature_layers(model)

    def script(self, vocab: int) -> Callable[[int], HostTree]:
        """A function from a root's token to the next tree of one row: tokens and parents as lists, root first."""
        generator = ScriptedGenerator(self.options, vocab, None)

        def draft(root: int) -> HostTree:
            tree = generator.tree_below(torch.tensor([root]))
            return tree.token_ids[0].tolist(), tree.parents[0].tolist()

        return draft

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        inner = None if self.network is None else self.network.candidate_generator(target)
        vocab = target.model.get_input_embeddings().num_embeddings
        return ScriptedGenerator(self.options, vocab, inner)


class ScriptedGenerator(TreeCandidateGenerator):
    """One call of a `ScriptedDrafter`; trees are made on the device, without synchronisation."""

    def __init__(self, options: ScriptedOptions, vocab: int, inner: TreeCandidateGenerator | None) -> None:
        self.budget, self.depth = options.tree_budget, min(options.depth, options.tree_budget)
        self.rate, self.vocab = options.rate, vocab
        self.random = random.Random(options.seed)
        self.inner = inner
        self.drops_rows = inner is None or inner.drops_rows
        self.drafts_early = inner is None or inner.drafts_early
        self.template: DraftTree | None = None
        self.tokens: Tensor  # [depth + 1, nodes] int64: offsets from the root's token, by number of right path nodes

    def draft(self, context: DraftContext) -> DraftTree:
        if self.inner is not None:
            self.inner.draft(context)
        return self.tree_below(context.root_ids)

    def tree_below(self, root_ids: Tensor) -> DraftTree:
        """The next tree, below [batch] int64 roots."""
        batch = root_ids.shape[0]
        if self.template is None or len(self.template.token_ids) != batch:
            self._prepare(batch, root_ids.device)
        assert self.template is not None
        right = from_host([self._draw() for _ in range(batch)], root_ids.device)
        token_ids = (root_ids.unsqueeze(1) + self.tokens[right]) % self.vocab
        return replace(self.template, token_ids=token_ids)

    def _draw(self) -> int:
        right = 0
        while right < self.depth and self.random.random() < self.rate:
            right += 1
        return right

    def _prepare(self, batch: int, device: torch.device) -> None:
        """Builds the tree of path and siblings, and `self.tokens`."""
        parents, offsets = [-1, *range(self.depth)], list(range(self.depth + 1))
        rounds = 0
        while len(parents) <= self.budget:
            rounds += 1
            parents += range(min(self.depth, self.budget + 1 - len(parents)))
            offsets += [above + 1 + WRONG + rounds for above in parents[len(offsets) :]]
        rows = [
            [offset + (WRONG if right < node <= self.depth else 0) for node, offset in enumerate(offsets)]
            for right in range(self.depth + 1)
        ]
        self.tokens = torch.tensor(rows, device=device)
        self.template = DraftTree.from_parents(
            torch.tensor([offsets] * batch, device=device), torch.tensor([parents] * batch, device=device), self.depth
        )

    def observe(self, committed: Committed) -> None:
        if self.inner is not None:
            self.inner.observe(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.inner is not None:
            self.inner.keep_rows(rows)
        self.template = None

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

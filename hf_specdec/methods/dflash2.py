"""DFlash 2: DFlash with convolutions over the slots of its block, and a selector conditioned on the previous token.

Each sublayer of a draft layer is between two causal convolutions over the block, whose kernels depend on the slot. The
selector then rescores each slot's likeliest tokens, conditioned on the token drafted before. The config is DFlash's, in
z-lab's layout, with more fields; a `generate` call is DSpark's (`dspark.py`). Source: shared facts on formats of 2026,
sections 1.1 to 1.3; z-lab/dflash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from hf_specdec.decoding.targets.modules import apply_head, table_rows
from hf_specdec.drafting.draft_logits import SoftCapLogitsProcessor, TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import Slots
from hf_specdec.drafting.registry import register
from hf_specdec.drafting.vocabulary import known_ids
from hf_specdec.hub.formats.dflash2 import DFLASH2
from hf_specdec.hub.formats.speculators import SPECULATORS_DFLASH2
from hf_specdec.methods.dflash import BLOCK_SERVING, DFlashConfig, DFlashLayer, block_field
from hf_specdec.methods.dspark import ConditionalDrafter, DSparkOptions

__all__ = ["DFlash2Config", "DFlash2Drafter", "DFlash2Options"]

TREE, CHAIN = "dflash2", "dflash2_chain"


@strict
class DFlash2Config(DFlashConfig):
    """A `DFlashConfig` whose `dflash_config` has DFlash 2's own fields.

    `conv_kernel_size` (slots that a convolution reads) and `conv_group_size` (channels that share a kernel's dynamic
    part), `selector_rank` and `selector_top_k` (width of the selector, and candidates of a slot), `output_multiplier`
    (of the head's logits, before their cap) and `input_embedding_scale` (of the block's unscaled embeddings).
    """

    architecture: ClassVar[str | None] = "DFlash2DraftModel"

    def check(self) -> None:
        super().check()
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        self.check_sizes(*sizes, where=" in this DFlash 2 config")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size} in this DFlash 2 config, which does not divide hidden_size "
                f"{self.hidden_size}. Correct the wrong one."
            )
        if self.vocab_size is None or self.maps_vocabulary or self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, draft_vocab_size {self.draft_vocab_size} and selector_top_k "
                f"{self.selector_top_k} in this DFlash 2 config: its selector chooses from the target's complete "
                "vocabulary, whose size vocab_size must state."
            )

    conv_kernel_size = block_field("conv_kernel_size")
    conv_group_size = block_field("conv_group_size")
    selector_rank = block_field("selector_rank")
    selector_top_k = block_field("selector_top_k")
    output_multiplier = block_field("output_multiplier", 1.0)
    input_embedding_scale = block_field("input_embedding_scale", 1.0)


@dataclass(slots=True, kw_only=True)
class DFlash2Options(DSparkOptions):
    """Drafting options of a DFlash 2 drafter.

    Attributes:
        method: `"dflash2"` for the best-first tree, `"dflash2_chain"` for one path, as published; it is sampled in
            calls that sample.
        tree_budget: see `DSparkOptions`.
        block_size: see `DSparkOptions`.
    """

    METHODS = (TREE, CHAIN)

    method: str = TREE


class BlockConvolution(nn.Module):
    """Two causal convolutions over the slots of a block: before a sublayer, and after it.

    Both kernels have a fixed part and one that is computed from the sublayer's input at each slot, per channel group.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.kernel_size, self.group_size = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.kernel_size * groups, bias=False)

    def kernels(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, block, hidden] -> both kernels, each [batch, block, kernel, hidden]."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, -1))
        both = self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)
        return both[:, :, 0], both[:, :, 1]

    def forward(self, hidden: Tensor, kernel: Tensor) -> Tensor:
        """[batch, block, hidden] -> the same; zeros come before the first slot."""
        block = hidden.shape[1]
        padded = nn.functional.pad(hidden, (0, 0, self.kernel_size - 1, 0))
        taps = [padded[:, self.kernel_size - 1 - back :][:, :block] for back in range(self.kernel_size)]
        return (torch.stack(taps, dim=2) * kernel).sum(2)


class DFlash2Layer(DFlashLayer):
    """A DFlash layer whose sublayers are between convolutions over the block; the context is not convolved."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, block: Tensor, context: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, block, hidden] -> [batch, block, hidden]."""
        normed = self.input_layernorm(block)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(self.attention_conv(normed, before), context, *attention_inputs)
        block = block + self.attention_conv(attended, after)
        normed = self.post_attention_layernorm(block)
        before, after = self.mlp_conv.kernels(normed)
        return block + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after)


class CandidateSelector(nn.Module):
    """Scores of a slot's candidates after the previous token, from both tokens' codes and the slot's state."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k: int = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, token_ids: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Scores that are added to the candidates' logits.

        Args:
            token_ids: [batch, nodes] int64, the previous tokens; may include tokens that the table lacks.
            hidden: [batch, hidden], the slot's state.
            candidates: [batch, top_k] int64, of the slot.

        Returns:
            [batch, nodes, top_k].
        """
        before = self.predecessor_codebook[known_ids(token_ids, len(self.predecessor_codebook))]
        code = before * self.hidden_projection(hidden).unsqueeze(1)
        return code @ self.successor_codebook[candidates].transpose(1, 2)


class SelectorSlots(Slots):
    """The slots of one round's block, for use in order."""

    def __init__(self, selector: CandidateSelector, states: Tensor, logits: Tensor) -> None:
        self.selector, self.states, self.logits = selector, states, logits
        self.depth = states.shape[1]
        self.unary, self.candidates = logits.topk(selector.top_k, dim=-1)

    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[batch, nodes] int64 tokens before a slot -> its [batch, nodes, vocab] logits, -inf except at candidates."""
        candidates = self.candidates[:, slot]
        scores = self.selector(token_ids, self.states[:, slot], candidates).float() + self.unary[:, slot, None]
        slot_logits = scores.new_full((*token_ids.shape, self.logits.shape[-1]), -torch.inf)
        return slot_logits.scatter(-1, candidates.unsqueeze(1).expand_as(scores), scores), state


class DFlash2Drafter(ConditionalDrafter):
    """A DFlash 2 checkpoint as a drafter: `method="dflash2"` drafts the best-first tree, `"dflash2_chain"` one path.

    Drafting options: `DFlash2Options`.
    """

    config_class = DFlash2Config
    config: DFlash2Config
    options_class = DFlash2Options
    layer_class = DFlash2Layer
    card_summary = (
        "A DFlash 2 drafter: it fills a block of masked slots in one forward, from the hidden states of the "
        "target, and rescores each slot's likeliest tokens given the token drafted before it. hf_specdec drafts "
        'with it either the likeliest tree (`method="dflash2"`, the default) or one chain '
        '(`method="dflash2_chain"`).'
    )

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):  # initially equal to a DFlash layer
            module.base_kernel.data.zero_()
            module.base_kernel.data[:, 0] = 1
            module.kernel_projection.weight.data.zero_()
        elif isinstance(module, CandidateSelector):
            for codebook in (module.predecessor_codebook, module.successor_codebook):
                codebook.data.normal_(std=self.config.initializer_range)

    def embed(self, block_ids: Tensor, embed_tokens: nn.Module) -> Tensor:
        # The table itself, without the scale or norm of the target's own embedding.
        return table_rows(embed_tokens, block_ids) * self.config.input_embedding_scale

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        raise ValueError(
            f"draft_vocab was given for {type(self).__name__}, whose selector compares tokens of the whole vocabulary: "
            "leave it out."
        )

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        """[..., hidden] after the final norm -> [..., vocab] float32, -inf except at the `selector_top_k` likeliest."""
        logits = apply_head(lm_head, hidden) * self.config.output_multiplier
        logits = SoftCapLogitsProcessor(self.config.final_logit_softcapping)(None, logits)
        logits = TargetVocabularyLogitsProcessor(self.config.vocab_size)(None, logits)
        likeliest = logits.topk(self.config.selector_top_k, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)

    def slots(self, states: Tensor, logits: Tensor, root_ids: Tensor) -> SelectorSlots:
        """See `ConditionalDrafter.slots`."""
        return SelectorSlots(self.candidate_selector, states[:, self.config.first_slot :], logits)

    def card_facts(self) -> dict[str, str]:
        config, facts = self.config, super().card_facts()
        facts["Method"] = f"{self.loaded_options().method}, on a DFlash 2 drafter"
        facts["Selector"] = f"rank {config.selector_rank}, {config.selector_top_k} candidates a slot"
        return facts


register("dflash2", DFlash2Drafter, layouts=(DFLASH2, SPECULATORS_DFLASH2), serving=BLOCK_SERVING)

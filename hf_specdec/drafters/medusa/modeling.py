"""MedusaDrafter: heads on the target's last hidden state, independent of each other.

Source: Medusa, arXiv 2401.10774, Section 2.1; FasterDecoding/Medusa. The drafter has no cache, no positions and no
embeddings; `candidates.py` selects the state that it reads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import apply_head
from hf_specdec.decoding.taps import decoder_states
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.growth import static_tree
from hf_specdec.drafters.medusa.configuration import STATIC_TREE, MedusaConfig, MedusaOptions
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import MARGINAL_METHODS
from hf_specdec.drafters.shapes import check_shapes

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
            self.lm_head = nn.Linear(config.hidden_size, int(config.vocab_size or 0), bias=False)


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
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["MedusaHead"]

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
        logits = []
        for head in self.heads:
            matrix: Any = head.lm_head if self.config.own_head else lm_head
            assert matrix is not None, "heads without their own matrix need the target's"
            blocks: Any = head.blocks
            hidden = blocks(states)
            logits.append(apply_head(matrix, hidden))
        return torch.stack(logits, dim=1)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return (model.config.get_text_config(decoder=True).num_hidden_layers,)  # after the final norm

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(MARGINAL_METHODS)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.medusa.candidates import MedusaMarginals, StaticTreeGenerator

        if self.method == STATIC_TREE:
            heads = range(self.config.medusa_num_heads)
            ranks = range(min(ASSUMED_RANKS, target.model.get_input_embeddings().num_embeddings))
            assumed = [[0.6 * 0.8**head * 0.4**rank for rank in ranks] for head in heads]
            accuracies = self.options.rank_accuracies or assumed
            paths = static_tree(accuracies, self.options.node_limit)
            return StaticTreeGenerator(MedusaMarginals(self, target), paths, accuracies)
        return MARGINAL_METHODS[self.method](MedusaMarginals(self, target), self.options)

    def card_summary(self) -> str:
        return (
            "Medusa heads: each predicts one of the next tokens from the target's last hidden state. "
            "hf_specdec drafts with them the tree of the likeliest combinations."
        )

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": f"{self.loaded_options().method}, on Medusa heads",
            "Heads": f"{config.medusa_num_heads}, each of {config.medusa_num_layers} layers",
            "Hidden size": str(config.hidden_size),
            "Vocabulary": "the target's" if config.vocab_size is None else str(config.vocab_size),
        }

    def check_target(self, model: PreTrainedModel) -> None:
        check_shapes(self, model, hidden_size=self.config.hidden_size, vocab_size=self.config.vocab_size)


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

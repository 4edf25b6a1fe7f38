"""The Medusa-1 training step: heads on the frozen target's last state, each for one of the next tokens.

The loss is by default the cross entropy with the tokens that the target wrote, of head k, from 1, with weight 0.8^k:
later tokens are less certain. The blocks start at zero and the heads' matrices as the target's own, so that training
begins with the target's prediction of the next token.
Source: Medusa, arXiv 2401.10774, Section 2.2.1 (Medusa-1). Medusa-2, which trains the target too, changes its output
and is not trained here. The drafter is in `hf_specdec/methods/medusa.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.methods.medusa import MedusaConfig, MedusaDrafter
from hf_specdec.training.losses import LossName, position_losses
from hf_specdec.training.options import Count, Positive, TrainOptions
from hf_specdec.training.recipe import Recipe, register_recipe
from hf_specdec.training.source import Source
from hf_specdec.training.step import StepOutput, TrainingStep


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
class MedusaOptions(TrainOptions):
    """Options of the training command for Medusa."""

    heads: Count = HfArg(default=5, help="heads, one for each of the tokens after the next")
    head_layers: Count = HfArg(default=1, help="residual blocks of a head")
    share_head: bool = HfArg(default=False, help="all heads use the target's output matrix, instead of copies of it")
    decay: Positive = HfArg(default=0.8, help="weight of each head relative to the previous one")
    loss: LossName = HfArg(default="ce", help="ce with the tokens of the rows; the others with the target's probs")


def _prepare(options: MedusaOptions, target: PreTrainedModel, source: Source) -> tuple[MedusaDrafter, MedusaStep]:
    drafter = new_drafter(
        target, num_heads=options.heads, num_layers=options.head_layers, own_head=not options.share_head
    )
    return drafter, MedusaStep(drafter, target, decay=options.decay, loss=options.loss)


register_recipe(Recipe("medusa", MedusaOptions, _prepare))

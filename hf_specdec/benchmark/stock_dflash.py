"""Stock DFlash: transformers' own DFlash decoding, on shapes and drafts of our choosing.

`generate(assistant_model=..., speculation_type="dflash")` takes any assistant that its DFlash loop can ask.
Transformers has one class of such assistants, published for one target. Here it has the shape of `drafter_network` and
random weights; it is run in each round for what it costs, and its answer is then replaced by scripted drafts, right as
often as those of `ScriptedDrafter`. Importing this module fails where transformers has no such class.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from hf_specdec.benchmark.scripted import WRONG, network_shape
from hf_specdec.decoding.tree import from_host

ARGUMENTS = {"speculation_type": "dflash"}  # for `generate`, besides the assistant


class ScriptedAssistant(MuseGlimmerAssistantModel):
    """An assistant of stock DFlash for a `counting_target`; made by `stock_dflash`."""

    def script(self, target: PreTrainedModel, rate: float, seed: int) -> None:
        """Begins to draft for `target`: right at each depth with probability `rate`, if it was so far."""
        self.random, self.rate, self.depth = random.Random(seed), rate, self.config.block_size - 1
        embeddings = target.get_input_embeddings()
        # Not as a part of this module: they are the target's.
        self.table: list[Tensor] = [embeddings.weight]
        self.asked: Tensor | None = None
        # The last that it embeds before asking for drafts is the root and the slots behind it.
        embeddings.register_forward_pre_hook(lambda module, inputs: setattr(self, "asked", inputs[0]))
        steps = torch.arange(self.depth, device=embeddings.weight.device)
        self.steps = steps + WRONG * (steps >= torch.arange(self.depth + 1, device=steps.device).unsqueeze(1))

    def forward(self, noise_embeds: Tensor, *inputs: Any, **named: Any) -> Any:
        """The network's own answer, its states but the root's exchanged for ones the target's head reads as drafts."""
        outputs = super().forward(noise_embeds, *inputs, **named)
        assert self.asked is not None
        right = 0
        while right < self.depth and self.random.random() < self.rate:
            right += 1
        (table,) = self.table
        steps = self.steps[from_host([right], table.device)]
        # The head finds the successor of the token whose embedding it reads.
        drafts = table[(self.asked[:, :1] + steps) % len(table)]
        outputs.last_hidden_state = torch.cat([outputs.last_hidden_state[:, :1], drafts], dim=1)
        return outputs


def stock_dflash(target: PreTrainedModel, *, rate: float, layers: int = 5, block_size: int = 16) -> ScriptedAssistant:
    """An assistant for this target.

    Args:
        target: a `counting_target`.
        rate: probability that a draft is right at a depth, if those before it were.
        layers: of the network.
        block_size: slots of a block, root included.
    """
    network = network_shape(target, layers=layers, block_size=block_size)
    config = MuseGlimmerAssistantConfig(
        hidden_size=network.hidden_size, intermediate_size=network.intermediate_size, num_hidden_layers=layers,
        num_attention_heads=network.num_attention_heads, num_key_value_heads=network.num_key_value_heads,
        head_dim=network.head_dim, max_position_embeddings=network.max_position_embeddings,
        layer_types=["full_attention"] * layers, block_size=block_size, mask_token_id=network.mask_token_id,
        target_layer_ids=list(network.target_layer_ids), bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(target.device):
        assistant = ScriptedAssistant(config).to(target.dtype).eval()
    assistant.script(target, rate, seed=0)
    return assistant

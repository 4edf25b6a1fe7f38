"""Stock DFlash: the DFlash decoding of transformers with chosen shapes and scripted drafts.

`generate(assistant_model=..., speculation_type="dflash")` accepts any assistant with the interface of its DFlash loop.
Transformers has one such class, published for one target. Here it has the shape of `dflash_network` and random
weights. It runs in each round for its cost; its output is then replaced by scripted drafts with the acceptance rate of
`ScriptedDrafter`. Importing this module raises ImportError if transformers has no such class.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from hf_specdec.decoding.tree import from_host

from .scripted import WRONG, network_shape

ARGUMENTS = {"speculation_type": "dflash"}  # for `generate`, besides the assistant


class ScriptedAssistant(MuseGlimmerAssistantModel):
    """An assistant of stock DFlash for a `counting_target`; made by `stock_dflash`."""

    def script(self, target: PreTrainedModel, rate: float, seed: int) -> None:
        """Sets the target, and the probability `rate` that a draft is right at a depth if all before it are."""
        self.random, self.rate, self.depth = random.Random(seed), rate, self.config.block_size - 1
        embeddings = target.get_input_embeddings()
        # In a list, because the weights belong to the target and must not become parameters of this module.
        self.table: list[Tensor] = [embeddings.weight]
        self.embedded: Tensor | None = None
        # The last input that is embedded before this forward: the root and the mask tokens of the block.
        embeddings.register_forward_pre_hook(lambda module, inputs: setattr(self, "embedded", inputs[0]))
        steps = torch.arange(self.depth, device=embeddings.weight.device)
        self.steps = steps + WRONG * (steps >= torch.arange(self.depth + 1, device=steps.device).unsqueeze(1))

    def forward(self, noise_embeds: Tensor, *inputs: Any, **named: Any) -> Any:
        """Runs the network, and replaces all hidden states but the root's by states whose logits give the drafts."""
        outputs = super().forward(noise_embeds, *inputs, **named)
        assert self.embedded is not None
        right = 0
        while right < self.depth and self.random.random() < self.rate:
            right += 1
        (table,) = self.table
        steps = self.steps[from_host([right], table.device)]
        # From the embedding of token t, the head of a `counting_target` predicts t + 1.
        drafts = table[(self.embedded[:, :1] + steps) % len(table)]
        outputs.last_hidden_state = torch.cat([outputs.last_hidden_state[:, :1], drafts], dim=1)
        return outputs


def stock_dflash(target: PreTrainedModel, *, rate: float, layers: int = 5, block_size: int = 16) -> ScriptedAssistant:
    """A scripted assistant for this target.

    Args:
        target: a `counting_target`.
        rate: probability that a draft is right at a depth, if all before it are.
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

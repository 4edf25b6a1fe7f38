"""Finding the decoder layers of a model, and reading their hidden states with hooks (taps)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the decoder layers of a causal language model, and these layers.

    Raises:
        ValueError: no list of `num_hidden_layers` layers is found in the decoder.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder()  # the model itself, where its decoder has an unusual name, as with Llama 4
    for module in (decoder, model.base_model, *decoder.children()):
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ValueError(
        f"{type(model).__name__} has no list of {count} decoder layers in its decoder, so its hidden states cannot be "
        "tapped. Open an issue that names the model class."
    )


def decoder_states(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The decoder's output after its final norm, for tokens [batch, seq] in one forward: [batch, seq, hidden].

    Raises:
        ValueError: as `decoder_of`.
    """
    states: Tensor = decoder_of(model)[0](input_ids=input_ids, use_cache=False).last_hidden_state
    return states


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model.

    Raises:
        ValueError: as `decoder_of`.
    """
    return decoder_of(model)[1]


def tap_layer(model: PreTrainedModel, index: int, keep: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls `keep` in every forward of `model` with the output of a decoder layer, [batch, seq, hidden].

    Args:
        model: a causal language model.
        index: 0-based. -1: the input of the first layer. The number of layers: the decoder's output after its final
            norm.
        keep: called in the thread that runs the forward.
    """
    decoder, layers = decoder_of(model)

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        keep(output if isinstance(output, Tensor) else output[0])

    if index == -1:
        return layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
    tapped = layers[index] if index < len(layers) else decoder
    return tapped.register_forward_hook(keep_output)

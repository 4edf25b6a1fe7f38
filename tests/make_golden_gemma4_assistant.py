"""Writes tests/data/gemma4_assistant.safetensors: forwards of transformers' own Gemma 4 assistants with random weights.

transformers 5.23 cannot make such a model, so this needs an older one beside the others' environment:

    pip install --no-deps --target older transformers==5.22.0
    PYTHONPATH=older python tests/make_golden_gemma4_assistant.py

The file holds, for a tied head and for one with clusters, a checkpoint in transformers' layout, keys and values as a
target would have them, and what two nodes give at one position: the state for the next step, and the logits.
transformers lets sliding layers see an entry more than their window, so the stored ones are those of the window alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

ENTRIES, WINDOW, TARGET_HIDDEN, NODES = 11, 6, 32, 2
HEADS = {"tied": {}, "clusters": {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}}


@torch.no_grad()
def main() -> None:
    tensors, described = {}, {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    for head, settings in HEADS.items():
        torch.manual_seed(5)
        text = Gemma4TextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_global_key_value_heads=1, global_head_dim=16, attention_k_eq_v=True,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=WINDOW,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, initializer_range=0.3,
        )  # fmt: skip
        config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=TARGET_HIDDEN, **settings)
        config._attn_implementation = text._attn_implementation = "eager"
        model = Gemma4AssistantForCausalLM(config).eval()
        for name, tensor in model.state_dict().items():  # what begins as ones or in order would hide its use
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor)))
            elif tensor.dim() == 1:
                tensor += 0.3 * torch.randn_like(tensor)
        kept = {"sliding_attention": (2, WINDOW, 8), "full_attention": (1, ENTRIES, 16)}
        entries = {kind: torch.randn(2, 1, *shape) for kind, shape in kept.items()}
        inputs = torch.randn(NODES, 1, 2 * TARGET_HIDDEN)
        outputs = model(
            inputs_embeds=inputs,
            position_ids=torch.full((NODES, 1), ENTRIES - 1),
            shared_kv_states={
                kind: tuple(part.expand(NODES, -1, -1, -1) for part in both) for kind, both in entries.items()
            },
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            described[f"{head}.config"] = json.dumps(json.loads((Path(folder) / "config.json").read_text()))
            stored = load_file(Path(folder) / "model.safetensors")
        found = {f"checkpoint.{name}": tensor for name, tensor in stored.items()}
        found |= {
            f"{kind}.{name}": part
            for kind, both in entries.items()
            for name, part in zip(("keys", "values"), both, strict=True)
        }
        found |= {"inputs": inputs[:, 0], "states": outputs.last_hidden_state[:, 0], "logits": outputs.logits[:, 0]}
        tensors |= {f"{head}.{name}": tensor.contiguous() for name, tensor in found.items()}
    file = Path(__file__).parent / "data" / "gemma4_assistant.safetensors"
    save_file(tensors, file, described)
    print(file.name, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

"""METHODS: one row per drafting method, so that shared tests run over all of them. A new method adds a row."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.support import keeps_states
from hf_specdec.decoding.targets.taps import decoder_layers
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.datastore import RestDrafter
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter
from hf_specdec.methods.dflash2 import DFlash2Config, DFlash2Drafter
from hf_specdec.methods.dspark import DSparkConfig, DSparkDrafter
from hf_specdec.methods.eagle import EagleConfig, EagleDrafter
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from hf_specdec.methods.gated_lora import GatedLoraDrafter
from hf_specdec.methods.gated_lora import new_drafter as new_gated_lora
from hf_specdec.methods.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantDrafter, storing_layers
from hf_specdec.methods.lookahead import LookaheadDrafter
from hf_specdec.methods.lookup import NGramDrafter, SuffixDrafter, SuffixIndex
from hf_specdec.methods.medusa import MedusaConfig, MedusaDrafter
from hf_specdec.methods.merged import MergedDrafter
from hf_specdec.methods.mtp import MTPDrafter, MTPLayout
from hf_specdec.methods.parallel_heads import ParallelHeadsConfig, ParallelHeadsDrafter
from hf_specdec.methods.peagle import PEagleDrafter
from hf_specdec.methods.recycling import TokenRecyclingDrafter
from hf_specdec.methods.specblock import SpecBlockConfig, SpecBlockDrafter
from hf_specdec.methods.specbound import SpecBoundConfig, SpecBoundDrafter
from hf_specdec.methods.specbranch import SpecBranchDrafter
from hf_specdec.methods.ssd import SSDDrafter


def make_dflash(target: PreTrainedModel, *, method: str = "dflash", seed: int = 0, **settings: Any) -> DFlashDrafter:
    """A random DFlash drafter that fits `target`; `settings` are fields of its config or drafting options."""
    options = {"tree_budget": settings.pop("tree_budget", 16)}
    config = dflash_config(target, DFlashConfig, **settings)
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config).eval()
    drafter.set_options(method=method, **options)
    return drafter


def dflash_config(target: PreTrainedModel, config_class: type[DFlashConfig], **settings: Any) -> Any:
    """The config of a small drafter that fits `target`."""
    hidden = target.config.hidden_size
    dflash = {"mask_token_id": 1, "target_layer_ids": [0, 2]} | settings.pop("dflash_config", {})
    return config_class(
        **{
            "vocab_size": num_tokens(target),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "num_target_layers": target.config.num_hidden_layers,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "block_size": 5,
            "dflash_config": dflash,
        }
        | settings
    )


def make_ddtree(target: PreTrainedModel, **settings: Any) -> DFlashDrafter:
    """A random DFlash drafter that drafts best-first trees."""
    return make_dflash(target, **{"method": "ddtree", "tree_budget": 9, **settings})


def make_dspark(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> DSparkDrafter:
    """A random DSpark drafter that fits `target` and drafts trees; `settings` as for `make_dflash`."""
    options = {"tree_budget": 9} | {name: settings.pop(name) for name in ("method", "tree_budget") if name in settings}
    heads = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
    settings["dflash_config"] = heads | settings.get("dflash_config", {})
    config = dflash_config(target, DSparkConfig, **settings)
    torch.manual_seed(seed)
    drafter = DSparkDrafter(config).eval()
    drafter.set_options(**options)
    return drafter


def make_dspark_chain(target: PreTrainedModel, **settings: Any) -> DSparkDrafter:
    """The same with a recurrent head, drafting one path; drawn at random where the call samples."""
    heads = {"markov_head_type": "rnn"} | settings.pop("dflash_config", {})
    return make_dspark(target, **{"method": "dspark_chain", "dflash_config": heads, **settings})


def make_dflash2(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> DFlash2Drafter:
    """A random DFlash 2 drafter that fits `target` and drafts trees; `settings` as for `make_dflash`."""
    options = {"tree_budget": 9} | {name: settings.pop(name) for name in ("method", "tree_budget") if name in settings}
    top_k = min(7, num_tokens(target) - 2)
    added = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": top_k}
    settings["dflash_config"] = added | settings.get("dflash_config", {})
    config = dflash_config(target, DFlash2Config, **settings)
    torch.manual_seed(seed)
    drafter = DFlash2Drafter(config).eval()
    for name, parameter in drafter.named_parameters():  # convolutions begin as if they were not there
        if "_conv." in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    drafter.set_options(**options)
    return drafter


def make_dflash2_chain(target: PreTrainedModel, **settings: Any) -> DFlash2Drafter:
    """The same with further factors, drafting one path; drawn at random where the call samples."""
    factors = {"output_multiplier": 0.8, "input_embedding_scale": 1.5} | settings.pop("dflash_config", {})
    defaults = {"method": "dflash2_chain", "final_logit_softcapping": 20.0, "dflash_config": factors}
    return make_dflash2(target, **{**defaults, **settings})


def make_eagle3(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> Eagle3Drafter:
    """A random EAGLE-3 drafter that fits `target` and can draft every other id; `settings` as for `make_dflash`."""
    names = ("depth", "top_k", "tree_budget")
    options = {"depth": 4, "top_k": 3, "tree_budget": 11} | {
        name: settings.pop(name) for name in names if name in settings
    }
    drafter = _of_eagles_kind(Eagle3Drafter, target, seed, settings)
    drafter.set_options(**options)
    return drafter


def make_eagle(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> EagleDrafter:
    """A random EAGLE-2 drafter that fits `target`; `settings` as for `make_dflash`."""
    names = ("depth", "top_k", "tree_budget")
    options = {"depth": 4, "top_k": 3, "tree_budget": 11} | {
        name: settings.pop(name) for name in names if name in settings
    }
    torch.manual_seed(seed)
    drafter = EagleDrafter(EagleConfig(**_llama_shape(target) | settings)).eval()
    drafter.set_options(**options)
    return drafter


def make_peagle(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> PEagleDrafter:
    """A random P-EAGLE drafter, the same way."""
    options = {"tree_budget": 11} | {name: settings.pop(name) for name in ("method", "tree_budget") if name in settings}
    drafter = _of_eagles_kind(PEagleDrafter, target, seed, {"mask_token_id": 5, "num_draft_tokens": 4} | settings)
    torch.nn.init.normal_(drafter.mask_hidden)
    drafter.set_options(**options)
    return drafter


def _llama_shape(target: PreTrainedModel) -> dict[str, Any]:
    """Of a random drafter whose layers are those of Llama."""
    hidden = target.config.hidden_size
    return {
        "vocab_size": num_tokens(target),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }


def _of_eagles_kind(kind: Any, target: PreTrainedModel, seed: int, settings: dict[str, Any]) -> Any:
    shape = _llama_shape(target)
    own = {"draft_vocab_size": shape["vocab_size"] // 2, "target_layer_ids": [0, 2]}
    config = kind.config_class(**shape | own | settings)
    torch.manual_seed(seed)
    drafter = kind(config).eval()
    if config.maps_vocabulary:
        drafter.d2t.copy_(torch.arange(config.draft_vocab_size))
    return drafter


def make_causal_lm(target: PreTrainedModel, *, noise: float = 0.05, seed: int = 0, **options: Any) -> CausalLMDrafter:
    """A copy of `target` with noise on its weights as draft model: right often, and often wrong."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += noise * drawn.to(parameter.device)
    return CausalLMDrafter(model, **{"depth": 3, "tree_budget": 9, "top_k": 3, **options})


def make_causal_lm_chain(target: PreTrainedModel, **settings: Any) -> CausalLMDrafter:
    """The same, drafting one path; drawn at random where the call samples."""
    return make_causal_lm(target, **{"method": "causal_lm_chain", **settings})


def make_mtp(target: PreTrainedModel, *, seed: int = 0, **options: Any) -> MTPDrafter:
    """A layer of the target's kind with random weights, as if it were in the target's checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    base: Any = target.get_decoder()
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None or not hasattr(base, "norm") or "layer_type" in inspect.signature(rotary.forward).parameters:
        pytest.skip("no target of this family has a multi-token-prediction layer")
    layer: Any = decoder_layers(target)
    tensors = {f"layer.{name}": tensor.clone() for name, tensor in layer[-1].state_dict().items()}
    hidden = target.config.hidden_size
    joined = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    norms = {f"{name}.{key}": tensor.clone() for key, tensor in base.norm.state_dict().items() for name in "ehf"}
    tensors |= {"join.weight": joined, **norms}
    layout = MTPLayout("e", "h", "join", "f", ("layer.",), zero_first=True)
    return MTPDrafter(target, layout, tensors, **{"depth": 3, "top_k": 3, "tree_budget": 16, **options})


def make_gemma4_assistant(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> Gemma4AssistantDrafter:
    """A random assistant that reads what `target`, of any family, stores; `settings` as for `make_dflash`."""
    names = ("depth", "top_k", "tree_budget")
    options = {"depth": 3, "top_k": 3, "tree_budget": 9} | {
        name: settings.pop(name) for name in names if name in settings
    }
    cache: Any = DynamicCache(config=target.config.get_text_config(decoder=True))
    with torch.no_grad():
        target(input_ids=torch.tensor([[1, 2]], device=target.device), **{CACHE: cache}, use_cache=True)
    storing = {kind: cache.layers[layer] for kind, layer in storing_layers(target).items()}
    kinds = [kind for kind in ("sliding_attention", "full_attention") if kind in storing]
    if not kinds:
        pytest.skip("no layer of this target stores keys and values")
    keys, global_keys = storing[kinds[0]].keys, storing[kinds[-1]].keys
    config = Gemma4AssistantConfig(
        **{
            "vocab_size": num_tokens(target),
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": len(kinds) + 1,
            "layer_types": [kinds[0], *kinds],
            "num_attention_heads": 2 * keys.shape[1],
            "num_key_value_heads": keys.shape[1],
            "num_global_key_value_heads": global_keys.shape[1],
            "head_dim": keys.shape[-1],
            "global_head_dim": global_keys.shape[-1],
            "sliding_window": getattr(target.config, "sliding_window", None) or 1,
            "backbone_hidden_size": target.config.hidden_size,
            "initializer_range": 0.3,
        }
        | settings
    )
    torch.manual_seed(seed)
    drafter = Gemma4AssistantDrafter(config).eval()
    for layer in drafter.layers:
        layer.layer_scalar.fill_(0.8)
    if drafter.clusters is not None:
        drafter.clusters.token_ordering.copy_(torch.randperm(config.vocab_size))
    drafter.set_options(**options)
    return drafter


def make_ngram(target: PreTrainedModel, **options: Any) -> NGramDrafter:
    """A look-up; a match of one token is enough, so that it finds something in what a random target says."""
    return NGramDrafter(**{"tree_budget": 9, "depth": 4, **options})


def make_suffix(target: PreTrainedModel) -> Drafter:
    """A look-up in the same text and in what earlier calls of the drafter wrote."""
    return SuffixDrafter(tree_budget=16)


def make_rest(target: PreTrainedModel) -> Drafter:
    """A look-up in a text of random tokens, every one of which occurs."""
    vocab, generator = num_tokens(target), torch.Generator().manual_seed(0)
    index = SuffixIndex(4)
    for _ in range(4):
        index.add(torch.randperm(vocab, generator=generator).tolist())
    return RestDrafter(index, tree_budget=9, depth=4)


def make_token_recycling(target: PreTrainedModel, **options: Any) -> Drafter:
    """Candidates of earlier rounds and calls."""
    return TokenRecyclingDrafter(**{"tree_budget": 9, "top_k": 3, **options})


def make_lookahead(target: PreTrainedModel, **options: Any) -> Drafter:
    """N-grams that the target guesses."""
    return LookaheadDrafter(**{"window": 3, "ngram": 3, "guesses": 3, **options})


def make_medusa(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> MedusaDrafter:
    """Random Medusa heads that fit `target`; `settings` as for `make_dflash`."""
    names = ("method", "tree_budget", "rank_accuracies")
    options = {"tree_budget": 9} | {name: settings.pop(name) for name in names if name in settings}
    shape = {
        "vocab_size": num_tokens(target),
        "hidden_size": target.config.hidden_size,
        "medusa_num_heads": 3,
    }
    torch.manual_seed(seed)
    drafter = MedusaDrafter(MedusaConfig(**shape | settings)).eval()
    drafter.set_options(**options)
    return drafter


def make_parallel_heads(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> ParallelHeadsDrafter:
    """Random parallel heads that fit `target`; `settings` as for `make_dflash`."""
    options = {"tree_budget": 9} | {name: settings.pop(name) for name in ("method", "tree_budget") if name in settings}
    shape = _llama_shape(target) | {"num_parallel_heads": 3}
    torch.manual_seed(seed)
    drafter = ParallelHeadsDrafter(ParallelHeadsConfig(**shape | settings)).eval()
    drafter.set_options(**options)
    return drafter


def make_medusa_static(target: PreTrainedModel, **settings: Any) -> MedusaDrafter:
    """The same, drafting the tree of fixed shape."""
    return make_medusa(target, **{"method": "static_tree", "tree_budget": 12, **settings})


def make_specblock(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> SpecBlockDrafter:
    """A random SpecBlock drafter that fits `target`; `settings` are fields of its config or drafting options."""
    names = ("tree_budget", "num_blocks", "branching", "beam_width", "max_starts", "merge_duplicates")
    options = {"tree_budget": 9, "beam_width": 4} | {name: settings.pop(name) for name in names if name in settings}
    hidden, vocab = target.config.hidden_size, num_tokens(target)
    shape = {
        "vocab_size": vocab,
        "draft_vocab_size": vocab - vocab // 4,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "diffspec_draft_token_num": 3,
    }
    torch.manual_seed(seed)
    drafter = SpecBlockDrafter(SpecBlockConfig(**shape | settings)).eval()
    drafter.set_vocabulary(torch.randperm(vocab)[: drafter.config.draft_vocab_size].sort().values)
    drafter.set_options(**options)
    return drafter


def make_specbranch(
    target: PreTrainedModel, *, noise: float = 0.05, seed: int = 0, h_rad: bool = True, **options: Any
) -> SpecBranchDrafter:
    """The same draft model beside the target, with a random H-RAD."""
    model = make_causal_lm(target, noise=noise, seed=seed).model
    defaults = {
        "pauses": False,
        "parallel": True,
        "speed_ratio": 4.0,
        "k_max": 3,
        "min_confidence": 0.05,
        "min_certainty": 0.0,
    }
    torch.manual_seed(seed)
    return SpecBranchDrafter.from_models(model, target, h_rad=h_rad, **(defaults | options))


def make_specbound(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> SpecBoundDrafter:
    """Exit heads on `target` with random updates, low enough a threshold that they draft; `settings` as above."""
    names = ("threshold", "alpha", "w_max", "d_max", "use_exit_layers", "learn_refusals")
    options = {"pauses": False, "threshold": 0.1} | {name: settings.pop(name) for name in names if name in settings}
    depth, vocab = target.config.num_hidden_layers, num_tokens(target)
    shape = {
        "num_target_layers": depth,
        "hidden_size": target.config.hidden_size,
        "vocab_size": vocab,
        "exit_layers": list(range(1, depth)),
        "d_max": depth - 1,
        "lora_rank": 3,
        "w_max": 5,
    }
    torch.manual_seed(seed)
    drafter = SpecBoundDrafter(SpecBoundConfig(**shape | settings)).eval().to(target.dtype)
    for head in drafter.heads.values():
        if drafter.config.head == "lora":
            torch.nn.init.normal_(head.lora_B, std=0.05)
        else:
            head.weight.data.copy_(target.get_output_embeddings().weight[: drafter.config.draft_vocab_size])
    drafter.set_options(**options)
    return drafter


def make_gated_lora(target: PreTrainedModel, *, seed: int = 0, **settings: Any) -> GatedLoraDrafter:
    """Random masks and updates for `target`, with a Markov head; `settings` as for `make_dflash`."""
    if keeps_states(target):
        pytest.skip("masks would change recurrent states")
    names = ("tree_budget", "masked_nodes")
    options = {"tree_budget": 9, "masked_nodes": 3} | {name: settings.pop(name) for name in names if name in settings}
    drafter = new_gated_lora(target, **{"num_masks": 3, "lora_rank": 2, "markov_rank": 4} | settings).eval()
    draw = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.device)
    drafter.set_options(**options)
    return drafter


def make_ssd(target: PreTrainedModel, **options: Any) -> Drafter:
    """A look-up that prepares its next drafts while the target verifies, in every round."""
    return SSDDrafter(make_rest(target), **{"tree_budget": 6, "trial": False, **options})


def make_causal_lm_ssd(target: PreTrainedModel, **options: Any) -> Drafter:
    """The same with a draft model."""
    if keeps_states(target):
        pytest.skip("a draft model with recurrent states cannot be rewound")
    return SSDDrafter(make_causal_lm(target, tree_budget=14), **{"tree_budget": 8, "trial": False, **options})


def make_eagle3_ssd(target: PreTrainedModel, **options: Any) -> Drafter:
    """The same with a drafter that reads the target's states, and its own outputs where these do not exist yet."""
    return SSDDrafter(make_eagle3(target, tree_budget=14), **{"tree_budget": 8, "trial": False, **options})


def make_merged(target: PreTrainedModel) -> Drafter:
    """DDTree with a look-up: features, and none."""
    return MergedDrafter(make_ddtree(target), make_ngram(target))


def make_merged_three(target: PreTrainedModel) -> Drafter:
    """Two that read features of different layers, and one that runs a cache of its own."""
    sources = make_causal_lm(target), make_dspark(target), make_eagle3(target)
    return MergedDrafter(*sources, tree_budget=12)


METHODS: dict[str, Callable[..., Drafter]] = {
    "dflash": make_dflash,
    "ddtree": make_ddtree,
    "dflash2": make_dflash2,
    "dflash2_chain": make_dflash2_chain,
    "dspark": make_dspark,
    "dspark_chain": make_dspark_chain,
    "ngram": make_ngram,
    "suffix": make_suffix,
    "causal_lm_chain": make_causal_lm_chain,
    "causal_lm_tree": make_causal_lm,
    "eagle": make_eagle,
    "eagle3": make_eagle3,
    "gated_lora": make_gated_lora,
    "gemma4_assistant": make_gemma4_assistant,
    "medusa": make_medusa,
    "medusa_static": make_medusa_static,
    "merged": make_merged,
    "merged_three": make_merged_three,
    "mtp": make_mtp,
    "rest": make_rest,
    "token-recycling": make_token_recycling,
    "lookahead": make_lookahead,
    "parallel_heads": make_parallel_heads,
    "peagle": make_peagle,
    "specblock": make_specblock,
    "specbranch": make_specbranch,
    "specbound": make_specbound,
    "ssd": make_ssd,
    "causal_lm_ssd": make_causal_lm_ssd,
    "eagle3_ssd": make_eagle3_ssd,
}
# Those whose drafts do not depend on what calls before, or other rows, were about.
STEADY = [name for name in METHODS if not name.startswith(("merged", "token-recycling", "eagle3_ssd", "gated"))]
# Those that serve any target of the right shape, not one that they were made with.
FREE = [name for name in METHODS if name != "mtp"]

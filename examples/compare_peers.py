"""Compare this library with plain decoding, transformers' own methods and four other libraries.

    pip install flashspec economize openvino-genai llama-cpp-python    # optional: others are left out, with a message
    python examples/compare_peers.py --target T --draft-model D --prompts P.jsonl --drafter examples/smollm2-135m/dflash

Every prompt is decoded by all of them in turn, in one process; ratios are computed per prompt, and medians are
reported. All use the same target and draft model; each drafts with its own default settings. The other libraries cannot
read a draft model of this library with a cut vocabulary, so it gets a row for each other token, which it never drafts.
transformers' own DFlash gets the weights of the first DFlash drafter; its multi-token prediction runs on targets that
have such layers, which the bundled pairs have not.
With `--gguf`, runtimes with kernels of their own read the target from that file, and keep its weights in 4 bits: their
output is not that of the target in floating point, but their speed is what else a user could have. `--json` stores the
figures.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from bundle import inputs_of
from harness import about, quartiles, table_of, write_json
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.benchmark import variants
from hf_specdec.benchmark.prompts import load_prompts
from hf_specdec.decoding.speed.packed import PackedLinears
from hf_specdec.drafting.draft_model import with_whole_vocabulary
from hf_specdec.methods.dflash import DFlashDrafter

# From a prompt [1, seq], new tokens and temperature to the tokens that were written.
Decode: TypeAlias = Callable[[Tensor, int, float], Tensor]
PLAIN = "plain"


def of_transformers(model: Any, **arguments: Any) -> Decode:
    """`generate` of the target with these arguments."""

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, **sampling, **arguments
        )
        return output[0, prompt.shape[1] :]

    return decode


def of_host_dflash(model: Any, drafter: DFlashDrafter) -> Decode:
    """The DFlash of transformers, with the weights of one of ours; it drafts with the target's whole head."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    fields = {name: value for name, value in drafter.config.to_dict().items() if value is not None}
    config = MuseGlimmerAssistantConfig(**fields | drafter.config.dflash_config)
    network = MuseGlimmerAssistantModel(config).to(model.dtype).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = drafter.state_dict()
    weights.pop("d2t", None)  # of the draft vocabulary
    network.load_state_dict({names.get(name, name): weight for name, weight in weights.items()})
    return of_transformers(model, assistant_model=network, speculation_type="dflash")


def of_packed(model: Any) -> Decode:
    """Plain decoding on packed weights, as rounds run here on a CPU: what of a speedup is not drafting."""
    plain = of_transformers(model)

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        packed = PackedLinears([model])
        packed.pack_all()
        with packed:
            return plain(prompt, new_tokens, temperature)

    return decode


def of_drafter(model: Any, variant: variants.Variant) -> Decode:
    """One of this library's methods."""

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        variant.begin()
        return of_transformers(model, assistant_model=variant.drafter)(prompt, new_tokens, temperature)

    return decode


def of_flashspec(model: Any, draft_model: Any) -> Decode:
    """FlashSpec with its default strategy: a look-up where the text repeats itself, else the draft model."""
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    where = (model.device, model.dtype)
    ends = model.generation_config.eos_token_id

    @functools.cache  # built once for each temperature, when it warms up
    def engine(temperature: float) -> Any:
        target = TargetModel("target", *where, model=model)
        drafter = HuggingFaceDrafter("draft model", *where, model=draft_model)
        if temperature:
            drafter.set_temperature(temperature)
        config = FlashSpecConfig(device=str(model.device), sampling=SamplingConfig(temperature=temperature))
        return SpeculativeEngine(config, [drafter], target)

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        result = engine(temperature).generate(
            prompt, max_new_tokens=new_tokens, eos_token_ids=ends if isinstance(ends, list) else [ends]
        )
        return result.output_ids[0, : result.n_tokens_generated].cpu()

    return decode


def of_economize(model: Any, draft_model: Any, tokenizer: Any) -> Decode:
    """Economize with a draft model; drafts of four tokens, its default."""
    import economize
    from economize.techniques.draft_model import DraftModelConfig

    with tempfile.TemporaryDirectory() as folder:  # it loads the draft model itself
        draft_model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        assisted = economize.apply(model, DraftModelConfig(model=folder, attn_implementation="sdpa"))
    sampled = economize.DecodeConfig(verifier="rejection")

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        if temperature:
            output = assisted.generate(
                prompt, max_new_tokens=new_tokens, do_sample=True, temperature=temperature, top_k=0, decoding=sampled
            )
        else:
            output = assisted.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
        return output[0, prompt.shape[1] :].cpu()

    return decode


def of_openvino(gguf: Path, **settings: int) -> Decode:
    """OpenVINO GenAI on a CPU; with `num_assistant_tokens` and `max_ngram_size`, its own prompt look-up."""
    import numpy
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(gguf), "CPU", **({"prompt_lookup": True} if settings else {}))

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = new_tokens, temperature > 0
        if temperature:
            config.temperature, config.top_k = temperature, 2**31 - 1
        for name, value in settings.items():
            setattr(config, name, value)
        ids = numpy.array(prompt)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return torch.tensor(pipeline.generate(inputs, config).tokens[0])

    return decode


def of_llama_cpp(gguf: Path, num_pred_tokens: int = 0) -> Decode:
    """llama-cpp-python on a CPU; with `num_pred_tokens`, its own prompt look-up."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=num_pred_tokens) if num_pred_tokens else None
    model = Llama(str(gguf), n_ctx=2048, n_threads=torch.get_num_threads(), draft_model=draft, verbose=False)

    def decode(prompt: Tensor, new_tokens: int, temperature: float) -> Tensor:
        written: list[int] = []
        for token in model.generate(prompt[0].tolist(), temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            written.append(token)
            if token == model.token_eos() or len(written) == new_tokens:
                break
        return torch.tensor(written)

    return decode


def with_gguf(gguf: Path, console: Console) -> dict[str, Decode]:
    """All that read the target from a GGUF file, with its weights in 4 bits, plain and with their own look-ups."""
    found: dict[str, Decode] = {}
    for package, plain, look_up in (
        (
            "openvino-genai",
            lambda: of_openvino(gguf),
            lambda: of_openvino(gguf, num_assistant_tokens=5, max_ngram_size=3),
        ),
        ("llama-cpp-python", lambda: of_llama_cpp(gguf), lambda: of_llama_cpp(gguf, num_pred_tokens=2)),
    ):
        try:
            name = f"{package} {importlib.metadata.version(package)}, 4-bit weights"
            found |= {name: plain(), f"{name}, prompt look-up": look_up()}
        except ImportError as error:
            console.print(f"{package} is left out: {error}")
    return found


def with_draft_model(draft_model: Any, model: Any, tokenizer: Any, console: Console) -> dict[str, Decode]:
    """All that draft with a language model, which has a row for each of the target's tokens, since they need that."""
    found = {"transformers, assisted": of_transformers(model, assistant_model=draft_model)}
    for package, make in (
        ("flashspec", lambda: of_flashspec(model, draft_model)),
        ("economize", lambda: of_economize(model, draft_model, tokenizer)),
    ):
        try:
            found[f"{package} {importlib.metadata.version(package)}"] = make()
        except ImportError as error:
            console.print(f"{package} is left out: {error}")
    return found


def contestants(arguments: argparse.Namespace, model: Any, tokenizer: Any, console: Console) -> dict[str, Decode]:
    """All that can be compared here, plain decoding first."""
    found: dict[str, Decode] = {PLAIN: of_transformers(model), f"{PLAIN}, packed weights": of_packed(model)}
    found["transformers, prompt look-up"] = of_transformers(model, prompt_lookup_num_tokens=10)
    if getattr(model.config.get_text_config(), "num_mtp_layers", None):
        found["transformers, multi-token prediction"] = of_transformers(model, use_mtp=True)
    if arguments.draft_model is not None:
        own = AutoModelForCausalLM.from_pretrained(arguments.draft_model, dtype=model.dtype).eval()
        found |= with_draft_model(with_whole_vocabulary(own, model.config.vocab_size), model, tokenizer, console)
    if arguments.gguf is not None:
        found |= with_gguf(arguments.gguf, console)
    loaded = [variant for spec in arguments.drafter for variant in variants.load(spec, model)]
    drafters = [variant.drafter for variant in loaded if isinstance(variant.drafter, DFlashDrafter)]
    if drafters:
        try:
            found["transformers, DFlash"] = of_host_dflash(model, drafters[0])
        except ImportError as error:
            console.print(f"transformers' own DFlash is left out: {error}")
    return found | {f"hf_specdec, {variant.name}": of_drafter(model, variant) for variant in variants.distinct(loaded)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hub id or folder")
    parser.add_argument(
        "--draft-model", help="small language model: Hub id or folder; without it, what needs one is left out"
    )
    parser.add_argument("--drafter", action="append", default=[], help="of this library, as in `hf-specdec bench`")
    parser.add_argument("--gguf", type=Path, help="the target as a GGUF file, for runtimes with kernels of their own")
    parser.add_argument("--prompts", required=True, help="JSONL file or set, as in `hf-specdec bench`")
    parser.add_argument("--num-prompts", type=int, help="groups taking turns; default: all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    console = Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    prompts = [
        inputs_of(tokenizer, prompt)["input_ids"] for prompt in load_prompts(arguments.prompts, arguments.num_prompts)
    ]
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    compared = contestants(arguments, model, tokenizer, console)
    rates: dict[tuple[float, str], list[float]] = {(t, name): [] for t in arguments.temperature for name in compared}
    identical = dict.fromkeys(compared, True)
    for decode in compared.values():
        for temperature in arguments.temperature:
            decode(prompts[0], 8, temperature)  # warms up
    for prompt in track(prompts, console=console, transient=True):
        for temperature in arguments.temperature:
            plain: Tensor | None = None
            for name, decode in compared.items():
                torch.manual_seed(0)
                started = time.perf_counter()
                written = decode(prompt, arguments.new_tokens, temperature)
                rates[temperature, name].append(len(written) / (time.perf_counter() - started))
                plain = written if plain is None else plain
                identical[name] &= temperature > 0 or torch.equal(written, plain)
    figures = []
    for temperature in arguments.temperature:
        rows = []
        for name in compared:
            ratios = [own / base for own, base in zip(rates[temperature, name], rates[temperature, PLAIN], strict=True)]
            low, median, high = quartiles(ratios)
            same = "" if temperature else "yes" if identical[name] else "NO"
            rows.append([name, f"{median:.2f}x", f"{low:.2f}-{high:.2f}", same])
            figures.append(
                {"way": name, "temperature": temperature, "speedup": round(median, 3), "identical": same or None}
                | {"quartiles": [round(low, 3), round(high, 3)]}
            )
        title = "greedy" if temperature == 0 else f"temperature {temperature}"
        console.print(table_of(title, ("variant", "speedup over plain", "quartiles", "identical"), rows))
    prompts_of_record = f"{len(prompts)}, {arguments.new_tokens} new tokens"
    write_json(arguments.json, {"figures": figures, "prompts": prompts_of_record, **about("cpu")})


if __name__ == "__main__":
    main()

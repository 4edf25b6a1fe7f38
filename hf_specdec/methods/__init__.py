"""Drafters, one file or folder per method; importing this package registers them and lets `generate` accept them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# `from_pretrained` of each class reads what `load_drafter` reads, and whoever can make a drafter can hand it to
# `generate`: the second module patches transformers when it is imported. Nothing of them is used here.
importlib.import_module("hf_specdec.hub.loading")
importlib.import_module("hf_specdec.integration")

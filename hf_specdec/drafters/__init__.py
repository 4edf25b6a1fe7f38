"""Drafters, one file or folder per method; importing this package registers them and lets `generate` accept them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# Whoever can make a drafter can hand it to `generate`. The module patches transformers when it is imported; nothing of
# it is used here.
importlib.import_module("hf_specdec.integration")

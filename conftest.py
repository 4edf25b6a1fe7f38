"""What pytest does not look into for doctests: modules of which an optional package is missing."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["hf_specdec/decoding/attention_kernel.py"]

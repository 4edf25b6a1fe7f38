"""Measurements: all variants of decoding on the same prompts, the time of a round, and its lower bound.

`benchmark(target, drafter)` runs everything, `python -m hf_specdec.benchmark` from the command line; `run.py` is the
harness, `figures.py` computes the figures, `report.py` shows them.
"""

from hf_specdec.benchmark.compare import benchmark

__all__ = ["benchmark"]

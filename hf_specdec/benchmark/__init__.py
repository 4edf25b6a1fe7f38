"""Measuring: every way of decoding over the same prompts, what a round costs, and what it could cost at least.

`python -m hf_specdec.benchmark` runs it all; `run.py` is the harness, `figures.py` what the calls amount to, `report/`
how it is shown.
"""

"""Measurements: all variants of decoding on the same prompts, the time of a round, and its lower bound.

`python -m hf_specdec.benchmark` runs everything; `run.py` is the harness, `figures.py` computes the figures, `report/`
shows them.
"""

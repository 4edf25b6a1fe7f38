"""Serving a target with a drafter in vLLM: what it is told is in `plan.py`, finding and running it in `engine.py`."""

from hf_specdec.serving.engine import Engine, find_engine
from hf_specdec.serving.plan import Plan, plan_serving

__all__ = ["Engine", "Plan", "find_engine", "plan_serving"]

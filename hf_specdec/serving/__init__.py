"""Serving a target with a drafter in vLLM: `plan.py` makes vLLM's arguments, `engine.py` finds and runs vLLM."""

from hf_specdec.serving.engine import Engine, find_engine
from hf_specdec.serving.plan import Plan, plan_serving

__all__ = ["Engine", "Plan", "find_engine", "plan_serving"]

"""Types of the training commands' options: numbers out of range are refused before anything is loaded.

argparse adds the option's name to the message; if the text is not a number, it names the type.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def positive_int(text: str) -> int:
    """A count of at least 1."""
    return _checked(int(text), text, lambda value: value >= 1, "at least 1")


def seed_number(text: str) -> int:
    """A seed for `set_seed` of transformers."""
    return _checked(int(text), text, lambda value: 0 <= value < 2**32, f"between 0 and {2**32 - 1}")


def positive_float(text: str) -> float:
    """A rate or a time above 0."""
    return _checked(float(text), text, lambda value: 0 < value < math.inf, "a finite number above 0")


def not_negative_float(text: str) -> float:
    """A number whose feature 0 disables."""
    return _checked(float(text), text, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def share_of_all(text: str) -> float:
    """A share from 0 to 1."""
    return _checked(float(text), text, lambda value: 0 <= value <= 1, "between 0 and 1")


def _checked(value: _Number, text: str, accepts: Callable[[_Number], bool], rule: str) -> _Number:
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text} must be {rule}")
    return value

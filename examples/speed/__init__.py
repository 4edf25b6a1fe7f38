"""The speed suite of this project: `python -m examples.speed`, from the root of a checkout. See `__main__.py`."""

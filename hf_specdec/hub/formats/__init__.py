"""Layouts of checkpoints: how their config fields and tensor names are converted to those of this library.

`own.py` has the layouts of this library. `hub/recognition.py` finds the layout of a checkpoint.
"""

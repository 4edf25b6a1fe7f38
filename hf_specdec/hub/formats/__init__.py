"""What layouts of checkpoints are made of: how config fields and tensor names are converted to those of this library.

A published layout is with its method in `hf_specdec/methods/`; `speculators.py` and `deepspec.py` have what several
methods' layouts share, `library.py` the layouts of this library. `hub/recognition.py` finds the layout of a checkpoint.
"""

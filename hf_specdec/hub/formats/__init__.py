"""Layouts of checkpoints, those of others and, in `own.py`, ours: how config fields and tensor names become ours.

Which layout a checkpoint is of is decided in `hub/recognition.py`, the files are the business of `hub/files.py`.
"""

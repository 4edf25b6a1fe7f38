"""Published layouts of others: one module each, which maps config fields and tensor names to ours and nothing else.

Which layout a checkpoint is of is decided in `hub/recognition.py`, the files are the business of `hub/files.py`.
"""

"""Folder that ``overlapscope record`` prepends to PYTHONPATH, for its ``sitecustomize.py``."""

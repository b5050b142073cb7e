"""A folder that ``overlapscope record`` puts in front of PYTHONPATH, for its ``sitecustomize.py``."""

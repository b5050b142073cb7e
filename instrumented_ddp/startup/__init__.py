"""Put in front of PYTHONPATH by ``overlapscope record``: see ``sitecustomize.py``."""

"""Trace files: their layout on disk, the code that writes them, and the code that reads them.

``schema`` is the contract. What writes runs inside the training process and needs no pandas; ``recording`` reads a
folder as a ``Trace``.
"""

"""Trace files: their layout on disk, the code that writes them, and the code that reads them.

``format`` is the contract. ``writer`` and ``board`` need only the standard library, because they run inside the
training process; ``reader`` needs pandas and is imported by name where tables are needed.
"""

"""The trace: what a recording looks like on disk, how it is written, how it is read.

``format`` is the contract. ``writer`` and ``board`` need only the standard library, because they run
inside the training process; ``reader`` needs pandas and is imported by name where tables are needed.
"""

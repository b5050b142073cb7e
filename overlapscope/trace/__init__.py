"""The trace: what a recording looks like on disk, how it is written, how it is read.

``format`` is the contract. ``writer`` needs numpy-free standard library only, because it runs inside the
training process; ``reader`` needs pandas and is imported by name where tables are wanted.
"""

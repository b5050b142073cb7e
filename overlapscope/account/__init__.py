"""The one division of a step's time: blocks that sum to it, to the nanosecond.

``division`` shares time out among claims, ``blocks`` says which claims a recording makes.
"""

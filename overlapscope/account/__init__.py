"""The one division of a step's time: blocks that sum to it, to the nanosecond.

``timeline`` gives every moment of a rank to the first that claims it, ``blocks`` says which claims a recording makes.
"""

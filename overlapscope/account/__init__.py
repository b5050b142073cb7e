"""Step-time breakdown: the blocks that a step's time is divided into, which sum to it to the nanosecond.

``timeline`` gives every moment of a rank to the first claimant, and ``blocks`` defines which claims a recording makes.
"""

"""Measured trainings: trials, what was measured in them, and how the results are stored."""

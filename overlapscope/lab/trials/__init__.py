"""Measured trainings: what a trial is, what was measured in it, and where that is kept."""

"""The fault laboratory and the DDP paper's experiments: real jobs with one known fault each, and measured trainings."""

"""``overlapscope tune``: which settings of DDP are worth running, and what the runs have shown."""

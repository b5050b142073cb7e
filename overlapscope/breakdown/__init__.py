"""The step-time breakdown: blocks that sum to each step, to the nanosecond, and means of them."""

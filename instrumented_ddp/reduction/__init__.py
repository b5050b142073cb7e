"""The gradient reducer: Algorithm 1 of the DDP paper, and its parts."""

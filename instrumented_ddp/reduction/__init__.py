"""The reduction of gradients: Algorithm 1 of the DDP paper, and what it needs."""

"""Records torch's own DDP, and loops without any."""

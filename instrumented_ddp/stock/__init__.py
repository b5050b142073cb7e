"""Recording of torch's own DDP, of FSDP2, and of training loops without either."""

"""Ways to sum gradients over all ranks, one a file: ``DistributedDataParallel(model, strategy="ring")``."""

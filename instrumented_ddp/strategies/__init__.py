"""Ways to sum gradients over all ranks, one per module: ``DistributedDataParallel(model, strategy="ring")``."""

"""The experiments of the DDP paper: one per file, with its trials, its figure, and what the paper found."""

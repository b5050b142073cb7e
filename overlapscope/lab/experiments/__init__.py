"""The experiments of the DDP paper: one a file, with its trials, its figure, and what the paper found."""

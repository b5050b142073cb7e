"""Whether the ranks' copies of a model stay the same: fingerprints of their parameters, and optimizers' settings."""

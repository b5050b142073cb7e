"""Bucket plans: which gradients are reduced together, in which order, and when that changes."""

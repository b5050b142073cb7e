"""Checks that the ranks' copies of a model stay identical: parameter fingerprints and optimizer settings."""

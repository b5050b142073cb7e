"""Watchdog that compares a rank with its neighbors during training and diagnoses stalls and divergence."""

"""Comparison of two recordings, two ranges of steps or two plans: the difference of their breakdowns with intervals."""

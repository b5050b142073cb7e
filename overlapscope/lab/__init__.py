"""The fault laboratory: real jobs with one known fault each."""

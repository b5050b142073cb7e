"""Random trainings with random faults, as strangers would write them: what ``python -m benchmarks.chaos`` runs."""

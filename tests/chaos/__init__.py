"""Random trainings with random faults, as strangers would write them: what ``benchmarks/chaos.py`` runs."""

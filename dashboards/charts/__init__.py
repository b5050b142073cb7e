"""The charts of experiments, drawn once: on pages, in files, and in the documentation."""

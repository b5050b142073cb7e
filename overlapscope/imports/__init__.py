"""Traces of other tools, made into recordings."""

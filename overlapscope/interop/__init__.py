"""Recordings in the formats of other tools, and traces of other tools as recordings."""

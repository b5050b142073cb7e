"""Importers that convert traces of other tools to recordings."""

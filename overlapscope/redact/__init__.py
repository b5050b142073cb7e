"""Copies of recordings in which names are pseudonyms."""

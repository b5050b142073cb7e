"""Markup, styles and scripts of the pages. All of it is served from here: nothing comes from another host."""

from __future__ import annotations

from importlib.resources import files


def read_asset(name: str) -> str:
    """Return the text of a file in this folder."""
    return (files(__name__) / name).read_text(encoding="utf-8")

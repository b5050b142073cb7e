"""Headline figures: the big numbers at the top of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One big number at the top of a page."""

    label: str
    value: str
    note: str
    colour: str
    """Role in ``dashboards.theme`` that gives the color."""

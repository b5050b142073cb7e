"""The big numbers at the top of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One of them."""

    label: str
    value: str
    note: str
    colour: str
    """A role of ``dashboards.theme``."""

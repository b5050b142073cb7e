"""Sentences in place of those that a confidential recording leaves out."""

from __future__ import annotations

from typing import Any, Final

from overlapscope.text import capitalize, rank_list

ALTERNATIVE: Final = "another explanation is left, which a confidential recording does not quote"


def describe_reported(verdict: dict[str, Any]) -> str:
    """Return a sentence for a verdict of a watchdog, whose own sentences quote names.

    Args:
        verdict: its fields, without those that a confidential recording leaves out.
    """
    named = verdict.get("blamed") or verdict.get("suspected")
    ranks = [rank for rank in named if isinstance(rank, int)] if isinstance(named, list) else []
    who = f"{rank_list(ranks)}: " if ranks else ""
    where = [f"{name} {verdict[name]}" for name in ("step", "bucket") if verdict.get(name) is not None]
    return capitalize(f"{who}{verdict.get('kind')}{' in ' if where else ''}{', '.join(where)}.")

"""Faults that stop nothing and show in no collective: the replicas drift apart."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.chaos.event import FAULT, Event, one_line

_DRIFT: Final[dict[str, Any]] = {"kinds": ("replicas differ",), "is_disagreement": True, "has_line": False}

SILENT: Final = (
    Event(
        name="silent: other learning rate",
        write=lambda setting, _random: {
            "setup": f"$optimizer.param_groups[0]['lr'] *= 1.5 if $rank == {setting.rank} else 1{FAULT}"
        },
        has_step=False,
        **_DRIFT,
    ),
    Event(
        name="silent: other weights",
        write=lambda setting, _random: {
            "setup": f"if $rank == {setting.rank}:\n    next($model.parameters()).data.mul_(1.01){FAULT}"
        },
        has_step=False,
        **_DRIFT,
    ),
    Event(
        name="silent: weights changed later",
        write=one_line("after", "next($model.parameters()).data.add_(0.01)"),
        **_DRIFT,
    ),
)

"""Stall timeouts of a live job, and when a rank counts as busy. Pure functions."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import RankEvidence

STUCK_AFTER_NS: Final = 3_000_000_000
"""Minimum stall that is called stuck while the job runs ..."""
STUCK_AFTER_STEPS: Final = 4
"""... and the same in usual steps: the longer of the two counts."""

ENOUGH_STEPS: Final = 4
"""Number of steps after which the usual step time is known."""
STUCK_AT_START_NS: Final = 20_000_000_000
"""Stall timeout while the step time is unknown: compilation, autotuning and starting data loaders take their time."""

BUSY_STALL_TIMEOUT_NS: Final = 60_000_000_000
"""Stall timeout of a rank that computes or does I/O: it may be evaluating or checkpointing, and is only slow."""
_TIMEOUT_STEPS: Final = 20
_TIMEOUT_PAUSES: Final = 3

BUSY_CPU_SHARE: Final = 0.2
"""Share of a core: a waiting rank uses next to none, a computing one gets at least this, even on a crowded host."""


def stall_timeout_ns(one: RankEvidence) -> int:
    """Return the stall timeout: how long a rank may stall before it is called stuck."""
    if one.is_starting:
        return STUCK_AT_START_NS
    return max(STUCK_AFTER_NS, STUCK_AFTER_STEPS * (one.step_time_ns or 0))


def is_busy(one: RankEvidence) -> bool:
    """Return True if a rank computes or does I/O, or did when last heard from."""
    return not one.holds_gil and (bool(one.is_working) or (one.cpu_share or 0.0) >= BUSY_CPU_SHARE)


def long_stall_timeout_ns(least_ns: int, step_time_ns: int | None, longest_recovered_stall_ns: int | None) -> int:
    """Return the stall timeout that exceeds what is usual for this job, which may have had checkpoints and evaluations.

    Args:
        least_ns: minimum, however fast the job has been.
    """
    return max(least_ns, _TIMEOUT_STEPS * (step_time_ns or 0), _TIMEOUT_PAUSES * (longest_recovered_stall_ns or 0))

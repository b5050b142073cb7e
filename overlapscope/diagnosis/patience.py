"""How long a standstill is normal while a job runs, and when a rank is busy. Pure."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import RankEvidence

STUCK_AFTER_NS: Final = 3_000_000_000
"""A standstill shorter than this is not called stuck while the job runs ..."""
STUCK_AFTER_STEPS: Final = 4
"""... nor one shorter than this many usual steps."""

ENOUGH_STEPS: Final = 4
"""After so many it is known what a step usually takes."""
STUCK_AT_START_NS: Final = 20_000_000_000
"""Instead, while the step time is unknown: compilation, autotuning and starting data loaders take their time."""

BUSY_PATIENCE_NS: Final = 60_000_000_000
"""A rank that computes, reads or writes may be in an evaluation or a checkpoint: for so long it is only slow."""
_STEPS_OF_PATIENCE: Final = 20
_PAUSES_OF_PATIENCE: Final = 3

BUSY_CPU_SHARE: Final = 0.2
"""Share of a core: a waiting rank uses next to none, a computing one gets at least this, even on a crowded host."""


def patience_ns(one: RankEvidence) -> int:
    """For how long a rank may stand still and not be called stuck."""
    if one.is_starting:
        return STUCK_AT_START_NS
    return max(STUCK_AFTER_NS, STUCK_AFTER_STEPS * (one.step_time_ns or 0))


def is_busy(one: RankEvidence) -> bool:
    """Whether a rank computes, reads or writes, or did when last heard from."""
    return not one.holds_gil and (bool(one.is_working) or (one.cpu_share or 0.0) >= BUSY_CPU_SHARE)


def long_standstill_ns(least_ns: int, step_time_ns: int | None, longest_pause_ns: int | None) -> int:
    """How long a standstill lasts that nothing in a job's history explains: it had checkpoints and evaluations before.

    Args:
        least_ns: however quick the job has been.
    """
    return max(least_ns, _STEPS_OF_PATIENCE * (step_time_ns or 0), _PAUSES_OF_PATIENCE * (longest_pause_ns or 0))

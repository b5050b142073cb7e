"""Baseline of step times and pauses, and limits for stalls. Pure: times are given, and no clock is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from overlapscope.diagnosis.stall_timeout import (
    BUSY_STALL_TIMEOUT_NS,
    ENOUGH_STEPS,
    STUCK_AT_START_NS,
    long_stall_timeout_ns,
)

MIN_STALL_LIMIT_S: Final = 3.0
"""Lower bound of the limit in seconds: garbage collections, page faults and other jobs delay ranks."""
STARTUP_STALL_LIMIT_S: Final = STUCK_AT_START_NS / 1e9
STARTUP_NOTICE_S: Final = 5.0
"""Time in seconds after which the rank that others wait for is reported while the step time is unknown."""
DEAD_RANK_STALL_LIMIT_S: Final = 1.0
"""Limit in seconds for a rank that is gone and will never arrive."""

_STALL_STEPS: Final = 4
_ENOUGH_ADVANCES: Final = 8
_WINDOW: Final = 64
_RECHECK_FACTOR: Final = 1.25
"""Factor between looks, as each costs a message per rank, and a rank may evaluate alone for an hour."""
_USUAL_PAUSE_QUANTILE: Final = 0.9
"""Quantile of pauses that counts as usual."""


@dataclass
class ProgressTracker:
    """Tracker of step times or, without steps, of the pauses between two advances."""

    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _steps_seen: int = 0
    _pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _step: int | None = None
    _step_since_s: float = 0.0
    _mark: Hashable = None
    longest_pause_s: float = 0.0
    """Longest pause in seconds after which there was progress again."""
    advanced_at_s: float | None = None
    """Time of the last observed advance."""

    def observe(self, now_s: float, step: int | None, mark: Hashable) -> bool:
        """Observe the progress at one time.

        Args:
            step: the current step of the process; None if steps are not counted.
            mark: changes whenever anything happens on this rank: a phase, a collective, a step.

        Returns:
            True if anything has happened since the last observation.
        """
        if step is not None:
            self._observe_step(now_s, step)
        if self.advanced_at_s is None:
            self._mark, self.advanced_at_s = mark, now_s
            return True
        if mark == self._mark:
            return False
        self._pauses_s.append(now_s - self.advanced_at_s)
        self.longest_pause_s = max(self.longest_pause_s, now_s - self.advanced_at_s)
        self._mark, self.advanced_at_s = mark, now_s
        return True

    def _observe_step(self, now_s: float, step: int) -> None:
        if self._step is None:  # many short steps may have ended before the second observation
            self._step, self._step_since_s = 0, now_s if self.advanced_at_s is None else self.advanced_at_s
        if step < self._step:
            self._step, self._step_since_s = step, now_s
        elif step > self._step:
            self._steps_s.append((now_s - self._step_since_s) / (step - self._step))
            self._steps_seen += step - self._step
            self._step, self._step_since_s = step, now_s

    @property
    def step_s(self) -> float | None:
        """Return the median step time; None while too few steps were seen."""
        return median(self._steps_s) if self._steps_seen >= ENOUGH_STEPS else None

    def idle_s(self, now_s: float) -> float:
        """Return for how long nothing has happened."""
        return 0.0 if self.advanced_at_s is None else now_s - self.advanced_at_s

    def long_stall_s(self, least_s: float) -> float:
        """Return the length of a stall that nothing in the job's history explains: ``long_stall_timeout_ns``."""
        step_ns, pause_ns = round((self.step_s or 0.0) * 1e9), round(self.longest_pause_s * 1e9)
        return long_stall_timeout_ns(round(least_s * 1e9), step_ns, pause_ns) / 1e9

    def next_check_idle_s(self, idle_s: float, undecided_for_s: float | None = None) -> float:
        """Return the idle time at which to look again at a stall that was called slow: if it lasts, it is called stuck.

        Args:
            idle_s: how long this rank has stalled by now.
            undecided_for_s: time until the stall of another rank, for which this one may wait, counts as a fault.
        """
        limits_s = [self.long_stall_s(BUSY_STALL_TIMEOUT_NS / 1e9)]
        if undecided_for_s is not None:
            limits_s.append(max(idle_s + undecided_for_s, _RECHECK_FACTOR * idle_s))
        return min([2 * idle_s, *(limit_s for limit_s in limits_s if idle_s < limit_s)])

    @property
    def is_starting(self) -> bool:
        """Return whether too little has happened to know what is normal."""
        return self.step_s is None and (self._step is not None or len(self._pauses_s) < _ENOUGH_ADVANCES)

    @property
    def notice_limit_s(self) -> float:
        """Return the length of a stall that is worth an investigation."""
        return min(STARTUP_NOTICE_S, self.limit_s) if self.is_starting else self.limit_s

    @property
    def limit_s(self) -> float:
        """Return the longest normal stall in seconds: 4 steps, and at least 3 s.

        For a median step time of 2 s that is 8 s, and for 0.1 s it is 3 s.
        """
        if self.step_s is not None:
            return max(MIN_STALL_LIMIT_S, _STALL_STEPS * self.step_s)
        pauses_s = sorted(self._pauses_s)
        if not self.is_starting:
            return max(MIN_STALL_LIMIT_S, _STALL_STEPS * pauses_s[int(_USUAL_PAUSE_QUANTILE * (len(pauses_s) - 1))])
        return max(STARTUP_STALL_LIMIT_S, _STALL_STEPS * max(pauses_s, default=0.0))

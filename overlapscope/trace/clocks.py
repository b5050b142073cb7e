"""Host clock, and offsets between two: bounds from observations, and the piecewise linear map that follows from them.

An observation doesn't give the offset (reference clock minus own clock), it bounds it. A ping that is sent at s,
answered at reference time a, and received at r shows that the offset was at most a - s at s, and at least a - r at r.
Bounds that were taken close together are intersected into a *fix*: an offset whose error is half the remaining width.
Between fixes the map is linear; so is the true offset as far as the clocks' rates are constant. The only assumptions
about clocks are ``MAX_DRIFT`` and ``MIN_WANDER``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

host_now_ns = time.monotonic_ns
"""Return nanoseconds of ``CLOCK_MONOTONIC``, which on Linux all processes of one boot share (in one time namespace)."""

_INITIAL_TIME_NAMESPACE: Final = "time:[4026531834]"


def get_boot_id() -> str | None:
    """Return an identifier shared by all processes with the same ``CLOCK_MONOTONIC``; None if unknown.

    It is the kernel's boot id, and the time namespace unless it is the machine's initial one, because its clock is
    shifted.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:  # a kernel without time namespaces
        return boot_id
    return boot_id if namespace == _INITIAL_TIME_NAMESPACE else f"{boot_id} {namespace}"


def get_host_id() -> str:
    """Return an identifier shared by all processes that also see each other in /proc."""
    with suppress(OSError):
        return f"{get_boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()} {os.getpid()}"


Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_DRIFT: Final = 200e-6
"""Largest difference in rate between two clocks: quartz is accurate to within 100 ppm."""
MIN_WANDER: Final = 0.1e-6
"""Least change of the difference of two rates from one fix to the next; larger where the fixes show it."""

_POOR_FACTOR: Final = 3
"""Multiple of the median width above which a fix counts as poor."""
_HORIZON_NS: Final = 30 * 24 * 3600 * 10**9
"""How far maps extend before the first fix and after the last."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetBounds:
    """Lower and upper bounds of the offset at times of the own clock, in nanoseconds."""

    low_at_ns: Int64s
    low_ns: Int64s
    high_at_ns: Int64s
    high_ns: Int64s

    def at(self, own_ns: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Return the smallest and the largest offset that all bounds allow at given times, whatever the drift."""
        moments_ns = np.asarray(own_ns, dtype=np.int64)[..., np.newaxis]
        low_ns = self.low_ns - _drift_ns(self.low_at_ns - moments_ns)
        high_ns = self.high_ns + _drift_ns(self.high_at_ns - moments_ns)
        return low_ns.max(axis=-1), high_ns.min(axis=-1)


def bounds_from_pings(pings: Sequence[Sequence[int]]) -> OffsetBounds:
    """Return the bounds that pings set.

    Args:
        pings: sent (own clock), answered (reference clock), received (own clock), in nanoseconds.
    """
    sent_ns, answered_ns, received_ns = np.array(pings, dtype=np.int64).reshape(-1, 3).T
    return OffsetBounds(
        low_at_ns=received_ns, low_ns=answered_ns - received_ns, high_at_ns=sent_ns, high_ns=answered_ns - sent_ns
    )


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Offset at one time of the own clock: between ``low_ns`` and ``high_ns``."""

    own_ns: int
    low_ns: int
    high_ns: int


def compute_fix(bounds: OffsetBounds) -> Fix | None:
    """Compute the fix from bounds taken close together; None if they contradict each other.

    Example: ping 1 is sent at 0, answered at 1030, received at 100; ping 2 is sent at 200, answered at 1240, received
    at 260. Ping 1 allows 930 to 1030, ping 2 allows 980 to 1040. The fix is at 230, the middle of ping 2, which is the
    tighter one: 979 to 1031, because each bound is widened by 1 ns for drift.
    """
    return next(iter(compute_fixes_by_part(bounds, np.zeros(1, dtype=np.int64))), None)


def compute_fixes_by_part(bounds: OffsetBounds, begins: Int64s) -> list[Fix]:
    """Compute the fix of each part of some bounds as ``compute_fix`` does, without those that contradict themselves.

    Args:
        begins: index of the first bound of each part, ascending from 0.
    """
    part = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(bounds.low_ns))))
    tightest = np.lexsort((bounds.high_ns - bounds.low_ns, part))[begins]
    own_ns = (bounds.low_at_ns[tightest] + bounds.high_at_ns[tightest]) // 2
    at_ns = own_ns[part]
    low_ns = np.maximum.reduceat(bounds.low_ns - _drift_ns(bounds.low_at_ns - at_ns), begins)
    high_ns = np.minimum.reduceat(bounds.high_ns + _drift_ns(bounds.high_at_ns - at_ns), begins)
    found = zip(own_ns.tolist(), low_ns.tolist(), high_ns.tolist(), strict=True)
    return [Fix(own_ns=own, low_ns=low, high_ns=high) for own, low, high in found if low <= high]


def drop_poor_fixes(fixes: Sequence[Fix]) -> list[Fix]:
    """Drop fixes taken while the network or a host was busy: lines between the others are more accurate."""
    widths_ns = [each.high_ns - each.low_ns for each in fixes]
    return [
        each for each, width_ns in zip(fixes, widths_ns, strict=True) if width_ns <= _POOR_FACTOR * np.median(widths_ns)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClockMap:
    """Map from one clock to another: piecewise linear, in whole nanoseconds, with an error at each time.

    Example: fixes at 0 (90 to 110) and at 1000 (190 to 210) give offsets of 100, 150 and 200 at 0, 500 and 1000, with
    an error of 11: half the width and 1 for rounding. So 500 is mapped to 650.
    """

    own_ns: Int64s
    offset_ns: Int64s
    """Other clock minus this one, at ``own_ns``."""
    error_ns: Floats
    """Maximum error of the offset at ``own_ns``; NaN if unknown."""

    @classmethod
    def constant(cls, offset_ns: int, error_ns: float) -> ClockMap:
        """Return a map with a constant offset: the clocks have the same rate, or nothing better is known."""
        return cls(own_ns=np.zeros(1, np.int64), offset_ns=np.array([offset_ns]), error_ns=np.array([error_ns]))

    @classmethod
    def from_fixes(cls, fixes: Sequence[Fix]) -> ClockMap:
        """Return a map of straight lines between fixes, continued beyond them with the drift that they show.

        Raises:
            ValueError: there are no fixes.
        """
        if not fixes:
            raise ValueError("no fix, no map")
        by_time = sorted({each.own_ns: each for each in fixes}.values(), key=lambda each: each.own_ns)
        own_ns, low_ns, high_ns = np.array([(each.own_ns, each.low_ns, each.high_ns) for each in by_time]).T
        offset_ns = (low_ns + high_ns) // 2
        error_ns = (high_ns - low_ns) / 2 + 1  # 1 for rounding
        wander = _estimate_wander(own_ns, offset_ns, error_ns)
        before, growth_before = _extrapolate_drift(own_ns, offset_ns, error_ns, wander, end=0)
        after, growth_after = _extrapolate_drift(own_ns, offset_ns, error_ns, wander, end=-1)

        # If the rates change between two fixes, the true offset bends away from the line, most in the middle.
        gap_ns = np.diff(own_ns)
        middle_ns = own_ns[:-1] + gap_ns // 2
        bend_error_ns = np.interp(middle_ns - own_ns[0], own_ns - own_ns[0], error_ns) + wander * gap_ns / 2
        knots_ns = np.concatenate([own_ns, middle_ns, [own_ns[0] - _HORIZON_NS, own_ns[-1] + _HORIZON_NS]])
        offsets_ns = np.concatenate(
            [
                offset_ns,
                offset_ns[:-1] + np.diff(offset_ns) // 2,
                [offset_ns[0] - round(before * _HORIZON_NS), offset_ns[-1] + round(after * _HORIZON_NS)],
            ]
        )
        errors_ns = np.concatenate(
            [
                error_ns,
                bend_error_ns,
                [error_ns[0] + growth_before * _HORIZON_NS, error_ns[-1] + growth_after * _HORIZON_NS],
            ]
        )
        knots_ns, first = np.unique(knots_ns, return_index=True)
        return cls(own_ns=knots_ns, offset_ns=offsets_ns[first], error_ns=errors_ns[first])

    def offset_at(self, own_ns: npt.ArrayLike) -> Int64s:
        """Return the offset (other clock minus this one) at times of this clock."""
        return self.offset_ns[0] + np.rint(self._interpolate(own_ns, self.offset_ns - self.offset_ns[0])).astype(
            np.int64
        )

    def error_at(self, own_ns: npt.ArrayLike) -> Floats:
        """Return the maximum error of the offset at times of this clock."""
        return self._interpolate(own_ns, self.error_ns)

    def error_over(self, begin_ns: int, end_ns: int) -> float:
        """Return the largest error in a time span of this clock."""
        within = self.own_ns[(self.own_ns > begin_ns) & (self.own_ns < end_ns)]
        return float(self.error_at(np.concatenate([[begin_ns, end_ns], within])).max())

    def __call__(self, own_ns: npt.ArrayLike) -> Int64s:
        """Map times of this clock to the other."""
        return np.asarray(own_ns, dtype=np.int64) + self.offset_at(own_ns)

    def inverse(self) -> ClockMap:
        """Return the map from the other clock to this one."""
        return ClockMap(own_ns=self.own_ns + self.offset_ns, offset_ns=-self.offset_ns, error_ns=self.error_ns)

    def compose(self, onward: ClockMap) -> ClockMap:
        """Return the composition of this map and a map from the other clock to a third one."""
        own_ns = np.union1d(self.own_ns, self.inverse()(onward.own_ns))
        between_ns = self(own_ns)
        return ClockMap(
            own_ns=own_ns,
            offset_ns=onward(between_ns) - own_ns,
            error_ns=self.error_at(own_ns) + onward.error_at(between_ns),
        )

    def _interpolate(self, own_ns: npt.ArrayLike, values: npt.NDArray[Any]) -> Floats:
        # Differences are exact as float64; times since 1970 are not.
        since = np.asarray(own_ns, dtype=np.int64) - self.own_ns[0]
        return np.asarray(np.interp(since, self.own_ns - self.own_ns[0], values))


def _drift_ns(distance_ns: Int64s) -> Int64s:
    """Return by how much an offset may change over a time span, rounded up."""
    return np.ceil(np.abs(distance_ns) * MAX_DRIFT).astype(np.int64)


def _estimate_wander(own_ns: Int64s, offset_ns: Int64s, error_ns: Floats) -> float:
    """Return by how much the drift changes from fix to fix, as far as errors don't explain it."""
    gap_ns = np.diff(own_ns)
    drift, uncertainty = np.diff(offset_ns) / gap_ns, (error_ns[1:] + error_ns[:-1]) / gap_ns
    excess = np.abs(np.diff(drift)) - (uncertainty[1:] + uncertainty[:-1])
    return MIN_WANDER + max(0.0, float(excess.max(initial=0.0)))


def _extrapolate_drift(
    own_ns: Int64s, offset_ns: Int64s, error_ns: Floats, wander: float, *, end: int
) -> tuple[float, float]:
    """Return the drift before the first fix or after the last (``end`` 0 or -1), and its error.

    The drift is taken from the fix that determines it best: errors matter less over a long distance, wander matters
    less over a short one.
    """
    gap_ns = np.delete(own_ns - own_ns[end], end)
    if not len(gap_ns):
        return 0.0, MAX_DRIFT
    fixes_apart = np.arange(1, len(gap_ns) + 1) if end == 0 else np.arange(len(gap_ns), 0, -1)
    error = (np.delete(error_ns, end) + error_ns[end]) / np.abs(gap_ns) + wander * fixes_apart
    best = int(np.argmin(error))
    drift = float(np.delete(offset_ns - offset_ns[end], end)[best] / gap_ns[best])
    low, high = max(drift - error[best], -MAX_DRIFT), min(drift + error[best], MAX_DRIFT)
    return ((low + high) / 2, (high - low) / 2) if low < high else (drift, float(error[best]))

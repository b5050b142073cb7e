"""Bucket plans that DDP's settings can express, the settings that express a plan, and the plans that a probe runs.

Many caps give the same partition, so plans are listed by partition, each with the band of caps that give it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.partition import (
    MB,
    NO_LIMIT,
    SPARSE_KIND,
    Buckets,
    Gradients,
    Int64Array,
    buckets_from_cuts,
    fill_plan,
    forced_cuts,
)

DEFAULT_FIRST_BUCKET_BYTES: Final = MB
DEFAULT_CAP_BYTES: Final = 25 * MB

_ROUND_FRACTIONS: Final = (1.0, 0.5, 0.2)


@dataclass(frozen=True, kw_only=True)
class UniformPlan:
    """A plan of a single cap: caps of more than ``low_bytes`` and at most ``high_bytes`` make these buckets."""

    buckets: Buckets
    low_bytes: int
    high_bytes: int
    """Upper end of the band; ``NO_LIMIT`` if every larger cap gives the same plan."""
    first_bucket_bytes: int | None = None
    """Limit of the first bucket, if it differs from the others'."""
    is_default: bool = False
    """True if this is DDP's default."""

    @property
    def cap_mb(self) -> float:
        """Return a round cap in the band, in MB."""
        return DEFAULT_CAP_BYTES / MB if self.is_default else find_round_cap_mb(self.low_bytes, self.high_bytes)

    @property
    def has_round_cap(self) -> bool:
        """Return True if a cap of two significant digits gives this plan; others lie in bands that nobody would hit."""
        return float(f"{self.cap_mb:.2g}") == self.cap_mb

    @property
    def setting(self) -> str:
        """Return the argument of DistributedDataParallel that gives this plan, unless ``first_bucket_bytes`` is set."""
        return "bucket_cap_mb=None" if self.is_default else format_caps([self.cap_mb])


def default_plan(gradients: Gradients) -> UniformPlan:
    """Return the plan when nothing is set: a first bucket of 1 MB, then 25 MB. ``bucket_cap_mb=25`` gives another."""
    band = next(_iterate_bands(gradients, DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES, 1.0))
    return UniformPlan(
        buckets=fill_plan(gradients, [DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES]),
        low_bytes=band.low_bytes,
        high_bytes=band.high_bytes,
        first_bucket_bytes=DEFAULT_FIRST_BUCKET_BYTES,
        is_default=True,
    )


def uniform_plans(
    gradients: Gradients,
    first_bucket_bytes: int | None = None,
    max_plans: int = 1000,
    smallest_cap_bytes: int = 1,
) -> tuple[UniformPlan, ...]:
    """List every partition that an explicit cap gives, small caps first. DDP's default is not among them.

    Args:
        first_bucket_bytes: Separate limit of the first bucket, as ``bucket_cap_mb_list`` can set it.
        max_plans: Maximum number of plans; if there are more, this many evenly spaced caps are tried.
        smallest_cap_bytes: Smallest cap to try.
    """
    exact = _merge_bands(_iterate_bands(gradients, first_bucket_bytes, smallest_cap_bytes, 1.0), max_plans)
    if exact is None:
        sizes = gradients.bytes[gradients.bytes > 0]
        smallest = max(smallest_cap_bytes, int(sizes.min()))
        factor = float(gradients.total_bytes / smallest) ** (1 / (max_plans - 1))
        exact = _merge_bands(_iterate_bands(gradients, first_bucket_bytes, smallest, factor), max_plans + 1)
        assert exact is not None
    return tuple(
        UniformPlan(
            buckets=_buckets_from_ends(band.ends, gradients),
            low_bytes=band.low_bytes,
            high_bytes=band.high_bytes,
            first_bucket_bytes=first_bucket_bytes,
        )
        for band in exact
    )


def find_caps_mb(buckets: Buckets, gradients: Gradients) -> list[float] | None:
    """Express a plan as ``bucket_cap_mb_list`` of torch 2.13's own DDP; the last cap applies to all further buckets.

    Example: for four gradients of 1 MB, buckets of 1 and 3 gradients are [1.0, 25.0].

    Returns:
        None if no list gives this plan: caps count the buckets of each kind, and a bucket of one kind may need a cap
        that is too large for that of another.
    """
    lows: list[int] = []
    highs: list[int] = []
    counts: dict[int, int] = {}
    last_of_kind = {int(gradients.kinds[bucket[0]]): number for number, bucket in enumerate(buckets)}
    for number, bucket in enumerate(buckets):
        kind = int(gradients.kinds[bucket[0]])
        if kind == SPARSE_KIND:
            continue
        ordinal = counts.get(kind, 0)
        counts[kind] = ordinal + 1
        if ordinal == len(lows):
            lows.append(0)
            highs.append(NO_LIMIT)
        sizes = gradients.bytes[list(bucket)]
        lows[ordinal] = max(lows[ordinal], int(sizes[:-1].sum()))
        if last_of_kind[kind] != number:
            highs[ordinal] = min(highs[ordinal], int(sizes.sum()))
    caps: list[float] = []
    for low, high in zip(lows, highs, strict=True):
        if low >= high:
            return None
        fits = bool(caps) and low < int(caps[-1] * MB) <= high
        caps.append(caps[-1] if fits else find_round_cap_mb(low, high))
    while len(caps) > 1 and caps[-1] == caps[-2]:
        caps.pop()
    caps = caps or [DEFAULT_CAP_BYTES / MB]
    return caps if fill_plan(gradients, [int(cap * MB) for cap in caps]) == buckets else None


def format_caps(caps_mb: Sequence[float]) -> str:
    """Format caps as an argument of DistributedDataParallel, with all digits, which matter where bands are narrow."""
    texts = [repr(float(cap)).removesuffix(".0") for cap in caps_mb]
    return f"bucket_cap_mb={texts[0]}" if len(set(texts)) == 1 else f"bucket_cap_mb_list=[{', '.join(texts)}]"


def find_round_cap_mb(low_bytes: int, high_bytes: int) -> float:
    """Return a cap in MB above ``low_bytes`` and up to ``high_bytes``: 25 if possible, otherwise a round number."""
    if low_bytes < DEFAULT_CAP_BYTES <= high_bytes:
        return DEFAULT_CAP_BYTES / MB
    high_bytes = min(high_bytes, 2 * low_bytes + MB)
    for exponent in range(9, -7, -1):
        for share in _ROUND_FRACTIONS:
            unit_mb = share * 10.0**exponent
            first, last = int(low_bytes / MB / unit_mb), int(high_bytes / MB / unit_mb) + 1
            if last - first > 20:
                break
            for multiple in range(first, last + 1):
                cap_mb = float(f"{multiple * unit_mb:.8g}")
                if low_bytes < int(cap_mb * MB) <= high_bytes:
                    return cap_mb
    return high_bytes / MB


@dataclass(frozen=True)
class _Band:
    ends: tuple[int, ...]
    """Positions in the order of gradients after which a bucket is closed."""
    low_bytes: int
    high_bytes: int


def _merge_bands(bands: Iterator[_Band], max_plans: int) -> list[_Band] | None:
    """Collect bands, merging those with the same buckets; return None if there are more than ``max_plans``."""
    found: list[_Band] = []
    for band in bands:
        if found and found[-1].ends == band.ends:
            found[-1] = _Band(band.ends, found[-1].low_bytes, band.high_bytes)
        else:
            found.append(band)
        if len(found) > max_plans:
            return None
    return found


def _iterate_bands(gradients: Gradients, first_bytes: int | None, cap_bytes: int, factor: float) -> Iterator[_Band]:
    """Yield the buckets for increasing caps, each with the range of caps that give them.

    Example: for three gradients of 4 bytes, caps up to 4 bytes close a bucket after each one: ends (0, 1, 2). Caps of 5
    to 8 bytes give ends (1, 2), and larger ones (2,).

    Args:
        factor: Minimum ratio of a cap to the previous one.
    """
    kinds = gradients.kinds[gradients.order]
    positions = [np.flatnonzero(kinds == kind).tolist() for kind in np.unique(kinds) if kind != SPARSE_KIND]
    filled = [np.cumsum(gradients.bytes[gradients.order][of_kind]).tolist() for of_kind in positions]
    while True:
        low, high, ends = 0, NO_LIMIT, []
        for of_kind, sums in zip(positions, filled, strict=True):
            start, before = 0, 0
            while start < len(sums):
                is_free = start > 0 or first_bytes is None
                limit = cap_bytes if start or first_bytes is None else first_bytes
                end = bisect_left(sums, before + limit, start)
                if end == len(sums):
                    end -= 1
                    low = max(low, sums[end] - before) if is_free else low
                elif is_free:
                    low = max(low, (sums[end - 1] if end else 0) - before)
                    high = min(high, sums[end] - before)
                ends.append(of_kind[end])
                start, before = end + 1, sums[end]
        yield _Band(tuple(sorted(ends)), low, high)
        if high == NO_LIMIT:
            return
        cap_bytes = max(high + 1, int(cap_bytes * factor))


def _buckets_from_ends(ends: tuple[int, ...], gradients: Gradients) -> Buckets:
    cuts = forced_cuts(gradients)
    cuts[list(ends)] = True
    return buckets_from_cuts(cuts, gradients)


# Plans to run for a few steps each, so that a short recording can predict any other plan.
#
# The cost of an all-reduce of some size is known if similar sizes were recorded, and a single size can't distinguish
# latency from bandwidth. So the plans span the sizes that a plan can have. They run in blocks, forward and then
# backward, so that a machine that becomes slower or faster meanwhile affects all plans alike.

PROBED_STEPS: Final = 24
"""Number of steps of a probe: at least two in each block, because buffers are new in the first."""
_PLANS: Final = 5
_MAX_BUCKETS: Final = 48
"""Maximum number of buckets of a probed plan: a probe should be informative and cheap."""
_SMALLEST_CAP_BYTES: Final = 64 * 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbeSchedule:
    """Plans to probe, and when each runs."""

    plans: tuple[Buckets, ...]
    """Distinct plans; the first is DDP's default."""
    plan_of_step: Int64Array
    """(steps,) index of the plan that each step runs with."""


def plan_probe(gradients: Gradients) -> ProbeSchedule:
    """Plan a probe. The result is the same on all ranks, as it depends only on the arguments.

    Example: five plans run in the order 0, 1, 2, 3, 4, 3, 2, 1, 0 for 3, 3, 3, 2, 2, 2, 3, 3, 3 steps.
    """
    plans = _spanning_plans(gradients)[:_PLANS]
    visits = [*range(len(plans)), *range(len(plans) - 2, -1, -1)]
    lengths = np.full(len(visits), PROBED_STEPS // len(visits))
    # The remaining steps go to the outer blocks, symmetrically, and to the middle one.
    left = PROBED_STEPS - int(lengths.sum())
    for index in range(left // 2):
        lengths[[index, -1 - index]] += 1
    lengths[len(visits) // 2] += left % 2
    return ProbeSchedule(plans=tuple(plans), plan_of_step=np.repeat(visits, lengths).astype(np.int64))


def _spanning_plans(gradients: Gradients) -> list[Buckets]:
    """Return DDP's default, one bucket, many small ones, and plans in between, the most informative first."""
    smallest = max(_SMALLEST_CAP_BYTES, gradients.total_bytes // _MAX_BUCKETS)
    caps = np.geomspace(smallest, max(smallest, gradients.total_bytes / 2), _PLANS * 2 - 1).astype(np.int64)
    first = [default_plan(gradients).buckets, fill_plan(gradients, [int(smallest)]), fill_plan(gradients, [NO_LIMIT])]
    middle_first = sorted(range(len(caps)), key=lambda index: (index % 3 != 1, abs(index - len(caps) // 2)))
    plans: list[Buckets] = []
    for plan in [*first, *(fill_plan(gradients, [int(caps[index])]) for index in middle_first)]:
        if plan not in plans:
            plans.append(plan)
    return plans

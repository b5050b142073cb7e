"""The cost of an all-reduce by size, fitted to recorded all-reduces, a calibration, or both.

A straight line through all sizes is wrong where it matters, because small messages fit into the burst of a rate limiter
and large ones exceed the caches. So the cost is a table of medians, made monotone and interpolated between measured
sizes, as straight as a line of latency and bandwidth is, ``alpha + beta x bytes``. Outside of them it follows such a
line, and so it does where the line predicts each size better than the sizes next to it do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from overlapscope.bucket_model.observation import Spans
from overlapscope.bucket_model.partition import Float64Array
from overlapscope.errors import OverlapScopeError

# A line of latency and time per byte, fitted robustly against outliers. Neither coefficient is ever negative.

_ROUNDS: Final = 30
_SMALLEST_RESIDUAL: Final = 1e-4
"""Share of the time below which residuals count alike; otherwise a single point would determine the fit."""


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """Time as a line in bytes: ``alpha + beta x bytes``."""

    alpha_ns: float
    beta_ns: float
    """Nanoseconds per byte."""

    def time_ns(self, bytes_: npt.ArrayLike) -> Float64Array:
        """Return the times of sizes, an array of any shape."""
        return self.alpha_ns + self.beta_ns * np.asarray(bytes_, dtype=np.float64)


ZERO_COST: Final = CostLine(alpha_ns=0.0, beta_ns=0.0)
"""Cost of an operation that takes no time."""


def fit_line(bytes_: Float64Array, times_ns: Float64Array, weights: Float64Array | None = None) -> CostLine:
    """Fit the line with the smallest sum of absolute relative errors.

    Args:
        bytes_: (N,)
        times_ns: (N,) times; those that are not positive are ignored, and without any other the line is 0.
        weights: (N,) weight of each; equal if not given.
    """
    usable = (times_ns > 0) & np.isfinite(times_ns)
    if not usable.any():
        return ZERO_COST
    x, y = bytes_[usable], times_ns[usable]
    counts = np.ones(len(x)) if weights is None else weights[usable]
    if np.ptp(x) == 0:
        time_ns = float(np.median(y))
        return (
            CostLine(alpha_ns=0.0, beta_ns=time_ns / float(x[0]))
            if x[0] > 0
            else CostLine(alpha_ns=time_ns, beta_ns=0.0)
        )
    weight = counts / y**2
    alpha = beta = 0.0
    for _ in range(_ROUNDS):  # iteratively reweighted least squares approximates least absolute errors
        alpha, beta = _least_squares(x, y, weight)
        residuals = np.abs(alpha + beta * x - y) / y
        weight = counts / y**2 / np.maximum(residuals, _SMALLEST_RESIDUAL)
    return CostLine(alpha_ns=alpha, beta_ns=beta)


def _least_squares(x: Float64Array, y: Float64Array, weight: Float64Array) -> tuple[float, float]:
    total = weight.sum()
    mean_x, mean_y = (weight * x).sum() / total, (weight * y).sum() / total
    beta = float((weight * (x - mean_x) * (y - mean_y)).sum() / (weight * (x - mean_x) ** 2).sum())
    alpha = float(mean_y - beta * mean_x)
    if beta < 0:
        return float(mean_y), 0.0
    if alpha < 0:
        return 0.0, float((weight * x * y).sum() / (weight * x * x).sum())
    return alpha, beta


Algorithm = Literal["ring", "tree"]

_SAME_SIZE: Final = 1.05
"""Sizes whose ratio is at most this count as the same size."""
_NEAR_SIZE: Final = 2.0
"""Ratio at which sizes still inform each other: one standard deviation, as a factor."""
_MIN_SIZE_RATIO: Final = 3.0
"""Smallest ratio of the largest to the smallest size that distinguishes latency from bandwidth."""
_MAX_LATENCY_SHARE: Final = 0.6
"""Largest share of the smallest measured all-reduce that is taken for latency, if nothing is known about it."""
_MAX_ROUND_NS: Final = 10e6
"""Longest latency of a round that is assumed then, that of links across a continent."""
_MAD_TO_SIGMA: Final = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
ERROR_OF_MEDIAN: Final = 1.2533
"""Factor from the standard error of a mean to that of a median."""
_MIN_SIZES_TO_CHOOSE: Final = 4
"""Number of sizes from which it can be told whether their times follow a line."""
_MIN_LEFT_OUT: Final = 0.1
"""Smallest share of a size's own error that is left in the fit."""
_NEARLY_ZERO_NS: Final = 1e-9
_CALIBRATION_WEIGHT: Final = 2.0
"""Weight of a calibration, in recorded all-reduces of one size."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CollectiveCost:
    """Time of an all-reduce of ``world_size`` ranks by size, with nothing else running."""

    world_size: int
    sizes_bytes: Float64Array
    """(K,) measured sizes, ascending."""
    times_ns: Float64Array
    """(K,) times of the measured sizes, never decreasing."""
    line: CostLine
    """Latency and time per byte, used outside the measured sizes, where it is scaled to join them."""
    is_identifiable: bool
    """True if the sizes are far enough apart to distinguish latency from bandwidth."""

    def time_ns(self, bytes_: npt.ArrayLike) -> Float64Array:
        """Return the times of sizes, an array of any shape."""
        sizes = np.asarray(bytes_, dtype=np.float64)
        inside = np.clip(sizes, self.sizes_bytes[0], self.sizes_bytes[-1])
        times = np.interp(inside, self.sizes_bytes, self.times_ns)
        scaled: Float64Array = times * (self.line.time_ns(sizes) / self.line.time_ns(inside))
        return scaled

    @property
    def alpha_ns(self) -> float:
        """Return the latency: the time of an arbitrarily small all-reduce."""
        return min(self.line.alpha_ns, float(self.times_ns[0]))

    def extrapolate(self, world_size: int, algorithm: Algorithm = "ring") -> CollectiveCost:
        """Extrapolate the cost to another number of ranks on links like these.

        A ring takes 2 (N - 1) rounds and sends 2 (N - 1) / N of the bytes over each link; a tree takes 2 log2 N rounds.
        From 2 to 4 ranks, the latency of a ring is multiplied by 6 / 2 = 3 and its time per byte by (3/4) / (1/2) =
        1.5.

        Raises:
            OverlapScopeError: One of the two world sizes is less than 2.
        """
        if min(self.world_size, world_size) < 2:
            raise OverlapScopeError(
                f"an all-reduce of {self.world_size} ranks says nothing about one of {world_size}: both need at least 2"
            )
        rounds = _latency_rounds(world_size, algorithm) / _latency_rounds(self.world_size, algorithm)
        share = (1 - 1 / world_size) / (1 - 1 / self.world_size)
        return replace(self.scale(latency=rounds, byte_time=share), world_size=world_size)

    def scale(self, *, latency: float = 1.0, byte_time: float = 1.0) -> CollectiveCost:
        """Return the cost if latency and the time of the bytes were multiplied by these factors.

        Half the time of the bytes is links of twice the bandwidth; 0 and 0 are all-reduces that take no time.
        """
        alpha_ns = self.alpha_ns
        times_ns = latency * alpha_ns + byte_time * (self.times_ns - alpha_ns)
        return replace(
            self,
            # Not zero, because the line is a divisor.
            times_ns=np.maximum(times_ns, _NEARLY_ZERO_NS),
            line=CostLine(
                alpha_ns=max(latency * self.line.alpha_ns, _NEARLY_ZERO_NS), beta_ns=byte_time * self.line.beta_ns
            ),
        )

    def halve_bytes(self) -> CollectiveCost:
        """Return the cost of gradients that are sent in half of their bytes, as by an fp16 compression hook."""
        line = CostLine(alpha_ns=self.line.alpha_ns, beta_ns=self.line.beta_ns / 2)
        return replace(self, sizes_bytes=2 * self.sizes_bytes, line=line)


def fit_cost(samples: Spans | None, world_size: int, calibration: Spans | None = None) -> CollectiveCost:
    """Fit the cost to recorded all-reduces, a calibration, or both.

    With both, the calibration gives the shape, and recorded all-reduces correct their own and nearby sizes.

    Args:
        samples: Bytes and transfer times, without waits and queues (see ``transfers``).
        world_size: Number of ranks that were measured.
        calibration: Bytes and transfer times, measured with nothing else running.

    Raises:
        OverlapScopeError: There is neither a usable sample nor a calibration.
    """
    samples, calibration = _usable_spans(samples), _usable_spans(calibration)
    if calibration is None or samples is None:
        spans = calibration or samples
        if spans is None:
            raise OverlapScopeError(
                "the recording has no usable all-reduce: record some more steps, or run overlapscope calibrate"
            )
        return _fit_sizes(_group_by_size(spans), world_size)
    base = _fit_sizes(_group_by_size(calibration), world_size)
    seen = _group_by_size(replace(samples, time_ns=samples.time_ns / base.time_ns(samples.bytes)))
    usual = _weighted_median(seen.times, seen.counts)
    # Nearby sizes have nearly the same ratio; where few were recorded, the ratio tends to the median one.
    near = seen.counts * np.exp(-0.5 * (np.log(seen.bytes[:, None] / seen.bytes) / np.log(_NEAR_SIZE)) ** 2)
    counts = near.sum(axis=1)
    ratios = np.exp(near @ np.log(seen.times / usual) / (counts + _CALIBRATION_WEIGHT)) * usual
    nodes = np.union1d(base.sizes_bytes, seen.bytes)
    times_ns = base.time_ns(nodes) * np.exp(np.interp(np.log(nodes), np.log(seen.bytes), np.log(ratios)))
    return _fit_sizes(_Sizes(nodes, times_ns, np.ones(len(nodes)), np.zeros(len(nodes))), world_size)


def draw_cost(
    samples: Spans | None, world_size: int, calibration: Spans | None, random: np.random.Generator
) -> CollectiveCost:
    """Draw a cost that is as likely as the fitted one, by fitting cycles resampled from the recorded ones.

    Where all sizes are nearly the same, each draw assumes another latency.
    """
    cost = fit_cost(_resample_cycles(samples, random), world_size, _resample_cycles(calibration, random))
    if cost.is_identifiable:
        return cost
    alpha_ns = float(random.uniform(0, _max_latency_ns(cost.times_ns, world_size)))
    return replace(cost, line=_line_with_latency(cost.sizes_bytes, cost.times_ns, alpha_ns))


class _Sizes(NamedTuple):
    """Measurements grouped by size, arrays of length K."""

    bytes: Float64Array
    times: Float64Array
    """Median time of each size."""
    counts: Float64Array
    errors: Float64Array
    """Standard error of the logarithm of each time."""


def _fit_sizes(sizes: _Sizes, world_size: int) -> CollectiveCost:
    is_identifiable = bool(sizes.bytes[-1] >= _MIN_SIZE_RATIO * sizes.bytes[0])
    if is_identifiable:
        line = fit_line(sizes.bytes, sizes.times, sizes.counts)
        is_straight = _does_line_predict_better(sizes, line)
        times_ns = line.time_ns(sizes.bytes) if is_straight else _shrink_to_line(sizes, line)
        times_ns = _monotone(times_ns, sizes.counts)
    else:
        times_ns = _monotone(sizes.times, sizes.counts)
        line = _line_with_latency(sizes.bytes, times_ns, _max_latency_ns(times_ns, world_size) / 2)
    return CollectiveCost(
        world_size=world_size,
        sizes_bytes=sizes.bytes,
        times_ns=times_ns,
        line=line,
        is_identifiable=is_identifiable,
    )


def _does_line_predict_better(sizes: _Sizes, line: CostLine) -> bool:
    """Return whether the line predicts each size better than the sizes next to it do, each size left out in turn.

    What keeps a size off the line is either of the link, as a burst or caches, and then its neighbors are off alike; or
    of that size alone, as what ran beside its few all-reduces, and then it says nothing of other sizes.
    """
    if len(sizes.bytes) < _MIN_SIZES_TO_CHOOSE:
        return False
    at, off_line = np.log(sizes.bytes), np.log(sizes.times / line.time_ns(sizes.bytes))
    weight = sizes.counts / sizes.times**2  # of relative errors
    from_mean = sizes.bytes - np.average(sizes.bytes, weights=weight)
    leverage = weight * (1 / weight.sum() + from_mean**2 / (weight * from_mean**2).sum())
    off_line_without = off_line / np.maximum(1 - leverage, _MIN_LEFT_OUT)
    others = ~np.eye(len(at), dtype=bool)
    beside = [np.interp(at[index], at[which], off_line[which]) for index, which in enumerate(others)]
    of_line = np.average(np.abs(off_line_without), weights=sizes.counts)
    return bool(of_line <= np.average(np.abs(off_line - beside), weights=sizes.counts))


def _shrink_to_line(sizes: _Sizes, line: CostLine) -> Float64Array:
    """Shrink uncertain times toward the line, as far as the other sizes agree with it."""
    off_line = np.log(sizes.times / line.time_ns(sizes.bytes))
    beyond_errors = max(0.0, float(np.average(off_line**2 - sizes.errors**2, weights=sizes.counts)))
    trust = beyond_errors / np.maximum(beyond_errors + sizes.errors**2, 1e-12)
    times: Float64Array = line.time_ns(sizes.bytes) * np.exp(np.where(sizes.errors > 0, trust, 1.0) * off_line)
    return times


def _max_latency_ns(times_ns: Float64Array, world_size: int) -> float:
    return min(_MAX_LATENCY_SHARE * float(times_ns[0]), _MAX_ROUND_NS * _latency_rounds(world_size, "ring"))


def _line_with_latency(sizes: Float64Array, times_ns: Float64Array, alpha_ns: float) -> CostLine:
    return CostLine(alpha_ns=alpha_ns, beta_ns=float(np.median((times_ns - alpha_ns) / sizes)))


def _group_by_size(spans: Spans) -> _Sizes:
    order = np.argsort(spans.bytes, kind="stable")
    sizes, times_ns, cycles = spans.bytes[order], spans.time_ns[order], spans.cycle[order]
    starts = [0]
    for index, size in enumerate(sizes.tolist()):
        if size > _SAME_SIZE * sizes[starts[-1]]:
            starts.append(index)
    groups = list(zip(starts, [*starts[1:], len(sizes)], strict=True))
    counts = np.array([end - first for first, end in groups])
    medians = np.array([np.median(times_ns[first:end]) for first, end in groups])
    # A link is fast or slow for a whole cycle, so only measurements of other cycles are independent.
    in_cycles = np.array([len(np.unique(cycles[first:end])) for first, end in groups])
    spread = _MAD_TO_SIGMA * np.median(np.abs(np.log(times_ns / np.repeat(medians, counts))))
    return _Sizes(
        bytes=np.array([np.exp(np.mean(np.log(sizes[first:end]))) for first, end in groups]),
        times=medians,
        counts=counts.astype(np.float64),
        errors=ERROR_OF_MEDIAN * spread / np.sqrt(in_cycles),
    )


def _monotone(times_ns: Float64Array, weights: Float64Array) -> Float64Array:
    """Compute the nearest non-decreasing times by pooling adjacent violators.

    Example: times 1, 3, 2, 5 with equal weights give 1, 2.5, 2.5, 5.
    """
    pools: list[list[float]] = []  # time, weight, number of members
    for time_ns, weight in zip(times_ns.tolist(), weights.tolist(), strict=True):
        pools.append([time_ns, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            late = pools.pop()
            early = pools[-1]
            total = early[1] + late[1]
            pools[-1] = [(early[0] * early[1] + late[0] * late[1]) / total, total, early[2] + late[2]]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def _weighted_median(values: Float64Array, weights: Float64Array) -> float:
    order = np.argsort(values)
    filled = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(filled, filled[-1] / 2)])


def _usable_spans(spans: Spans | None) -> Spans | None:
    if spans is None:
        return None
    usable = (spans.bytes > 0) & (spans.time_ns > 0) & np.isfinite(spans.time_ns)
    return spans.select(usable) if usable.any() else None


def _resample_cycles(spans: Spans | None, random: np.random.Generator) -> Spans | None:
    spans = _usable_spans(spans)
    if spans is None:
        return None
    cycles, member = np.unique(spans.cycle, return_inverse=True)
    times = np.bincount(random.integers(len(cycles), size=len(cycles)), minlength=len(cycles))
    return spans.select(np.repeat(np.arange(len(member)), times[member]))


def _latency_rounds(world_size: int, algorithm: str) -> float:
    return 2.0 * (world_size - 1) if algorithm == "ring" else 2.0 * float(np.log2(world_size))

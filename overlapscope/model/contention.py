"""How much compute and communication slow each other down, from plans under which they met differently.

The right slowdown is the one that explains the difference away: once it is taken out, the same gradients take the
same time to compute, and messages of the same size the same time to travel, whether or not the other was going on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.model.line import Line, fit_line
from overlapscope.model.partition import Float64Array, Int64Array
from overlapscope.model.transfers import Transfers
from overlapscope.model.work import Backward

_SLOWDOWNS: Final = np.round(np.arange(1.0, 3.0001, 0.02), 2)
"""What is tried."""
_STRETCHES: Final = 12
"""Of backward, which are compared across cycles. Between two gradients alone there may be next to no time."""
_ENOUGH_CONTRAST: Final = 0.1
"""Standard deviation of the share of a stretch in which something was in flight."""
_UNKNOWN_HIGH: Final = {"compute": 1.5, "communication": 1.2}
"""As far as a slowdown may go that the recording does not show."""
_FEWEST_CYCLES: Final = 4
_DRAWS: Final = 40
_ABOUT_THE_SAME_SIZE: Final = 1.5
_FEWEST_TRANSFERS: Final = 6


@dataclass(frozen=True, eq=False, kw_only=True)
class Slowdown:
    """A factor of 1 or more."""

    value: float
    is_known: bool
    """If not, the recording does not tell it, and 1 is assumed."""
    draws: Float64Array
    """(D,) as likely values."""

    @property
    def interval(self) -> tuple[float, float]:
        """In which it lies nine times out of ten."""
        low, high = np.quantile(self.draws, [0.05, 0.95])
        return float(low), float(high)


def compute_slowdown_of(backward: Backward) -> Slowdown:
    """How much slower compute is while an all-reduce is in flight."""
    random = np.random.default_rng(0)
    if len(backward.start_ns) < _FEWEST_CYCLES:
        return _unknown(random, "compute")
    durations, shares = _stretches(backward)
    weights = np.median(durations, axis=0)
    contrast = np.sqrt((shares.var(axis=0) * weights).sum() / max(weights.sum(), 1.0))
    if contrast < _ENOUGH_CONTRAST:
        return _unknown(random, "compute")
    # log of the pure time, by slowdown, cycle and stretch
    pure = np.log(np.maximum(durations, 1.0)) + np.log1p(-(1 - 1 / _SLOWDOWNS)[:, None, None] * shares)

    def best(cycles: Int64Array) -> float:
        drawn = pure[:, cycles]
        spread = np.abs(drawn - np.median(drawn, axis=1, keepdims=True)).mean(axis=1)
        return float(_SLOWDOWNS[np.argmin(spread @ weights)])

    every = np.arange(len(durations))
    draws = [best(random.choice(every, size=len(every))) for _ in range(_DRAWS)]
    return Slowdown(value=best(every), is_known=True, draws=np.array(draws))


def communication_slowdown_of(transfers: Transfers, line: Line | None = None) -> Slowdown:
    """How much slower an all-reduce progresses while a rank computes.

    Args:
        line: what an all-reduce costs, nearly, to compare sizes that differ a little; fitted if not given.
    """
    random = np.random.default_rng(0)
    usable = transfers.spans.time_ns > 0
    bytes_, time_ns = transfers.spans.bytes[usable], transfers.spans.time_ns[usable]
    hidden, cycle = transfers.hidden_share[usable], transfers.spans.cycle[usable]
    if not len(bytes_):
        return _unknown(random, "communication")
    line = line or fit_line(bytes_, time_ns)
    size = np.floor(np.log(bytes_ / bytes_.min()) / np.log(_ABOUT_THE_SAME_SIZE)).astype(np.int64)
    telling = np.zeros(len(size), dtype=bool)
    for group in np.unique(size):
        of_size = size == group
        telling |= of_size & (of_size.sum() >= _FEWEST_TRANSFERS) & (np.std(hidden[of_size]) > 2 * _ENOUGH_CONTRAST)
    if not telling.any():
        return _unknown(random, "communication")
    size, cycle = size[telling], cycle[telling]
    pure = np.log(time_ns[telling] / line.time_ns(bytes_[telling])) + np.log1p(
        -(1 - 1 / _SLOWDOWNS)[:, None] * hidden[telling]
    )

    def best(rows: Int64Array) -> float:
        spread = np.zeros(len(_SLOWDOWNS))
        for group in np.unique(size[rows]):
            drawn = pure[:, rows[size[rows] == group]]
            spread += np.abs(drawn - np.median(drawn, axis=1, keepdims=True)).sum(axis=1)
        return float(_SLOWDOWNS[np.argmin(spread)])

    draws = []
    cycles = np.unique(cycle)
    for _ in range(_DRAWS):
        times = np.bincount(random.choice(cycles, size=len(cycles)), minlength=cycles[-1] + 1)
        draws.append(best(np.repeat(np.arange(len(cycle)), times[cycle])))
    return Slowdown(value=best(np.arange(len(cycle))), is_known=True, draws=np.array(draws))


def _stretches(backward: Backward) -> tuple[Float64Array, Float64Array]:
    """Backward in some stretches, the same in all cycles: their time, and the share of it with something in flight.

    Returns:
        (S, K) and (S, K), of all stretches of all ranks.
    """
    work, busy_ns = backward.freed_of(compute_slowdown=1.0), backward.busy_ns
    middle_ns = np.median(work.ready_ns - work.start_ns[:, :, None], axis=(0, 1))
    wanted = np.linspace(0, 1, _STRETCHES + 1)[1:-1] * np.median(work.end_ns - work.start_ns)
    places = np.unique(np.clip(np.searchsorted(middle_ns, wanted), 0, len(middle_ns) - 1))
    cycles, ranks = work.start_ns.shape
    marks = np.concatenate([work.start_ns[:, :, None], work.ready_ns[:, :, places], work.end_ns[:, :, None]], axis=2)
    busy = np.concatenate([np.zeros((cycles, ranks, 1)), busy_ns[:, :, places], busy_ns[:, :, -1:]], axis=2)
    durations = np.diff(marks, axis=2).reshape(cycles, -1)
    shares = np.diff(busy, axis=2).reshape(cycles, -1) / np.maximum(durations, 1.0)
    return durations, np.clip(shares, 0.0, 1.0)


def _unknown(random: np.random.Generator, what: str) -> Slowdown:
    return Slowdown(value=1.0, is_known=False, draws=random.uniform(1.0, _UNKNOWN_HIGH[what], size=_DRAWS))

"""What a step of a sharded model took: compute between collectives, and each collective's transfer and overhead.

Arrays are nanoseconds by step and rank (S, R). A collective's *transfer* is the time from the arrival of the last rank
to the end on a rank; its *overhead* is what the rank does for it besides, such as copies out of the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.sharded_model.model import Unit
from overlapscope.sharded_model.program import Pass

Float64Array = npt.NDArray[np.float64]

LATENCY_SAVED: Final = 0.5
"""Share of the line's latency that is taken to be saved where one collective replaces several. That one is larger than
all recorded ones, and of what the line takes for latency a part grows with size: ``benchmarks/sharded_advice.py``."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Time of a collective by its size: ``alpha_ns + bytes * beta_ns_per_byte``."""

    alpha_ns: float
    beta_ns_per_byte: float
    alpha_error_ns: float
    """Standard error of alpha: how little is known of what it costs to send more or fewer messages."""

    def time_ns(self, bytes_: float) -> float:
        """Return the time of a size."""
        return self.alpha_ns + self.beta_ns_per_byte * bytes_

    def times(self, alpha_factor: float, beta_factor: float) -> Line:
        """Return the line of another number of ranks."""
        return Line(
            alpha_ns=alpha_factor * self.alpha_ns,
            beta_ns_per_byte=beta_factor * self.beta_ns_per_byte,
            alpha_error_ns=alpha_factor * self.alpha_error_ns,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class PartTimes:
    """What one kind of collective took for each part that was recorded."""

    transfer_ns: Mapping[int, Float64Array]
    """(S, R) By part."""
    overhead_ns: Mapping[int, Float64Array]
    """(S, R) By part."""
    line: Line
    """Mean transfer by size."""
    bytes: Mapping[int, int]
    """Size by part, of all parts."""

    def without(self, part: int) -> PartTimes:
        """Return the same with one part's collectives taking no time once all ranks have arrived."""
        return replace(
            self,
            transfer_ns={**self.transfer_ns, part: np.zeros((1, 1))},
            overhead_ns={**self.overhead_ns, part: np.zeros((1, 1))},
        )

    def transfer_of(self, unit: Unit) -> Float64Array | float:
        """Return the transfer of a unit: that of its parts, less a share of what one saves over several by the line.

        The noise of steps and ranks is that of the parts. A part without a record has the line's time.
        """
        own = sum(self.transfer_ns.get(part, self.line.time_ns(self.bytes[part])) for part in unit)
        if len(unit) == 1:
            return own
        total = self.line.time_ns(sum(self.bytes[part] for part in unit))
        apart = sum(self.line.time_ns(self.bytes[part]) for part in unit)
        return own * (1 - LATENCY_SAVED * (1 - total / apart)) if apart > 0 else own

    def overhead_of(self, unit: Unit) -> Float64Array | float:
        """Return the overhead of a unit, which grows with its bytes."""
        known = sum(float(each.mean()) for each in self.overhead_ns.values())
        known_bytes = sum(self.bytes[part] for part in self.overhead_ns)
        per_byte = known / known_bytes if known_bytes else 0.0
        return sum(self.overhead_ns.get(part, per_byte * self.bytes[part]) for part in unit)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedTimes:
    """The times of S steps on R ranks."""

    start_ns: Float64Array
    """(S, R) When each rank starts the step, from the start of the first."""
    before_ns: Float64Array
    """(S, R) From the start of the step to the forward pass."""
    forward_ns: Float64Array
    """(S, R, G) Compute by segment, see ``program.segment_count``."""
    backward_ns: Float64Array
    """(S, R, G) Compute by segment."""
    after_ns: Float64Array
    """(S, R) From the last gradient to the end of the step."""
    gathers: Mapping[Pass, PartTimes]
    reduces: PartTimes
    """Reduce-scatters, or all-reduces if there are no shards."""
    replica_reduces: PartTimes | None
    """All-reduces among the replicas of shards."""
    shard_groups: tuple[tuple[int, ...], ...]
    """Indices of the ranks that share one set of parameters."""
    replica_groups: tuple[tuple[int, ...], ...]
    """Indices of the ranks that have the same shards."""
    blocks_host: bool
    """True if a rank waits where it launches, as over gloo; on a device, streams wait."""
    coreless_share: float = 0.0
    """Share of the time in which a rank's main thread was ready to run and had no core; 0 where that is unknown."""


def fit_line(bytes_: Float64Array, time_ns: Float64Array) -> Line:
    """Fit a line to mean times (K,) by size (K,), with neither latency nor time per byte below 0.

    Without two sizes that differ, nothing is known of the latency: it may be anything from none to all.

    Example: sizes 10 and 20 with times 25 and 45 give 5 + 2 per byte.
    """
    if len(bytes_) == 0:
        return Line(alpha_ns=0.0, beta_ns_per_byte=0.0, alpha_error_ns=0.0)
    spread = bytes_ - bytes_.mean()
    power = float((spread**2).sum())
    if power <= (0.01 * bytes_.mean()) ** 2:
        mean_ns = float(time_ns.mean())
        return Line(alpha_ns=0.0, beta_ns_per_byte=mean_ns / max(float(bytes_.mean()), 1.0), alpha_error_ns=mean_ns / 2)
    beta = max(0.0, float((spread * time_ns).sum()) / power)
    alpha = float(time_ns.mean() - beta * bytes_.mean())
    if alpha < 0:
        alpha, beta = 0.0, float((bytes_ * time_ns).sum() / (bytes_**2).sum())
    residual = time_ns - alpha - beta * bytes_
    freedom = max(1, len(bytes_) - 2)
    error = np.sqrt(float((residual**2).sum()) / freedom * (1 / len(bytes_) + float(bytes_.mean()) ** 2 / power))
    return Line(alpha_ns=alpha, beta_ns_per_byte=beta, alpha_error_ns=float(error))

"""What other settings of ``fully_shard`` would gain: each is a replay of the recorded steps with another program.

A gain is the difference of two replays of the same steps, so what a replay leaves out mostly cancels. Its interval is
that of the mean of these differences, widened by what the recording can't tell: how much quicker one large collective
is than two small ones, how much what then runs at the same time slows each other down, and what the model leaves out.
Other numbers of shards are taken to be exchanged over links like those recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from overlapscope.interval import SIGMAS_90, Interval
from overlapscope.sharded_model.mesh import list_shard_counts, with_shards
from overlapscope.sharded_model.model import Settings, ShardedModel, merge_all, merge_units, with_prefetch
from overlapscope.sharded_model.program import PASSES, Op, build_program, find_peak_bytes
from overlapscope.sharded_model.schedule import NO_CONTENTION, Contention, simulate
from overlapscope.sharded_model.times import LATENCY_SAVED, Float64Array, ShardedTimes

MIN_GAIN: Final = 0.01
"""Minimum share of the step time for which a change is worth its effort."""
DEPTHS: Final = (1, 2, 3)
"""Numbers of units to prefetch that are tried."""
MERGED: Final = (2, 4)
"""Numbers of units to gather together that are tried."""
USUAL_CONTENTION: Final = Contention(compute_slowdown=1.25, lanes=2, lane_slowdown=1.6)
"""Assumed of hosts that wait where they launch, so that nothing has run at the same time, and that have cores enough
(``assume_contention``). Compute is as in ``overlapscope.bucket_model.contention``. Gloo has two threads for
collectives. Two at a time take less than one after the other, as only their bytes share the link."""
LEAST_CONTENTION: Final = Contention(compute_slowdown=1.0, lanes=2, lane_slowdown=1.4)
MOST_CONTENTION: Final = Contention(compute_slowdown=1.5, lanes=2, lane_slowdown=2.0)
LARGER_MESSAGES: Final = 0.1
"""Share by which collectives that are larger than all recorded ones may take longer than their bytes say: they exceed
caches, and the burst that a rate limiter lets pass."""
MODEL_ERROR: Final = 0.2
"""Share of any gain by which it may be off. This and contention are as measured by ``benchmarks/sharded_advice.py``."""
LINK_DIFFERENCE: Final = 0.25
"""Share of the gain of another mesh by which it may be off, as its links may differ from those recorded."""

Kind = Literal["prefetch", "async", "reshard", "wrap", "whole", "mesh"]


@dataclass(frozen=True, kw_only=True)
class ShardingChange:
    """Other settings, and what they are predicted to gain."""

    kind: Kind
    settings: Settings
    depth: int = 0
    """Units that are prefetched; 0 for torch's default."""
    merged: int = 1
    """Recorded units that are gathered together."""
    shards: int = 0
    """Ranks that parameters are sharded over, each shard with replicas; 0 for the present number."""
    step_ns: Interval
    """Predicted mean step."""
    gain: Interval
    """Share of the mean step that it saves; negative if it takes longer."""
    extra_bytes: int
    """Additional bytes of gathered parameters that a rank holds at its peak."""


@dataclass(frozen=True, kw_only=True)
class ShardedAdvice:
    """Predictions of other settings, the best first."""

    model: ShardedModel
    settings: Settings
    """As recorded."""
    changes: tuple[ShardingChange, ...]
    step_ns: Interval
    """Recorded mean step."""
    replayed_ns: float
    """The same, replayed: how far the replay is off."""
    peak_bytes: int
    """Bytes of gathered parameters that a rank holds at its peak with the recorded settings."""
    steps: tuple[int, ...]
    ranks: int
    blocks_host: bool
    """True if ranks wait where they launch, as over gloo."""
    exposed: tuple[UnitCost, ...]
    """What each part's communication costs, in the order of the forward."""

    @property
    def best(self) -> ShardingChange | None:
        """Return the change that gains most and surely enough; None if none does."""
        worth_it = [change for change in self.changes if change.gain.low >= MIN_GAIN]
        return max(worth_it, key=lambda change: change.gain.value, default=None)


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """Communication of one part: what the mean step would save without it, the rest as recorded."""

    name: str
    bytes: int
    forward_gather_ns: float
    backward_gather_ns: float
    reduce_ns: float


def advise_on_settings(
    model: ShardedModel, settings: Settings, times: ShardedTimes, *, steps: Sequence[int], step_ns: Interval
) -> ShardedAdvice:
    """Predict the step with other settings.

    Args:
        settings: Those that the times were recorded with.
        steps: Numbers of the steps.
        step_ns: Recorded mean step.
    """
    program = build_program(model, settings)
    now_ns = simulate(times, program, settings)
    peak_bytes = find_peak_bytes(model, program)

    def predict(
        kind: Kind, depth: int, merged: int, other: Settings, times_of_it: ShardedTimes, shards: int
    ) -> ShardingChange:
        other_program = build_program(model, other)
        hides_more = other.is_async and not settings.is_async
        gain = predict_gain(now_ns, times_of_it, other_program, other, hides_more=hides_more)
        if merged > 1:
            gain = gain.widen(_latency_error(model, times, settings, other) / float(now_ns.mean()))
            longer_ns = LARGER_MESSAGES * _merged_transfer_ns(times, other_program)
            gain = replace(gain, low=gain.low - longer_ns / float(now_ns.mean()))
        extra_bytes = find_peak_bytes(model, other_program) - peak_bytes
        if shards:
            gain = gain.widen(LINK_DIFFERENCE * abs(gain.value))
            total = model.gather_bytes(tuple(range(len(model.parts))))
            extra_bytes += total // shards - total // len(times.shard_groups[0])
        return ShardingChange(
            kind=kind,
            settings=other,
            depth=depth,
            merged=merged,
            shards=shards,
            step_ns=Interval(
                value=step_ns.value * (1 - gain.value),
                low=step_ns.value * max(0.0, 1 - gain.high),
                high=step_ns.value * (1 - gain.low),
            ),
            gain=gain,
            extra_bytes=extra_bytes,
        )

    changes = [
        predict(kind, depth, merged, other, times, 0)
        for kind, depth, merged, other in list_candidates(model, settings, blocks_host=times.blocks_host)
        if other.is_async != settings.is_async or build_program(model, other) != program
    ]
    if len(times.shard_groups[0]) > 1:
        changes += [
            predict("mesh", 0, 1, settings, with_shards(times, shards), shards) for shards in list_shard_counts(times)
        ]
    return ShardedAdvice(
        model=model,
        settings=settings,
        changes=tuple(sorted(changes, key=lambda change: -change.gain.value)),
        step_ns=step_ns,
        replayed_ns=float(now_ns.mean()),
        peak_bytes=peak_bytes,
        steps=tuple(steps),
        ranks=times.start_ns.shape[1],
        blocks_host=times.blocks_host,
        exposed=tuple(_unit_costs(model, times, settings, now_ns)),
    )


def list_candidates(
    model: ShardedModel, settings: Settings, *, blocks_host: bool
) -> Iterator[tuple[Kind, int, int, Settings]]:
    """Generate the settings that are tried: kind, depth of prefetching, number of units that are merged, settings.

    On hosts prefetching without ``_set_unshard_async_op`` only moves waits, so it is tried with it alone.
    """
    count = len(settings.units)
    if any(part.gather_bytes for part in model.parts):
        if blocks_host:
            yield "async", 0, 1, replace(settings, is_async=True)
        kept = replace(settings, reshards=(not any(settings.reshards),) * count)
        yield "reshard", 0, 1, kept
    if not model.is_nested:
        yield from _list_for_flat(model, settings, blocks_host=blocks_host)
    if count:
        yield "whole", 0, count, merge_all(settings)


def _list_for_flat(
    model: ShardedModel, settings: Settings, *, blocks_host: bool
) -> Iterator[tuple[Kind, int, int, Settings]]:
    """Generate the settings that are tried where no unit is within another: prefetching, and larger units."""
    count = len(settings.units)
    kind: Kind = "async" if blocks_host else "prefetch"
    if any(part.gather_bytes for part in model.parts):
        for depth in DEPTHS:
            if depth < max(2, count):
                yield kind, depth, 1, replace(with_prefetch(settings, depth), is_async=settings.is_async or blocks_host)
        if blocks_host and any(settings.reshards):
            kept = replace(settings, reshards=(False,) * count)
            yield "async", 1, 1, replace(with_prefetch(kept, 1), is_async=True)
    for merged in MERGED:
        if merged < count:
            yield "wrap", 0, merged, merge_units(settings, merged)


def predict_gain(
    now_ns: Float64Array, times: ShardedTimes, program: Sequence[Op], settings: Settings, *, hides_more: bool
) -> Interval:
    """Return the share that is saved, by pairs of steps (S,), with an interval of the mean of correlated steps.

    Args:
        now_ns: Steps with the recorded settings, replayed.
        times: Those that the other settings have.
        program: What ranks do with the other settings.
        settings: The other settings.
        hides_more: True if communication begins to run at the same time as other things.
    """
    usual, least, most = assume_contention(times.coreless_share) if hides_more else (NO_CONTENTION,) * 3
    saved_ns = now_ns - simulate(times, program, settings, usual)
    mean_ns, value_ns = float(now_ns.mean()), float(saved_ns.mean())
    half_ns = SIGMAS_90 * _mean_error(saved_ns)
    bounds_ns = [(1 - MODEL_ERROR) * value_ns, (1 + MODEL_ERROR) * value_ns]
    if hides_more:
        bounds_ns += [float((now_ns - simulate(times, program, settings, other)).mean()) for other in (most, least)]
    return Interval(
        value=value_ns / mean_ns,
        low=(min(bounds_ns) - half_ns) / mean_ns,
        high=(max(bounds_ns) + half_ns) / mean_ns,
    )


def assume_contention(coreless_share: float) -> tuple[Contention, Contention, Contention]:
    """Return the usual, the least and the most contention.

    The threads that transfer take cores from those that compute. Where these lack cores already, compute takes longer
    by the share of the time in which they do, and at most by twice that.
    """

    def add(contention: Contention, slowdown: float) -> Contention:
        return contention._replace(compute_slowdown=contention.compute_slowdown + slowdown)

    return add(USUAL_CONTENTION, coreless_share), LEAST_CONTENTION, add(MOST_CONTENTION, 2 * coreless_share)


def _mean_error(values: Float64Array) -> float:
    """Return the standard error of the mean of neighboring steps, whose correlation makes them count for fewer."""
    deviation = values - values.mean()
    power = float((deviation**2).sum())
    if not power:
        return 0.0
    correlation = min(0.9, max(0.0, float((deviation[1:] * deviation[:-1]).sum()) / power))
    return float(np.sqrt(power / (len(values) - 1) / len(values) * (1 + correlation) / (1 - correlation)))


def _latency_error(model: ShardedModel, times: ShardedTimes, settings: Settings, other: Settings) -> float:
    """Return by how much the latency that fewer collectives save is uncertain, in ns a step, for a 90 % interval."""
    error = 0.0
    kinds = (
        (times.gathers["forward"].line, "gather"),
        (times.reduces.line, "reduce"),
        *([(times.replica_reduces.line, "reduce")] if times.replica_reduces is not None else []),
    )
    for line, kind in kinds:
        fewer = abs(_count(model, settings, kind) - _count(model, other, kind))
        error += fewer * (SIGMAS_90 * line.alpha_error_ns + (1 - LATENCY_SAVED) * line.alpha_ns)
    return error


def _merged_transfer_ns(times: ShardedTimes, program: Sequence[Op]) -> float:
    """Return the time of the collectives of several parts, in nanoseconds a step."""
    merged = [op for op in program if op.kind in ("gather", "reduce") and len(op.unit) > 1]
    return sum(
        float(np.mean((times.reduces if op.kind == "reduce" else times.gathers[op.during]).transfer_of(op.unit)))
        for op in merged
    )


def _count(model: ShardedModel, settings: Settings, kind: str) -> int:
    return sum(op.kind == kind for op in build_program(model, settings))


def _unit_costs(
    model: ShardedModel, times: ShardedTimes, settings: Settings, now_ns: Float64Array
) -> Iterator[UnitCost]:
    """Generate what each part's communication costs: the step as recorded minus a replay in which it takes no time."""
    program = build_program(model, settings)

    def cost_ns(without: ShardedTimes) -> float:
        return float((now_ns - simulate(without, program, settings)).mean())

    for number, part in enumerate(model.parts):
        forward, backward = (
            replace(times, gathers={**times.gathers, during: times.gathers[during].without(number)})
            for during in PASSES
        )
        reduced = replace(
            times,
            reduces=times.reduces.without(number),
            replica_reduces=times.replica_reduces and times.replica_reduces.without(number),
        )
        yield UnitCost(
            name=part.name,
            bytes=part.gather_bytes or part.reduce_bytes,
            forward_gather_ns=cost_ns(forward),
            backward_gather_ns=cost_ns(backward),
            reduce_ns=cost_ns(reduced),
        )

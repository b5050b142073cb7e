"""Input of ``overlapscope.sharded_model`` from a recording, and its answers as advice.

Over gloo each wait of the host, a *finalize* phase, belongs to one gather or reduction of the program that torch runs
with the recorded settings; what is between two such phases is compute, divided further where an asynchronous gather is
launched and where the backward begins. Steps in which the order of collectives is
another one are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.arrivals import MatchedCollectives
from overlapscope.breakdown.spans import Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.sharded_model.changes import ShardedAdvice, advise_on_settings
from overlapscope.sharded_model.model import Part, Settings, ShardedModel
from overlapscope.sharded_model.program import PASSES, Op, Pass, build_program, segment_count
from overlapscope.sharded_model.times import Float64Array, PartTimes, StepTimes, fit_line
from overlapscope.text import count_of
from overlapscope.trace.description import FULLY_SHARD, describe_strategies
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS
from overlapscope.trace.sharding import Sharding, find_sharding

MIN_STEPS: Final = 5
"""Minimum number of steps to predict others from."""


def is_sharded(trace: Trace) -> bool:
    """Return whether the models of a recording were sharded by ``fully_shard``."""
    return describe_strategies(trace.run) == FULLY_SHARD


def advise_on_sharding(analysis: Analysis) -> ShardedAdvice:
    """Predict the step with other settings of ``fully_shard``.

    Raises:
        OverlapScopeError: The recording doesn't hold enough.
    """
    trace = analysis.trace
    model, settings, buckets = describe_model(trace)
    times, steps = extract_step_times(analysis, model, settings, buckets)
    return advise_on_settings(model, settings, times, steps=steps, step_ns=analysis.summary.mean.step)


def describe_model(trace: Trace) -> tuple[ShardedModel, Settings, tuple[int, ...]]:
    """Return the parts of the sharded model, its settings, and the bucket of each part.

    Raises:
        OverlapScopeError: It was recorded by a version that did not write settings, or several models are trained.
    """
    sharding = find_sharding(trace.run)
    if sharding is None or len(trace.run.get("models", ())) > 1:
        raise OverlapScopeError(
            f"{trace.path}: settings of fully_shard are predicted for one model, recorded with its settings: record "
            "it again with this version, alone"
        )
    collectives = trace.collectives
    rank, step = int(collectives["rank"].min()), _middle_step(collectives)
    seen = collectives[(collectives["rank"] == rank) & (collectives["step"] == step)].sort_values("launch_ns")
    order = _find_forward_order(sharding, seen)
    of_op = {
        op: dict(zip(rows["bucket"], rows["bytes"], strict=True)) for op, rows in seen.groupby("op", observed=True)
    }
    reduced = of_op.get("reduce_scatter") or of_op.get("all_reduce", {})
    reduced_order = seen.loc[seen["op"] == ("reduce_scatter" if "reduce_scatter" in of_op else "all_reduce"), "bucket"]
    late = _find_late(sharding, reduced_order.tolist())
    parts = tuple(
        Part(
            name=sharding.units[bucket].module,
            gather_bytes=int(of_op.get("all_gather", {}).get(bucket, 0)),
            reduce_bytes=int(reduced.get(bucket, 0)),
            parent=_find_parent(sharding, order, bucket),
            is_late=bucket in late,
        )
        for bucket in order
    )
    has_root = bool(order) and sharding.units[order[0]].is_root
    return ShardedModel(parts=parts, has_root=has_root), _read_settings(sharding, order, has_root=has_root), order


def _middle_step(collectives: pd.DataFrame) -> int:
    steps = np.unique(collectives["step"])
    return int(steps[len(steps) // 2])


def _find_forward_order(sharding: Sharding, seen: pd.DataFrame) -> tuple[int, ...]:
    """Return the buckets in the order in which the forward needs them, the root's first.

    It is that of the first gathers or, without gathers, the reverse of their numbers.
    """
    gathered = seen.loc[seen["op"] == "all_gather", "bucket"].drop_duplicates().tolist()
    order = [int(bucket) for bucket in gathered]
    order += [bucket for bucket in range(len(sharding.units) - 1, -1, -1) if bucket not in order]
    return tuple(sorted(order, key=lambda bucket: not sharding.units[bucket].is_root))


def _find_parent(sharding: Sharding, order: Sequence[int], bucket: int) -> int | None:
    """Return the number of the part whose module holds a bucket's; None if that is the model."""
    name = sharding.units[bucket].module
    holders = [
        number
        for number, other in enumerate(order)
        if sharding.units[other].module and name.startswith(f"{sharding.units[other].module}.")
    ]
    return max(holders, key=lambda number: len(sharding.units[order[number]].module), default=None)


def _find_late(sharding: Sharding, reduced: Sequence[int]) -> set[int]:
    """Return the buckets that are reduced after the root's own."""
    roots = [index for index, bucket in enumerate(reduced) if sharding.units[bucket].is_root]
    return set(reduced[roots[0] + 1 :]) if roots else set()


def _read_settings(sharding: Sharding, order: Sequence[int], *, has_root: bool) -> Settings:
    inner = order[int(has_root) :]
    number_of = {bucket: number for number, bucket in enumerate(inner)}
    units = [sharding.units[bucket] for bucket in inner]

    def numbers(buckets: Sequence[int]) -> tuple[int, ...]:
        return tuple(number_of[bucket] for bucket in buckets if bucket in number_of)

    root = sharding.units[order[0]] if has_root else None
    return Settings(
        units=tuple((number + int(has_root),) for number in range(len(inner))),
        reshards=tuple(unit.reshards for unit in units),
        is_async=any(unit.is_async for unit in sharding.units),
        forward_prefetch=tuple(numbers(unit.forward_prefetch) for unit in units),
        backward_prefetch=tuple(
            None if unit.backward_prefetch is None else numbers(unit.backward_prefetch) for unit in units
        ),
        root_forward_prefetch=numbers(root.forward_prefetch) if root else (),
        root_backward_prefetch=None
        if root is None or root.backward_prefetch is None
        else numbers(root.backward_prefetch),
        root_reshards=root is not None and root.reshards,
    )


class _Stop(NamedTuple):
    """A moment, or a wait, that a recording has the time of."""

    kind: Literal["wait", "launch", "backward"]
    """``wait``: a finalize. ``launch``: of an asynchronous gather. ``backward``: its begin."""
    ops: tuple[Op, ...]
    """What is waited for."""
    collective: int = 0
    """Number of the collective that is launched."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """What the program says of the collectives and waits of a step."""

    collectives: tuple[tuple[str, int, Pass], ...]
    """Operation, part and pass of each collective, in the order of launch."""
    stops: tuple[_Stop, ...]
    """Where compute is divided."""
    segments: tuple[tuple[tuple[Pass, int, int], ...], ...]
    """Pass, segment and weight of the compute before each stop, and after the last one."""

    @property
    def wait_count(self) -> int:
        """Return the number of finalizes."""
        return sum(stop.kind == "wait" for stop in self.stops)

    @classmethod
    def of(
        cls, program: Sequence[Op], model: ShardedModel, sharding: Sharding, *, blocks_host: bool, is_queued: bool
    ) -> _Layout:
        collectives: list[tuple[str, int, Pass]] = []
        stops: list[_Stop] = []
        segments: list[list[tuple[Pass, int, int]]] = [[]]
        is_sharded, has_replicas = bool(sharding.shard_groups), bool(sharding.replica_groups)
        last_wait: list[Op] = []
        ends = max(index for index, op in enumerate(program) if op.kind == "compute")

        def stop(kind: Literal["wait", "launch", "backward"], *ops: Op) -> None:
            stops.append(_Stop(kind, ops, len(collectives)))
            segments.append([])

        for index, op in enumerate(program):
            if op.during == "backward" and (index == 0 or program[index - 1].during == "forward"):
                stop("backward")
            if op.kind == "compute":
                weight = max(1, sum(model.parts[part].reduce_bytes for part in op.unit))
                segments[-1].append((op.during, op.segment, weight))
            elif op.kind == "gather" and blocks_host:
                stop("launch" if is_queued else "wait", op)
            elif op.kind == "wait" and is_queued:
                stop("wait", op)
            elif op.kind == "reduce" and index > ends:
                last_wait.append(op)
            elif op.kind == "reduce" and blocks_host:
                stop("wait", op)
            if op.kind == "gather":
                collectives += [("all_gather", part, op.during) for part in op.unit]
            elif op.kind == "reduce":
                for part in op.unit:
                    collectives += [("reduce_scatter", part, "backward")] * is_sharded
                    collectives += [("all_reduce", part, "backward")] * (has_replicas or not is_sharded)
        return cls(
            collectives=tuple(collectives),
            stops=(*stops, _Stop("wait", tuple(last_wait))),
            segments=tuple(map(tuple, segments)),
        )


def extract_step_times(
    analysis: Analysis,
    model: ShardedModel,
    settings: Settings,
    buckets: Sequence[int],
    min_steps: int = MIN_STEPS,
) -> tuple[StepTimes, tuple[int, ...]]:
    """Return the times of the steady steps, and their numbers.

    Args:
        buckets: Bucket of each part.
        min_steps: Minimum number of steps.

    Raises:
        OverlapScopeError: There are too few steps in which the order of collectives is that of the settings.
    """
    trace, matched = analysis.trace, analysis.breakdown.matched
    sharding = find_sharding(trace.run)
    assert sharding is not None
    program = build_program(model, settings)
    blocks_host = not trace.ranks["device"].astype(str).str.contains("cuda").any()
    is_queued = settings.is_async or not blocks_host
    layout = _Layout.of(program, model, sharding, blocks_host=blocks_host, is_queued=is_queued)
    part_of = {bucket: part for part, bucket in enumerate(buckets)}
    expected = np.array([(OPS.index(op), part) for op, part, _ in layout.collectives])
    ranks = matched.ranks
    waits = _find_waits(trace, ranks.tolist())
    chosen = []
    for step in analysis.summary.steady.steps.tolist():
        rows = np.flatnonzero(matched.step == step)
        found = np.array([(int(matched.op[row]), part_of.get(int(matched.bucket[row]), -1)) for row in rows])
        is_alike = found.shape == expected.shape and (found == expected).all()
        if is_alike and all(len(waits.get((rank, step), ())) == layout.wait_count for rank in ranks.tolist()):
            chosen.append((step, rows))
    if len(chosen) < min_steps:
        known = f"{len(chosen)} of {count_of(len(analysis.summary.steady.steps), 'steady step')}"
        raise OverlapScopeError(
            f"{trace.path}: {known} have the collectives of one forward and one backward in the order of the recorded "
            "settings, too few to predict others from. Not predicted are activation checkpointing, accumulation of "
            "gradients, and settings that change after the first forward"
        )
    steps = [step for step, _ in chosen]
    rows = np.array([rows for _, rows in chosen])
    builder = _Builder(trace, matched, model, layout, steps, rows, waits, blocks_host=blocks_host, is_queued=is_queued)
    return builder.build(sharding), tuple(steps)


def _find_waits(trace: Trace, ranks: Sequence[int]) -> dict[tuple[int, int], Float64Array]:
    """Return start and end of each finalize (W, 2) by rank and step."""
    phases = trace.phases[(trace.phases["phase"] == "finalize") & trace.phases["rank"].isin(ranks)]
    phases = phases.sort_values(["start_ns", "end_ns"])
    return {
        (int(rank), int(step)): rows[["start_ns", "end_ns"]].to_numpy(np.float64)
        for (rank, step), rows in phases.groupby(["rank", "step"])
    }


def _find_backward_begins(trace: Trace, ranks: Sequence[int], steps: Sequence[int]) -> Float64Array:
    """Return when each rank's backward begins (S, R); NaN where that is unknown."""
    phases = trace.phases[trace.phases["phase"] == "backward"]
    first = phases.groupby(["rank", "step"])["start_ns"].min()
    return np.array([[first.get((rank, step), np.nan) for rank in ranks] for step in steps], dtype=np.float64)


class _Builder:
    """Arrays of some steps: waits of the host (S, R, W, 2), arrivals and ends of collectives (S, C, R)."""

    def __init__(
        self,
        trace: Trace,
        matched: MatchedCollectives,
        model: ShardedModel,
        layout: _Layout,
        steps: Sequence[int],
        rows: Int64Array,
        waits: dict[tuple[int, int], Float64Array],
        *,
        blocks_host: bool,
        is_queued: bool,
    ) -> None:
        self.model, self.layout = model, layout
        ranks = matched.ranks.tolist()
        bounds = trace.steps[trace.steps["step"].isin(steps)].set_index(["rank", "step"])
        self.bounds_ns = np.array(
            [
                [bounds.loc[(rank, step), ["start_ns", "end_ns"]].to_numpy(np.float64) for rank in ranks]
                for step in steps
            ]
        )
        zero_ns = self.bounds_ns[:, :, 0].min(axis=1)
        self.bounds_ns -= zero_ns[:, None, None]
        waits_ns = np.array([[waits[rank, step] for rank in ranks] for step in steps])
        waits_ns -= zero_ns[:, None, None, None]
        last_ns, _ = matched.find_last()
        self.arrival_ns = matched.arrival_ns[rows] - zero_ns[:, None, None]
        self.end_ns = matched.end_ns[rows] - zero_ns[:, None, None]
        before_ns = np.maximum.accumulate(self.end_ns, axis=1)
        free_ns = np.concatenate([np.zeros_like(before_ns[:, :1]), before_ns[:, :-1]], axis=1)
        begin_ns = np.maximum(last_ns[rows] - zero_ns[:, None, None], free_ns)
        self.transfer_ns = np.maximum(self.end_ns - begin_ns, 0)
        backwards_ns = _find_backward_begins(trace, ranks, steps) - zero_ns[:, None]
        self.stops_ns = self._find_stops(waits_ns, backwards_ns)
        self.ranks = ranks
        self.blocks_host, self.is_queued = blocks_host, is_queued

    def _find_stops(self, waits_ns: Float64Array, backwards_ns: Float64Array) -> Float64Array:
        """Return start and end of each stop (S, R, N, 2); those whose moment is unknown are where the next one is."""
        found: list[Float64Array] = []
        number = waits_ns.shape[2]
        for stop in self.layout.stops[::-1]:
            if stop.kind == "wait":
                number -= 1
                found.append(waits_ns[:, :, number])
            else:
                is_launch = stop.kind == "launch"
                moment_ns = self.arrival_ns[:, stop.collective] if is_launch else backwards_ns
                moment_ns = np.where(np.isnan(moment_ns), found[-1][:, :, 0], moment_ns)
                found.append(np.stack([moment_ns, moment_ns], axis=-1))
        return np.stack(found[::-1], axis=2)

    def build(self, sharding: Sharding) -> StepTimes:
        """Build the times."""
        index_of = {rank: index for index, rank in enumerate(self.ranks)}
        forward_ns, backward_ns = self._compute()
        is_sharded = bool(sharding.shard_groups)
        everybody = (tuple(range(len(self.ranks))),)
        alone = tuple((index,) for index in range(len(self.ranks)))

        def indices(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(index_of[rank] for rank in group if rank in index_of) for group in groups) or everybody

        return StepTimes(
            start_ns=self.bounds_ns[:, :, 0],
            before_ns=np.zeros(self.bounds_ns.shape[:2]),
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            after_ns=self.bounds_ns[:, :, 1] - self.stops_ns[:, :, -1, 1],
            gathers={
                "forward": self._part_times("all_gather", ("backward", "forward")),
                "backward": self._part_times("all_gather", ("forward", "backward")),
            },
            reduces=self._part_times("reduce_scatter" if is_sharded else "all_reduce"),
            replica_reduces=self._part_times("all_reduce") if is_sharded and sharding.replica_groups else None,
            shard_groups=indices(sharding.shard_groups) if is_sharded else alone,
            replica_groups=indices(sharding.replica_groups),
            blocks_host=self.blocks_host,
        )

    def _compute(self) -> tuple[Float64Array, Float64Array]:
        """Return compute by segment (S, R, G) of both passes: what is between the waits, divided by bytes."""
        steps, ranks = self.bounds_ns.shape[:2]
        found = {during: np.zeros((steps, ranks, segment_count(self.model))) for during in PASSES}
        until_ns = self.bounds_ns[:, :, 0]
        pending_ns = np.zeros((steps, ranks))
        for number, segments in enumerate(self.layout.segments):
            if number < len(self.layout.stops):
                gap_ns = self.stops_ns[:, :, number, 0] - until_ns + pending_ns
                until_ns = self.stops_ns[:, :, number, 1]
            else:
                gap_ns = pending_ns
            pending_ns = np.zeros((steps, ranks)) if segments else gap_ns
            total = sum(weight for _, _, weight in segments)
            for during, index, weight in segments:
                found[during][:, :, index] += gap_ns * (weight / total)
        return found["forward"], found["backward"]

    def _part_times(self, op: str, passes: Sequence[Pass] = ("backward",)) -> PartTimes:
        """Return what an operation took for each part, in the last of some passes in which it was done."""
        transfer_ns: dict[int, Float64Array] = {}
        overhead_ns: dict[int, Float64Array] = {}
        for during in passes:
            for number, (other, part, pass_) in enumerate(self.layout.collectives):
                if other == op and pass_ == during:
                    transfer_ns[part] = self.transfer_ns[:, number]
            overhead_ns |= self._overheads(op, during)
        parts = [(part, other) for other, part, _ in self.layout.collectives if other == op]
        sizes = {part: self._bytes(op, part) for part in range(len(self.model.parts))}
        means_ns = [
            float(self.transfer_ns[:, number].mean())
            for number, (other, _, _) in enumerate(self.layout.collectives)
            if other == op
        ]
        line = fit_line(np.array([float(sizes[part]) for part, _ in parts]), np.array(means_ns))
        return PartTimes(transfer_ns=transfer_ns, overhead_ns=overhead_ns, line=line, bytes=sizes)

    def _bytes(self, op: str, part: int) -> int:
        return self.model.parts[part].gather_bytes if op == "all_gather" else self.model.parts[part].reduce_bytes

    def _overheads(self, op: str, during: Pass) -> dict[int, Float64Array]:
        """Return the part of each wait in which nothing was under way (S, R), by part.

        That of a wait for several collectives is counted with its first one, and none with all-reduces of replicas.
        """
        wanted = ("wait" if self.is_queued else "gather") if op == "all_gather" else "reduce"
        is_replica = op == "all_reduce" and any(each == "reduce_scatter" for each, _, _ in self.layout.collectives)
        found: dict[int, Float64Array] = {}
        for number, (_, ops, _) in enumerate(self.layout.stops):
            if not ops or ops[0].kind != wanted or ops[0].during != during or is_replica:
                continue
            start_ns, end_ns = self.stops_ns[:, :, number, 0], self.stops_ns[:, :, number, 1]
            parts = {part for each in ops for part in each.unit}
            names = ("all_gather",) if op == "all_gather" else ("reduce_scatter", "all_reduce")
            indices = [
                index
                for index, (other, part, pass_) in enumerate(self.layout.collectives)
                if other in names and part in parts and pass_ == during
            ]
            if self.is_queued and op == "all_gather":
                busy_ns = np.maximum(self.end_ns[:, indices].max(axis=1) - start_ns, 0)
            else:
                busy_ns = (self.end_ns[:, indices] - self.arrival_ns[:, indices]).sum(axis=1)
            found[ops[0].unit[0]] = np.maximum(end_ns - start_ns - busy_ns, 0)
        return found

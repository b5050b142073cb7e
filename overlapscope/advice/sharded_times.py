"""Times of ``overlapscope.sharded_model`` from a recording: compute, transfers and overheads of each part.

Over gloo each wait of the host, a *finalize* phase, belongs to one gather or reduction of the program that torch runs
with the recorded settings; what is between two such phases is compute, divided further where an asynchronous gather is
launched and where the backward begins. Steps with another order of collectives are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from overlapscope.analysis import Analysis
from overlapscope.breakdown.arrivals import MatchedCollectives
from overlapscope.breakdown.spans import Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.machine.conditions import KIND_OF
from overlapscope.sharded_model.model import Settings, ShardedModel
from overlapscope.sharded_model.program import PASSES, Op, Pass, build_program, segment_count
from overlapscope.sharded_model.times import Float64Array, PartTimes, ShardedTimes, fit_line
from overlapscope.text import count_of
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS
from overlapscope.trace.sharding import Sharding, find_sharding

MIN_STEPS: Final = 5
"""Minimum number of steps to predict others from."""


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
        ends = max(index for index, op in enumerate(program) if op.kind == "compute")
        stops: list[_Stop] = []
        segments: list[list[tuple[Pass, int, int]]] = [[]]
        collectives = _list_collectives(program, sharding)
        launched = 0
        for index, op in enumerate(program):
            found = _find_stops(program, index, launched, blocks_host=blocks_host, is_queued=is_queued)
            if op.kind == "reduce" and index > ends:
                found = []  # waited for together, when the backward is over
            stops += found
            segments += [[] for _ in found]
            launched += len(collectives[index])
            if op.kind == "compute":
                weight = max(1, sum(model.parts[part].reduce_bytes for part in op.unit))
                segments[-1].append((op.during, op.segment, weight))
        last = tuple(op for op in program[ends:] if op.kind == "reduce")
        return cls(
            collectives=tuple(each for of_op in collectives for each in of_op),
            stops=(*stops, _Stop("wait", last)),
            segments=tuple(map(tuple, segments)),
        )


def _list_collectives(program: Sequence[Op], sharding: Sharding) -> list[list[tuple[str, int, Pass]]]:
    """Return operation, part and pass of the collectives that each thing of a program launches."""
    of_reduction = ["reduce_scatter"] if sharding.shard_groups else []
    if sharding.replica_groups or not of_reduction:
        of_reduction.append("all_reduce")
    names = {"gather": ["all_gather"], "reduce": of_reduction}
    return [[(name, part, op.during) for part in op.unit for name in names.get(op.kind, ())] for op in program]


def _find_stops(program: Sequence[Op], index: int, launched: int, *, blocks_host: bool, is_queued: bool) -> list[_Stop]:
    """Return the stops at an operation: what of it a recording has the time of.

    Args:
        launched: Number of collectives launched before it.
    """
    op = program[index]
    begins = op.during == "backward" and (index == 0 or program[index - 1].during == "forward")
    found = [_Stop("backward", ())] if begins else []
    is_awaited = (op.kind == "wait" and is_queued) or (op.kind == "reduce" and blocks_host)
    if op.kind == "gather" and blocks_host:
        found.append(_Stop("launch" if is_queued else "wait", (op,), launched))
    elif is_awaited:
        found.append(_Stop("wait", (op,), launched))
    return found


def extract_step_times(
    analysis: Analysis,
    model: ShardedModel,
    settings: Settings,
    buckets: Sequence[int],
    min_steps: int = MIN_STEPS,
) -> tuple[ShardedTimes, tuple[int, ...]]:
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
    return replace(builder.build(sharding), coreless_share=_find_coreless_share(analysis, steps)), tuple(steps)


def _find_coreless_share(analysis: Analysis, steps: Sequence[int]) -> float:
    shares = analysis.machine.tabulate_steps(KIND_OF["no core"])
    share = shares.loc[shares["step"].isin(steps), "share"].mean()
    return 0.0 if np.isnan(share) else float(share)


def _find_waits(trace: Trace, ranks: Sequence[int]) -> dict[tuple[int, int], Float64Array]:
    """Return start and end of each finalize (W, 2) by rank and step."""
    phases = trace.phases[(trace.phases["phase"] == "finalize") & trace.phases["rank"].isin(ranks)]
    phases = phases.sort_values(["start_ns", "end_ns"])
    columns = [phases[name].to_numpy(np.int64) for name in ("rank", "step", "start_ns", "end_ns")]
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, step, start_ns, end_ns in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault((rank, step), []).append((start_ns, end_ns))
    return {key: np.array(waits, dtype=np.float64) for key, waits in found.items()}


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

    def build(self, sharding: Sharding) -> ShardedTimes:
        """Build the times."""
        index_of = {rank: index for index, rank in enumerate(self.ranks)}
        forward_ns, backward_ns = self._compute()
        is_sharded = bool(sharding.shard_groups)
        everybody = (tuple(range(len(self.ranks))),)
        alone = tuple((index,) for index in range(len(self.ranks)))

        def indices(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(index_of[rank] for rank in group if rank in index_of) for group in groups) or everybody

        return ShardedTimes(
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
        is_gather, operations = op == "all_gather", {each for each, _, _ in self.layout.collectives}
        if op == "all_reduce" and "reduce_scatter" in operations:
            return {}
        wanted = ("wait" if self.is_queued else "gather") if is_gather else "reduce"
        names = {op} if is_gather else operations - {"all_gather"}
        found: dict[int, Float64Array] = {}
        for number, (_, ops, _) in enumerate(self.layout.stops):
            if not ops or (ops[0].kind, ops[0].during) != (wanted, during):
                continue
            start_ns, end_ns = self.stops_ns[:, :, number, 0], self.stops_ns[:, :, number, 1]
            indices = self._find_collectives(names, {part for each in ops for part in each.unit}, during)
            if self.is_queued and is_gather:
                busy_ns = np.maximum(self.end_ns[:, indices].max(axis=1) - start_ns, 0)
            else:
                busy_ns = (self.end_ns[:, indices] - self.arrival_ns[:, indices]).sum(axis=1)
            found[ops[0].unit[0]] = np.maximum(end_ns - start_ns - busy_ns, 0)
        return found

    def _find_collectives(self, names: set[str], parts: set[int], during: Pass) -> list[int]:
        """Return the numbers of the collectives of some operations, parts and a pass."""
        return [
            index
            for index, (name, part, pass_) in enumerate(self.layout.collectives)
            if name in names and part in parts and pass_ == during
        ]

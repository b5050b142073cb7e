"""Chunked analysis of a recording that does not fit into memory, range by range of its steps.

The breakdown of a step depends on its own records and those of its neighbors: what was in progress when it began, and
which rank was waited for when it ended. So each range is analyzed together with the step before it and the step after
it, or several of them where ranks don't wait for each other in one. The results are those of ``Analysis``, to the
nanosecond, with one exception: where ranks don't wait for each other for longer than that, the critical path stays on
the rank that is the last at the end of a range, and not at the end of the recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS, Breakdown, compute_breakdown, tabulate_breakdown
from overlapscope.breakdown.critical_path import (
    CriticalPath,
    JobBreakdown,
    compute_job_breakdown,
    paths_converge_before,
)
from overlapscope.breakdown.spans import Int64Array
from overlapscope.breakdown.steady_steps import (
    exclude_steps_without_end,
    find_first_step_after_warm_up,
    find_light_steps,
    find_ranks_with_most_steps,
    find_steps_without_end,
    hash_active_plans,
    select_steady_rows,
)
from overlapscope.breakdown.summary import add_other_communication, summarize_table
from overlapscope.errors import OverlapScopeError
from overlapscope.stragglers.cycles import Cycles, StepKind, build_cycles, find_most_common_kind, group_steps_by_kind
from overlapscope.trace.cache import DamagedTables
from overlapscope.trace.recording import NEIGHBOR_STEPS, Progress, Recording, Trace, open_recording
from overlapscope.trace.table_file import StepRange
from overlapscope.workers import Workers

_MARGINS: Final = (1, 4, NEIGHBOR_STEPS)
"""Numbers of steps to add before and after a range, in the order tried: the first with which the critical path is that
of the whole recording is used."""
_STEP_FIELDS: Final = ("steps", "begin_ns", "arrival_ns", "end_ns", "lead_ns", "broadcast_ns")
"""Fields of ``Cycles`` whose first dimension is steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _ChunkTask:
    """Arguments of the analysis of one range."""

    recording: Recording
    steps: StepRange
    ranks: Int64Array
    """All ranks that have finished a step."""
    ranks_with_most: Int64Array
    """The ranks that have finished most steps."""
    first_step: int
    """First step after the warm-up."""
    with_cycles: bool
    usual: StepKind | None
    """What most steps of the recording reduce; None to use what most steps of the range reduce."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Results of the analysis of one range."""

    figures: pd.DataFrame
    plans: pd.Series[int]
    kinds: dict[StepKind, int]
    """Number of steps of each kind."""
    job: JobBreakdown | None
    cycles: Cycles | None
    usual: StepKind
    """What the steps in ``cycles`` reduce."""
    without_end: tuple[int, ...]
    """Steps that were begun and that no rank finished; only the last range has any."""


class ChunkedAnalysis(Analysis):
    """The summary, cycles and stragglers of a recording of any size.

    ``trace`` holds what is known of all ranks together and all steps, but other events only of the first range.

    Args:
        recording: Recording with its tables on disk.
        workers: Worker processes that analyze the ranges.
        with_cycles: Also arrange the ranges in cycles, which ``stragglers`` and ``replay`` need, and which takes more
            memory.
        progress: Called with (ranges done, ranges in all).

    Raises:
        DamagedTables: The tables of the recording have to be built again.
    """

    def __init__(
        self, recording: Recording, workers: Workers, progress: Progress | None = None, *, with_cycles: bool = True
    ) -> None:
        steps = recording.steps()
        super().__init__(replace(recording.trace(recording.ranges[0]), steps=steps))
        rank = steps["rank"].to_numpy(np.int64)
        ranks_with_most, first_step = find_ranks_with_most_steps(rank), find_first_step_after_warm_up(steps)
        task_recording = recording.without_samples()
        tasks = [
            _ChunkTask(
                recording=task_recording,
                steps=some,
                ranks=np.unique(rank),
                ranks_with_most=ranks_with_most,
                first_step=first_step,
                with_cycles=with_cycles,
                usual=None,
            )
            for some in recording.ranges
        ]
        chunks, usual = _analyze_chunks(workers, tasks, progress)
        workers.rest()
        figures = pd.concat([chunk.figures for chunk in chunks], ignore_index=True)
        figures = figures.sort_values("rank", kind="stable", ignore_index=True)
        steady = select_steady_rows(
            figures["rank"].to_numpy(np.int64),
            figures["step"].to_numpy(np.int64),
            figures[[f"{name}_ns" for name in BLOCKS]].to_numpy(),
            pd.concat([chunk.plans for chunk in chunks]),
            first_step,
            find_light_steps(steps),
            ranks_with_most,
        )
        steady = exclude_steps_without_end(steady, chunks[-1].without_end)
        job = _join_jobs([chunk.job for chunk in chunks if chunk.job])
        self.summary = add_other_communication(summarize_table(figures, steady, job), self.trace)
        cycles = [chunk.cycles for chunk in chunks if chunk.cycles and chunk.usual == usual]
        chunks.clear()
        self.cycles = _join_cycles(cycles, steps)

    @property
    def breakdown(self) -> Breakdown:
        """Raise an error, as breakdowns of single ranges are not stored.

        Raises:
            OverlapScopeError: Always.
        """
        raise OverlapScopeError(f"{self.trace.path}: is too large for this; choose some of its steps, such as 100:200")


def analyze_recording(
    path: Path,
    workers: Workers,
    progress: Progress | None,
    begin: Callable[[str], None],
    *,
    with_cycles: bool = True,
    write_tables: bool = True,
) -> Analysis:
    """Analyze a recording: at once if it is small, else range by range.

    Args:
        progress: Called with how much of a phase is done.
        begin: Called with the name of each phase.
        with_cycles: True if more than the summary is needed.
        write_tables: As in ``open_recording``.

    Raises:
        OverlapScopeError: There is nothing to show.
    """
    for rebuild_tables in (False, True):
        recording = open_recording(path, progress, workers, rebuild_tables=rebuild_tables, write_tables=write_tables)
        begin("dividing steps")
        try:
            if len(recording.ranges) == 1:
                return Analysis(recording.trace())
            return ChunkedAnalysis(recording, workers, progress, with_cycles=with_cycles)
        except DamagedTables:
            begin("reading logs")
    raise OverlapScopeError(f"{path}: its tables are damaged as soon as they are written; remove {path}/tables")


def _analyze_chunks(
    workers: Workers, tasks: Sequence[_ChunkTask], progress: Progress | None
) -> tuple[list[_Chunk], StepKind]:
    """Analyze all ranges, and find what most steps of the recording reduce: cycles are of those steps."""
    chunks = _run_tasks(workers, tasks, progress)
    votes: Counter[StepKind] = Counter()
    for chunk in chunks:
        votes.update(chunk.kinds)
    usual = find_most_common_kind(votes)
    # Ranges in which most steps are unusual have been arranged by these.
    again = [index for index, chunk in enumerate(chunks) if usual in chunk.kinds and chunk.usual != usual]
    rearranged = _run_tasks(workers, [replace(tasks[index], usual=usual) for index in again], None)
    for index, chunk in zip(again, rearranged, strict=True):
        chunks[index] = chunk
    return chunks, usual


def _run_tasks(workers: Workers, tasks: Sequence[_ChunkTask], progress: Progress | None) -> list[_Chunk]:
    found: dict[int, _Chunk] = {}
    for index, chunk in workers.map(_analyze_chunk, tasks):
        found[index] = chunk
        if progress:
            progress(len(found), len(tasks))
    return [found[index] for index in range(len(tasks))]


def _analyze_chunk(task: _ChunkTask) -> _Chunk:
    first, end = task.steps
    for margin in _MARGINS:
        trace = task.recording.trace((max(0, first - margin), end + margin))
        breakdown = compute_breakdown(trace)
        plans = hash_active_plans(trace.collectives)
        steady = select_steady_rows(
            breakdown.rank,
            breakdown.step,
            breakdown.ns,
            plans,
            task.first_step,
            find_light_steps(trace.steps),
            task.ranks_with_most,
        )
        job = compute_job_breakdown(trace, breakdown, steady, task.ranks)
        if job is None or _is_path_determined(trace, breakdown, job, task.steps, margin):
            break
    is_own = (breakdown.step >= first) & (breakdown.step < end)
    figures = tabulate_breakdown(breakdown)
    kinds = {
        kind: int(((steps >= first) & (steps < end)).sum()) for kind, steps in group_steps_by_kind(breakdown).items()
    }
    usual = find_most_common_kind(kinds) if task.usual is None else task.usual
    cycles = build_cycles(trace, breakdown, task.first_step, usual) if task.with_cycles else None
    if cycles is not None:
        cycles = cycles.of((cycles.steps >= first) & (cycles.steps < end))
    return _Chunk(
        figures=figures[is_own],
        plans=plans[(plans.index >= first) & (plans.index < end)],
        kinds=kinds,
        job=None if job is None else _select_job_steps(job, task.steps),
        cycles=cycles,
        usual=usual,
        without_end=find_steps_without_end(trace),
    )


def _is_path_determined(trace: Trace, breakdown: Breakdown, job: JobBreakdown, steps: StepRange, margin: int) -> bool:
    """Return True if the known steps determine the critical path during a range of steps."""
    is_own = (job.steps >= steps[0]) & (job.steps < steps[1])
    if not is_own.any():
        return True
    begin_ns, end_ns = int(job.start_ns[is_own][0]), int(job.end_ns[is_own][-1])
    # A rank may be ahead of another one by steps: all ranks are known only between these two moments.
    earliest, latest = breakdown.step.min(), breakdown.step.max()
    known_from_ns = int(breakdown.start_ns[breakdown.step == earliest].max())
    known_until_ns = int(breakdown.end_ns[breakdown.step == latest].min())
    begins_there = earliest > max(0, steps[0] - margin)
    ends_there = latest < steps[1] + margin - 1
    return (begins_there or steps[0] == 0 or known_from_ns <= begin_ns) and (
        ends_there or (known_until_ns > end_ns and paths_converge_before(trace, breakdown, known_until_ns, end_ns))
    )


def _select_job_steps(job: JobBreakdown, steps: StepRange) -> JobBreakdown | None:
    """Return the job breakdown of some steps only; None if it has none of them."""
    is_own = (job.steps >= steps[0]) & (job.steps < steps[1])
    if not is_own.any():
        return None
    begin_ns, end_ns = int(job.start_ns[is_own][0]), int(job.end_ns[is_own][-1])
    path = job.path
    inside = (path.until_ns > begin_ns) & (path.from_ns < end_ns)
    return replace(
        job,
        steps=job.steps[is_own],
        start_ns=job.start_ns[is_own],
        end_ns=job.end_ns[is_own],
        ns=job.ns[is_own],
        rank_ns=job.rank_ns[is_own],
        path=CriticalPath(
            who=path.who[inside],
            from_ns=np.maximum(path.from_ns[inside], begin_ns),
            until_ns=np.minimum(path.until_ns[inside], end_ns),
        ),
    )


def _join_jobs(jobs: Sequence[JobBreakdown]) -> JobBreakdown | None:
    if not jobs:
        return None
    names = ("steps", "start_ns", "end_ns", "ns", "rank_ns")
    path = {
        field.name: np.concatenate([getattr(job.path, field.name) for job in jobs]) for field in fields(CriticalPath)
    }
    joined = {name: np.concatenate([getattr(job, name) for job in jobs]) for name in names}
    return replace(jobs[0], path=CriticalPath(**path), **joined)


def _join_cycles(cycles: list[Cycles], steps: pd.DataFrame) -> Cycles | None:
    """Join the cycles of all ranges; empties the list and frees each array once it is joined."""
    if not cycles:
        return None
    parts = [{field.name: getattr(each, field.name) for field in fields(Cycles)} for each in cycles]
    cycles.clear()
    joined: dict[str, Any] = {name: np.concatenate([part.pop(name) for part in parts]) for name in _STEP_FIELDS}
    joined["local_ns"] = np.concatenate([part.pop("local_ns") for part in parts], axis=1)
    left_out = max(0, steps["step"].nunique() - len(joined["steps"]))
    return Cycles(**parts[0] | joined | {"left_out": left_out})

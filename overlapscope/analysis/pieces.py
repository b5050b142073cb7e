"""Chunked analysis of a recording that does not fit into memory, range by range of its steps.

The breakdown of a step depends on its own records and those of its neighbors: what was in progress when it began, and
which rank was waited for when it ended. So each range is analyzed together with the step before it and the step after
it, or several of them where ranks don't wait for each other in one. The results are those of ``Analysis``, to the
nanosecond, with one exception: where ranks don't wait for each other for longer than that, the critical path stays on
the rank that is the last at the end of a range, and not at the end of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.account.alike import alike_of, first_step_after_warm_up, plans_in_force, ranks_with_most_steps
from overlapscope.account.blocks import BLOCKS, Account, account_of
from overlapscope.account.critical_path import CriticalPath, JobAccount, comes_from_anywhere, job_account_of
from overlapscope.account.figures import figures_of
from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.analysis import Analysis
from overlapscope.analysis.cycles import Cycles, Kind, cycles_of, kinds_in, usual_kind
from overlapscope.analysis.summary import summary_of
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.reader import NEIGHBOURS, Progress, Recording, Trace, open_recording
from overlapscope.trace.store import DamagedTables
from overlapscope.trace.table_file import StepRange
from overlapscope.workers import Workers

_MARGINS: Final = (1, 4, NEIGHBOURS)
"""Numbers of steps to add before and after a range, in the order tried: the first with which the critical path is that
of the whole recording is used."""
_OF_STEPS: Final = ("steps", "begin_ns", "arrival_ns", "end_ns", "lead_ns", "broadcast_ns")
"""Fields of ``Cycles`` whose first dimension is steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
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
    usual: Kind | None
    """What most steps of the recording reduce; None to use what most steps of the range reduce."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Results of the analysis of one range."""

    figures: pd.DataFrame
    plans: pd.Series[int]
    kinds: dict[Kind, int]
    """Number of steps of each kind."""
    job: JobAccount | None
    cycles: Cycles | None
    usual: Kind
    """What the steps in ``cycles`` reduce."""


class PiecewiseAnalysis(Analysis):
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
        ranks_with_most, first_step = ranks_with_most_steps(rank), first_step_after_warm_up(steps)
        handed_out = recording.without_samples()
        tasks = [
            _Task(
                recording=handed_out,
                steps=some,
                ranks=np.unique(rank),
                ranks_with_most=ranks_with_most,
                first_step=first_step,
                with_cycles=with_cycles,
                usual=None,
            )
            for some in recording.ranges
        ]
        pieces = _mapped(workers, tasks, progress)
        votes: dict[Kind, int] = {}
        for piece in pieces:
            for kind, count in piece.kinds.items():
                votes[kind] = votes.get(kind, 0) + count
        usual = usual_kind(votes)
        # Ranges in which most steps are unusual have been arranged by these.
        again = [place for place, piece in enumerate(pieces) if usual in piece.kinds and piece.usual != usual]
        for place, piece in zip(
            again, _mapped(workers, [replace(tasks[place], usual=usual) for place in again], None), strict=True
        ):
            pieces[place] = piece
        workers.rest()
        figures = pd.concat([piece.figures for piece in pieces], ignore_index=True)
        figures = figures.sort_values("rank", kind="stable", ignore_index=True)
        alike = alike_of(
            figures["rank"].to_numpy(np.int64),
            figures["step"].to_numpy(np.int64),
            figures[[f"{name}_ns" for name in BLOCKS]].to_numpy(),
            pd.concat([piece.plans for piece in pieces]),
            first_step,
            ranks_with_most,
        )
        self.summary = summary_of(figures, alike, _joined_jobs([piece.job for piece in pieces if piece.job]))
        cycles = [piece.cycles for piece in pieces if piece.cycles and piece.usual == usual]
        pieces.clear()
        self.cycles = _joined_cycles(cycles, steps)

    @property
    def account(self) -> Account:
        """Raise an error, as breakdowns of single ranges are not stored.

        Raises:
            OverlapScopeError: Always.
        """
        raise OverlapScopeError(f"{self.trace.path}: is too large for this; choose some of its steps, such as 100:200")


def analyse(
    path: Path,
    workers: Workers,
    progress: Progress | None,
    begin: Callable[[str], None],
    *,
    with_cycles: bool = True,
) -> Analysis:
    """Analyze a recording: at once if it is small, else range by range.

    Args:
        progress: Called with how much of a phase is done.
        begin: Called with the name of each phase.
        with_cycles: True if more than the summary is needed.

    Raises:
        OverlapScopeError: There is nothing to show.
    """
    for afresh in (False, True):
        recording = open_recording(path, progress, workers, afresh=afresh)
        begin("dividing steps")
        try:
            if len(recording.ranges) == 1:
                return Analysis(recording.trace())
            return PiecewiseAnalysis(recording, workers, progress, with_cycles=with_cycles)
        except DamagedTables:
            begin("reading logs")
    raise OverlapScopeError(f"{path}: its tables are damaged as soon as they are written; remove {path}/tables")


def _mapped(workers: Workers, tasks: Sequence[_Task], progress: Progress | None) -> list[_Piece]:
    found: dict[int, _Piece] = {}
    for place, piece in workers.map(_piece_of, tasks):
        found[place] = piece
        if progress:
            progress(len(found), len(tasks))
    return [found[place] for place in range(len(tasks))]


def _piece_of(task: _Task) -> _Piece:
    first, end = task.steps
    for margin in _MARGINS:
        trace = task.recording.trace((max(0, first - margin), end + margin))
        account = account_of(trace)
        plans = plans_in_force(trace.collectives)
        alike = alike_of(account.rank, account.step, account.ns, plans, task.first_step, task.ranks_with_most)
        job = job_account_of(trace, account, alike, task.ranks)
        if job is None or _is_that_of_the_whole(trace, account, job, task.steps, margin):
            break
    is_own = (account.step >= first) & (account.step < end)
    figures = figures_of(account)
    kinds = {kind: int(((steps >= first) & (steps < end)).sum()) for kind, steps in kinds_in(account).items()}
    usual = usual_kind(kinds) if task.usual is None else task.usual
    cycles = cycles_of(trace, account, task.first_step, usual) if task.with_cycles else None
    if cycles is not None:
        cycles = cycles.of((cycles.steps >= first) & (cycles.steps < end))
    return _Piece(
        figures=figures[is_own],
        plans=plans[(plans.index >= first) & (plans.index < end)],
        kinds=kinds,
        job=None if job is None else _job_of_steps(job, task.steps),
        cycles=cycles,
        usual=usual,
    )


def _is_that_of_the_whole(trace: Trace, account: Account, job: JobAccount, steps: StepRange, margin: int) -> bool:
    """Return True if the known steps determine the critical path during a range of steps."""
    is_own = (job.steps >= steps[0]) & (job.steps < steps[1])
    if not is_own.any():
        return True
    begin_ns, end_ns = int(job.start_ns[is_own][0]), int(job.end_ns[is_own][-1])
    # A rank may be ahead of another one by steps: all ranks are known only between these two moments.
    earliest, latest = account.step.min(), account.step.max()
    known_from_ns = int(account.start_ns[account.step == earliest].max())
    known_until_ns = int(account.end_ns[account.step == latest].min())
    begins_there = earliest > max(0, steps[0] - margin)
    ends_there = latest < steps[1] + margin - 1
    return (begins_there or steps[0] == 0 or known_from_ns <= begin_ns) and (
        ends_there or (known_until_ns > end_ns and comes_from_anywhere(trace, account, known_until_ns, end_ns))
    )


def _job_of_steps(job: JobAccount, steps: StepRange) -> JobAccount | None:
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


def _joined_jobs(jobs: Sequence[JobAccount]) -> JobAccount | None:
    if not jobs:
        return None
    names = ("steps", "start_ns", "end_ns", "ns", "rank_ns")
    path = {
        field.name: np.concatenate([getattr(job.path, field.name) for job in jobs]) for field in fields(CriticalPath)
    }
    joined = {name: np.concatenate([getattr(job, name) for job in jobs]) for name in names}
    return replace(jobs[0], path=CriticalPath(**path), **joined)


def _joined_cycles(cycles: list[Cycles], steps: pd.DataFrame) -> Cycles | None:
    """Join the cycles of all ranges; empties the list and frees each array once it is joined."""
    if not cycles:
        return None
    parts = [{field.name: getattr(each, field.name) for field in fields(Cycles)} for each in cycles]
    cycles.clear()
    joined: dict[str, Any] = {name: np.concatenate([part.pop(name) for part in parts]) for name in _OF_STEPS}
    joined["own_ns"] = np.concatenate([part.pop("own_ns") for part in parts], axis=1)
    left_out = max(0, steps["step"].nunique() - len(joined["steps"]))
    return Cycles(**parts[0] | joined | {"left_out": left_out})

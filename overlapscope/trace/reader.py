"""A recording on disk -> a ``Trace``: tidy tables of all ranks on one clock, and what was wrong with the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.trace import cache
from overlapscope.trace.alignment import Alignment, RankClock, align, all_reduces_of, are_of_one_clock
from overlapscope.trace.causality import joined_by_clock
from overlapscope.trace.folders import expected_ranks_of, find_rank_folders
from overlapscope.trace.format import EVENTS_FILE
from overlapscope.trace.links import with_peer_ranks
from overlapscope.trace.log import Problem
from overlapscope.trace.memory import require_room
from overlapscope.trace.part import empty_tables, read_parts
from overlapscope.trace.plans import plans_table
from overlapscope.trace.rank_files import has_only_group_logs
from overlapscope.trace.tables import on_clocks

Progress = Callable[[int, int], None]
"""Called with (ranks read so far, ranks in all)."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recording. The event tables are described in ``overlapscope.trace.tables`` and ``segments``."""

    path: Path
    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one; empty if none has."""
    ranks: pd.DataFrame
    """rank, host, pid, device, boot, clock ("same boot", "pings", "collectives", "none"), offset_ns, drift_ppm,
    error_ns, closed; of clock "none" the offset is the wall clock's, good for drawing and nothing else"""
    steps: pd.DataFrame
    phases: pd.DataFrame
    gradients: pd.DataFrame
    copies: pd.DataFrame
    collectives: pd.DataFrame
    incidents: pd.DataFrame
    pauses: pd.DataFrame
    plans: pd.DataFrame
    """model, plan_epoch, plan_hash, bucket, position, parameter, name, shape, elements, dtype, bytes"""
    call_sites: pd.DataFrame
    """rank, call_site, file, line, function"""
    segments: pd.DataFrame
    user_collectives: pd.DataFrame
    """rank, start_ns, end_ns of the user's own that ranks have waited for, described in ``trace.user_collectives``"""
    links: pd.DataFrame
    """Samples of TCP connections, described in ``overlapscope.trace.links``."""
    problems: tuple[Problem, ...]
    is_newest_only: bool = False
    """Whether only the newest steps were read."""

    @property
    def errors(self) -> list[Problem]:
        """Problems that mean that data is missing or unreadable."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def expected_ranks(self) -> tuple[int, ...]:
        """The ranks that trained together, whether or not they left a log."""
        return expected_ranks_of(self.run)

    @property
    def aligned_ranks(self) -> tuple[int, ...]:
        """The ranks whose times may be compared with each other, to within ``clock_error_ns``."""
        return tuple(self.ranks.loc[self.ranks["clock"] != "none", "rank"].tolist())

    @property
    def clock_error_ns(self) -> float:
        """Maximum error of a time difference between two aligned ranks; 0 on one clock."""
        by_clock = self.ranks.groupby("boot", dropna=False)["error_ns"].max().nlargest(2)
        return float(by_clock.sum())


def read_trace(path: Path | str, progress: Progress | None = None, *, only_newest: int | None = None) -> Trace:
    """Read a recording, from its Parquet tables if they are up to date, else from its logs.

    Args:
        path: the folder that holds ``rank_0``, ``rank_1`` ...
        progress: told of each rank that has been read.
        only_newest: read only so many records of each rank, and of these the steps that are whole on all ranks: however
            long a recording has gone on, that takes as long.

    Raises:
        OverlapScopeError: there is nothing to show; lesser problems are in ``Trace.problems``.
    """
    path = Path(path)
    folders = find_rank_folders(path)
    if only_newest is not None:
        tables, run, problems = _read_logs(folders, progress, only_newest)
        newest: dict[str, Any] = {"is_newest_only": True, **_of_common_steps(tables, path, problems)}
        return Trace(path=path, run=run, problems=tuple(problems), **newest)
    fingerprint = cache.fingerprint(folders)
    cached = cache.load(path, fingerprint)
    if cached is None:
        require_room(path, (folder / EVENTS_FILE for folder in folders.values()))
        cached = _read_logs(folders, progress)
        cache.store(path, fingerprint, *cached)
    tables, run, problems = cached
    everything: dict[str, Any] = {**tables}
    return Trace(path=path, run=run, problems=tuple(problems), **everything)


def empty_trace(path: Path, ranks: Iterable[int]) -> Trace:
    """A recording of nothing, for a folder that holds something else of these ranks, such as dumps of another tool."""
    unknown = {"host": "unknown", "pid": -1, "device": "unknown", "boot": None, "clock": "none"}
    unknown |= {"offset_ns": 0, "drift_ppm": 0.0, "error_ns": float("nan"), "closed": False}
    tables: dict[str, Any] = empty_tables() | {
        "links": with_peer_ranks(empty_tables()["links"]),
        "ranks": pd.DataFrame([{"rank": rank, **unknown} for rank in ranks]),
        "plans": plans_table([]),
    }
    return Trace(path=path, run={}, problems=(), **tables)


def _read_logs(
    folders: dict[int, Path], progress: Progress | None, only_newest: int | None = None
) -> tuple[dict[str, pd.DataFrame], dict[str, Any], list[Problem]]:
    problems: list[Problem] = []
    count = None if progress is None else partial(_count, progress, len(folders))
    parts = list(read_parts(folders, problems, only_newest, count))
    if progress:
        progress(len(folders), len(folders))
    if not parts:
        raise OverlapScopeError(problems[0].message)
    run = next((part.run for part in parts if part.run), {})
    problems += _note_without_events(folders)
    expected = expected_ranks_of(run)
    missing = sorted(set(expected) - folders.keys())
    if missing:
        names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        message = f"{next(iter(folders.values())).parent}: {len(missing)} of {len(expected)} ranks left no log: {names}"
        problems.append(Problem("error", message))
    clocks = [clock for part in parts for clock in part.clocks]
    compared = [] if are_of_one_clock(clocks) else parts
    by_clock = joined_by_clock(all_reduces_of(part.clocks, part.tables["collectives"]) for part in compared)
    alignments, unaligned = align(clocks, by_clock)
    problems += unaligned
    maps = {
        clock.rank: alignment.map
        for clock, alignment in zip(clocks, alignments, strict=True)
        if alignment.clock != "same boot"
    }
    aligned = [on_clocks(part.tables, maps) for part in parts]
    tables = {name: pd.concat([part[name] for part in aligned], ignore_index=True) for name in aligned[0]}
    columns = pd.DataFrame([_clock_columns(*each) for each in zip(clocks, alignments, strict=True)])
    ranks = pd.concat([part.ranks for part in parts], ignore_index=True)
    tables["ranks"] = pd.concat([ranks.drop(columns="closed"), columns, ranks["closed"]], axis=1)
    tables["plans"] = plans_table(rows for part in parts for rows in part.plans)
    tables["links"] = with_peer_ranks(tables["links"])
    return tables, run, problems


def _count(progress: Progress, ranks: int, done: int) -> None:
    progress(done, ranks)


def _of_common_steps(tables: dict[str, pd.DataFrame], path: Path, problems: list[Problem]) -> dict[str, pd.DataFrame]:
    """Without what lies before the first step that all ranks have that have any."""
    firsts = tables["steps"].groupby("rank")[["step", "start_ns"]].min().max()
    if firsts.isna().any():
        return tables
    for rank, newest in tables["steps"].groupby("rank")["step"].max().items():
        if newest < firsts["step"]:
            what = f"its newest step is {newest}, before all that are shown of other ranks"
            problems.append(Problem("note", f"{path}: rank {rank} is not shown: {what}"))
    kept = {name: table[table["step"] >= firsts["step"]] for name, table in tables.items() if "step" in table}
    own = tables["user_collectives"]
    kept["user_collectives"] = own[own["start_ns"] >= firsts["start_ns"]]
    return tables | {name: table.reset_index(drop=True) for name, table in kept.items()}


def _note_without_events(folders: dict[int, Path]) -> list[Problem]:
    without = [rank for rank, folder in folders.items() if has_only_group_logs(folder)]
    if not without:
        return []
    who = "no rank has" if len(without) == len(folders) else f"{len(without)} of {len(folders)} ranks don't have"
    path = next(iter(folders.values())).parent
    what = "only the order of their collectives can be shown"
    return [Problem("note", f"{path}: {who} an event log, which DistributedDataParallel writes; {what}")]


def _clock_columns(rank: RankClock, alignment: Alignment) -> dict[str, Any]:
    """Clock columns of the table of ranks, over what the rank recorded."""
    offset_ns, last_offset_ns = (int(ns) for ns in alignment.map.offset_at([rank.begin_ns, rank.end_ns]))
    return {
        "boot": rank.boot,
        "clock": alignment.clock,
        "offset_ns": offset_ns,
        "drift_ppm": 1e6 * (last_offset_ns - offset_ns) / max(1, rank.end_ns - rank.begin_ns),
        "error_ns": alignment.map.error_over(rank.begin_ns, rank.end_ns),
    }

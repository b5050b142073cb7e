"""A recording on disk -> a ``Trace``: tidy tables of all ranks on one clock, and what was wrong with the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.trace import cache
from overlapscope.trace.alignment import Alignment, RankClock, align
from overlapscope.trace.clock import bounds_of_pings
from overlapscope.trace.folders import expected_ranks_of, find_rank_folders, has_group_logs, read_json, read_lines
from overlapscope.trace.format import (
    CALL_SITES_FILE,
    CLOCK_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    LINKS_FILE,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
)
from overlapscope.trace.kept_records import with_boards, with_incidents
from overlapscope.trace.links import link_samples, sample_rows, with_peer_ranks
from overlapscope.trace.log import RECORD_DTYPE, Problem, Records, is_closed, newest_records, read_log
from overlapscope.trace.memory import require_room
from overlapscope.trace.seal import Seal
from overlapscope.trace.segment_reader import with_content
from overlapscope.trace.tables import on_clock, rank_tables
from overlapscope.trace.user_collectives import user_collectives

Progress = Callable[[int, int], None]
"""Called with (ranks read so far, ranks in all)."""

_Row = tuple[Any, ...]


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
    problems: list[Problem] = []
    tables: dict[str, Any] = _empty_tables() | {
        "segments": with_content(_empty_tables()["segments"], path, problems),
        "user_collectives": user_collectives(path, 0, problems),
        "links": with_peer_ranks(link_samples([], 0)),
        "ranks": pd.DataFrame([{"rank": rank, **unknown} for rank in ranks]),
        "plans": _read_plans(path / PLANS_FILE, problems),
        "call_sites": _read_call_sites(path / CALL_SITES_FILE, 0, problems),
    }
    return Trace(path=path, run={}, problems=(), **tables)


def _read_logs(
    folders: dict[int, Path], progress: Progress | None, only_newest: int | None = None
) -> tuple[dict[str, pd.DataFrame], dict[str, Any], list[Problem]]:
    problems: list[Problem] = []
    run: dict[str, Any] = {}
    rank_rows: list[dict[str, Any]] = []
    parts: list[dict[str, pd.DataFrame]] = []
    plans: list[pd.DataFrame] = []
    call_sites: list[pd.DataFrame] = []
    clocks: list[RankClock] = []
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done, len(folders))
        try:
            was_closed, records, found = _read_events(folder, only_newest)
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
            continue
        problems += [*found, *_lost(folder)]
        where = read_json(folder / RANK_FILE, problems)
        its_run = read_json(folder / RUN_FILE, problems)
        run = run or its_run
        seal = Seal(folder, problems)
        if only_newest is None:
            records = with_incidents(records, folder, problems)
        records = with_boards(records, folder, seal, problems)
        samples = read_lines(folder / LINKS_FILE, problems, sample_rows)
        are_newest = only_newest is not None
        tables_of_rank = rank_tables(records, rank, are_newest=are_newest) if len(records) else _empty_tables()
        tables_of_rank = tables_of_rank | {"user_collectives": user_collectives(folder, rank, problems)}
        segments = with_content(tables_of_rank["segments"], folder, problems)
        parts.append(tables_of_rank | {"links": link_samples(samples, rank), "segments": segments})
        clocks.append(_rank_clock(rank, folder, where, its_run, records, parts[-1]["collectives"], problems))
        rank_rows.append(
            {
                "rank": rank,
                "host": where.get("host", "unknown"),
                "pid": where.get("pid", -1),
                "device": where.get("device", "unknown"),
                "closed": was_closed,
            }
        )
        plans.append(_read_plans(folder / PLANS_FILE, problems))
        call_sites.append(_read_call_sites(folder / CALL_SITES_FILE, rank, problems))
        seal.report(problems)
    if progress:
        progress(len(folders), len(folders))
    if not parts:
        raise OverlapScopeError(problems[0].message)
    problems += _note_without_events(folders)
    expected = expected_ranks_of(run)
    missing = sorted(set(expected) - folders.keys())
    if missing:
        names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        message = f"{next(iter(folders.values())).parent}: {len(missing)} of {len(expected)} ranks left no log: {names}"
        problems.append(Problem("error", message))
    alignments, unaligned = align(clocks)
    problems += unaligned
    for row, clock, alignment in zip(rank_rows, clocks, alignments, strict=True):
        row.update(_clock_columns(clock, alignment), closed=row.pop("closed"))
    parts = [
        part if alignment.clock == "same boot" else on_clock(part, alignment.map)
        for part, alignment in zip(parts, alignments, strict=True)
    ]
    tables = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}
    tables["ranks"] = pd.DataFrame(rank_rows)
    tables["plans"] = pd.concat(plans, ignore_index=True).drop_duplicates(ignore_index=True)
    tables["call_sites"] = pd.concat(call_sites, ignore_index=True)
    tables["links"] = with_peer_ranks(tables["links"])
    return tables, run, problems


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


def _read_events(folder: Path, only_newest: int | None) -> tuple[bool, Records, list[Problem]]:
    """Whether a rank's event log is closed, its records, and what is wrong with it.

    Plain torch.distributed leaves collective logs and no event log: that counts as an empty one.
    """
    if _has_only_group_logs(folder):
        return False, np.empty(0, dtype=RECORD_DTYPE), []
    if only_newest is not None:
        problems: list[Problem] = []
        return is_closed(folder / EVENTS_FILE), newest_records(folder / EVENTS_FILE, only_newest, problems), problems
    header, records, problems = read_log(folder / EVENTS_FILE)
    return header.closed, records, problems


@lru_cache(maxsize=1)
def _empty_tables() -> dict[str, pd.DataFrame]:
    """Empty tables, cached because making them for a thousand ranks is slow."""
    return rank_tables(np.empty(0, dtype=RECORD_DTYPE), 0)


def _has_only_group_logs(folder: Path) -> bool:
    return has_group_logs(folder) and not (folder / EVENTS_FILE).exists()


def _lost(folder: Path) -> list[Problem]:
    """What is said of a rank whose recording ended before it did."""
    problems: list[Problem] = []
    ended = read_json(folder / ENDED_FILE, problems) if (folder / ENDED_FILE).exists() else {}
    if (why := ended.get("unrecorded_because")) is not None:
        what = "what this rank did afterwards is missing"
        problems.append(Problem("error", f"{folder}: the recording ended before the training ({why}); {what}"))
    return problems


def _note_without_events(folders: dict[int, Path]) -> list[Problem]:
    without = [rank for rank, folder in folders.items() if _has_only_group_logs(folder)]
    if not without:
        return []
    who = "no rank has" if len(without) == len(folders) else f"{len(without)} of {len(folders)} ranks don't have"
    path = next(iter(folders.values())).parent
    what = "only the order of their collectives can be shown"
    return [Problem("note", f"{path}: {who} an event log, which DistributedDataParallel writes; {what}")]


def _rank_clock(
    rank: int,
    folder: Path,
    where: dict[str, Any],
    run: dict[str, Any],
    records: Records,
    collectives: pd.DataFrame,
    problems: list[Problem],
) -> RankClock:
    def burst(line: Any) -> list[_Row]:
        boot_of_rank_0, pings = line["reference"], line["best"]
        bounds_of_pings(pings)  # raises if the line is damaged
        return [(boot_of_rank_0 and str(boot_of_rank_0), pings)]

    try:
        sample = where["clock_samples"][0]
        unix_offset_ns = int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        unix_offset_ns = None
    boot = where.get("boot_id")
    # A communication hook need not wait for all ranks, so its all-reduces say nothing about clocks.
    hooked = [model.get("model") for model in run.get("models", []) if "comm_hook" in model]
    return RankClock(
        rank=rank,
        boot=boot and str(boot),
        unix_offset_ns=unix_offset_ns,
        bursts=[(reference, pings) for reference, pings in read_lines(folder / CLOCK_FILE, problems, burst)],
        peers=json.dumps(run.get("ranks")),
        begin_ns=int(records["start_ns"].min()) if len(records) else 0,
        end_ns=int(records["end_ns"].max()) if len(records) else 0,
        collectives=collectives[~collectives["model"].isin(hooked)],
    )


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


def _read_plans(path: Path, problems: list[Problem]) -> pd.DataFrame:
    columns = ["model", "plan_epoch", "plan_hash", "bucket", "position"]
    columns += ["parameter", "name", "shape", "elements", "dtype", "bytes"]

    def rows_of(plan: Any) -> list[_Row]:
        return [
            (
                plan["model"],
                plan["epoch"],
                plan["hash"],
                number,
                position,
                parameter["index"],
                parameter["name"],
                "×".join(map(str, parameter["shape"])) or "scalar",
                parameter["elements"],
                bucket["dtype"],
                parameter["bytes"],
            )
            for number, bucket in enumerate(plan["buckets"])
            for position, parameter in enumerate(bucket["parameters"])
        ]

    return pd.DataFrame(read_lines(path, problems, rows_of), columns=columns)


def _read_call_sites(path: Path, rank: int, problems: list[Problem]) -> pd.DataFrame:
    def rows_of(site: Any) -> list[_Row]:
        return [(rank, site["call_site"], site["file"], site["line"], site["function"])]

    columns = ["rank", "call_site", "file", "line", "function"]
    return pd.DataFrame(read_lines(path, problems, rows_of), columns=columns)

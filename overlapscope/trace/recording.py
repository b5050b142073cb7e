"""Reader of recordings: a ``Trace`` with tidy tables of all ranks on one clock, and problems with the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace import cache
from overlapscope.trace.cache import DamagedTables, staging_dir
from overlapscope.trace.clock_alignment import collect_all_reduces, merge_by_clock, share_one_clock
from overlapscope.trace.folders import find_rank_folders, is_remote, parse_expected_ranks
from overlapscope.trace.load import (
    assemble_shards,
    build_clock_maps,
    concat_tables,
    convert_recording,
    partition_recording,
)
from overlapscope.trace.schema import EVENTS_FILE, TABLES_FOLDER
from overlapscope.trace.table_file import ALL_STEPS, StepRange, require_memory, with_neighbors
from overlapscope.trace.tables import (
    TABLES,
    add_peer_ranks,
    build_plans_table,
    empty_tables,
    map_to_clocks,
    read_shards,
)
from overlapscope.workers import SerialWorkers, Workers

Progress = Callable[[int, int], None]
"""Callback with (number of ranks read so far, number of ranks)."""

NEIGHBOR_STEPS: Final = 16
"""Number of steps before and after a step that its analysis depends on; see ``overlapscope.chunked_analysis``."""

Extent = Literal["all", "latest", "chosen"]
"""Which steps of a recording were read."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recording, loaded. The event tables are described in ``overlapscope.trace.tables``."""

    path: Path
    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one; empty if none has."""
    ranks: pd.DataFrame
    """Columns: rank, host, pid, device, boot, clock ("same boot", "pings", "collectives", "none"), offset_ns,
    drift_ppm, error_ns, closed. With clock "none", the offset is the wall clock's, which is good enough for drawing
    only."""
    steps: pd.DataFrame
    phases: pd.DataFrame
    gradients: pd.DataFrame
    copies: pd.DataFrame
    collectives: pd.DataFrame
    incidents: pd.DataFrame
    pauses: pd.DataFrame
    plans: pd.DataFrame
    """Columns: model, plan_epoch, plan_hash, bucket, position, parameter, name, shape, elements, dtype, bytes."""
    call_sites: pd.DataFrame
    """Columns: rank, call_site, file, line, function."""
    segments: pd.DataFrame
    user_collectives: pd.DataFrame
    """User collectives that ranks waited for: rank, start_ns, end_ns; described in ``trace.rank_folder``."""
    links: pd.DataFrame
    """Samples of TCP connections, described in ``overlapscope.trace.rank_folder``."""
    machine: pd.DataFrame = field(default_factory=lambda: empty_tables()["machine"])
    """What ranks have sampled of the machine: ``overlapscope.trace.tables.MACHINE_COLUMNS``."""
    machine_sources: pd.DataFrame = field(default_factory=lambda: empty_tables()["machine_sources"])
    """Sources that ranks use, and facts that can't be read: ``overlapscope.trace.tables.MACHINE_SOURCE_COLUMNS``."""
    modes: pd.DataFrame
    """Recording modes that ranks have begun: ``overlapscope.trace.tables.MODE_COLUMNS``. A rank without any has
    always been in the default one."""
    problems: tuple[Problem, ...]
    extent: Extent = "all"

    @property
    def has_only_collectives(self) -> bool:
        """Return whether only the order of collectives was recorded, as where no reduction of gradients is seen."""
        return not len(self.phases) and not len(self.gradients) and not len(self.collectives)

    @property
    def errors(self) -> list[Problem]:
        """Return the problems which mean that data is missing or unreadable."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def expected_ranks(self) -> tuple[int, ...]:
        """Return the ranks that trained together, whether or not they left a log."""
        return parse_expected_ranks(self.run)

    @property
    def aligned_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose times can be compared with each other, to within ``clock_error_ns``."""
        return tuple(self.ranks["rank"].to_numpy()[self.ranks["clock"].to_numpy() != "none"].tolist())

    @property
    def clock_offsets_ns(self) -> dict[int, float]:
        """Return the nanoseconds to add to the times of each aligned rank to compare them."""
        known = self.ranks[self.ranks["clock"] != "none"]
        return dict(zip(known["rank"].tolist(), known["offset_ns"].astype(float).tolist(), strict=True))

    @property
    def clock_error_ns(self) -> float:
        """Return the maximum error of a time difference between two aligned ranks; 0 if they share a clock."""
        by_clock = self.ranks.groupby("boot", dropna=False)["error_ns"].max().nlargest(2)
        return float(by_clock.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A recording whose steps can be read in ranges. Can be sent to another process."""

    path: Path
    run: dict[str, Any]
    problems: tuple[Problem, ...]
    unsplit: dict[str, pd.DataFrame]
    """Tables that are not split, by name."""
    events: cache.StoredTables | dict[str, pd.DataFrame]
    """Event tables: on disk, or in memory where nothing can be written."""

    @property
    def ranges(self) -> list[StepRange]:
        """Return ranges of steps, each of which fits into memory with everything computed from it."""
        return self.events.ranges if isinstance(self.events, cache.StoredTables) else [ALL_STEPS]

    def steps(self) -> pd.DataFrame:
        """Return the table of all steps.

        Raises:
            DamagedTables: the recording has to be opened with ``rebuild_tables``.
        """
        tables = self.events.read(names=["steps"]) if isinstance(self.events, cache.StoredTables) else self.events
        return map_to_clocks({"steps": tables["steps"]}, build_clock_maps(self.unsplit["clocks"]))["steps"]

    def without_samples(self) -> Recording:
        """Return the recording without what is sampled beside the steps, and call sites, which may be large."""
        left_out = {name: self.unsplit[name].iloc[:0] for name in ("links", "machine", "call_sites")}
        return replace(self, unsplit=self.unsplit | left_out)

    def trace(self, steps: StepRange = ALL_STEPS) -> Trace:
        """Return the tables of a range of steps of all ranks.

        Raises:
            DamagedTables: the recording has to be opened with ``rebuild_tables``.
        """
        is_all = steps == ALL_STEPS
        if isinstance(self.events, cache.StoredTables):
            tables = self.events.read(steps)
        else:
            tables = {name: table if is_all else _select_steps(table, steps) for name, table in self.events.items()}
        clocks = build_clock_maps(self.unsplit["clocks"])
        found: dict[str, Any] = map_to_clocks(tables, clocks) | {
            name: table for name, table in self.unsplit.items() if name != "clocks"
        }
        if not is_all:
            found["user_collectives"] = _select_spans_during(found["user_collectives"], found["steps"])
        return Trace(path=self.path, run=self.run, problems=self.problems, **found)


def read_trace(
    path: Path | str,
    progress: Progress | None = None,
    *,
    latest_records: int | None = None,
    steps: StepRange = ALL_STEPS,
    neighbors: int = 0,
    write_tables: bool = True,
) -> Trace:
    """Read a recording, from its Parquet tables if they are up to date, else from its logs.

    Args:
        path: folder that holds ``rank_0``, ``rank_1`` ...
        progress: called for each rank that has been read.
        latest_records: number of the latest records to read of each rank; of these, the steps that are complete on all
            ranks are kept. Takes the same time however long the recording is.
        steps: range of steps to read, as if the recording consisted of them.
        neighbors: number of steps to read before and after that range.
        write_tables: as in ``open_recording``.

    Raises:
        OverlapScopeError: there is nothing to show, or it doesn't fit into memory; lesser problems are in
            ``Trace.problems``.
    """
    if latest_records is None:
        if steps == ALL_STEPS:
            _require_room(path)
        try:
            return _read_steps(open_recording(path, progress, write_tables=write_tables), steps, neighbors)
        except DamagedTables:
            recording = open_recording(path, progress, rebuild_tables=True, write_tables=write_tables)
            return _read_steps(recording, steps, neighbors)
    path = Path(path)
    recording = _read_into_memory(path, find_rank_folders(path), progress, latest_records)
    trace = recording.trace()
    problems = list(trace.problems)
    kept: dict[str, Any] = {**_select_common_steps(trace, problems)}
    return replace(trace, extent="latest", problems=tuple(problems), **kept)


def open_recording(
    path: Path | str,
    progress: Progress | None = None,
    workers: Workers | None = None,
    *,
    rebuild_tables: bool = False,
    write_tables: bool = True,
) -> Recording:
    """Open a recording, and write its tables if there are none that are up to date.

    Args:
        path: folder that holds ``rank_0``, ``rank_1`` ...; on remote storage, one that holds its tables.
        progress: called for each rank whose logs have been read.
        workers: workers that read the logs of a large recording in parallel.
        rebuild_tables: write tables even if there are some, because they turned out to be damaged.
        write_tables: False to write nothing, and to read the logs where there are no tables.

    Raises:
        OverlapScopeError: there is nothing to show, or the log of one rank does not fit into memory, or the logs of all
            don't and no tables can or may be written; lesser problems are in ``Recording.problems``.
    """
    if is_remote(path):
        return _open_remote(path, is_damaged=rebuild_tables)
    path = Path(path)
    folders = find_rank_folders(path)
    fingerprint = _compute_fingerprint(path, folders, write_tables=write_tables)
    if not rebuild_tables and (known := _load_stored(path, fingerprint)) is not None:
        return known
    plan = partition_recording(folders)
    for shard in plan.shards:
        require_memory(path, (folder / EVENTS_FILE for folder in shard.values()))
    if len(plan.shards) > 1:
        if write_tables:
            with suppress(OSError):  # the folder is not writable
                convert_recording(path, folders, fingerprint, plan, workers or SerialWorkers(), progress)
                if (known := _load_stored(path, fingerprint)) is not None:
                    return known
        require_memory(path, (folder / EVENTS_FILE for folder in folders.values()))
    recording = _read_into_memory(path, folders, progress)
    if write_tables and isinstance(recording.events, dict) and len(plan.shards) == 1:
        with suppress(OSError), staging_dir(path) as staging:
            files = cache.write_shard(staging, 0, recording.events, plan.between)
            found = recording.unsplit, recording.run, recording.problems
            cache.publish_tables(staging, path, fingerprint, *found, plan.between, [files])
    return recording


def _compute_fingerprint(path: Path, folders: dict[int, Path], *, write_tables: bool) -> str:
    """Return the fingerprint of the sources of the tables; empty where there are none, and none are written."""
    return cache.compute_fingerprint(folders) if write_tables or (path / TABLES_FOLDER).exists() else ""


def _read_steps(recording: Recording, steps: StepRange, neighbors: int) -> Trace:
    """Return a range of steps of a recording with its neighbors.

    Raises:
        DamagedTables: the recording has to be opened with ``rebuild_tables``.
        OverlapScopeError: it has none of these steps, or they don't fit into memory.
    """
    if steps == ALL_STEPS:
        return recording.trace()
    known = recording.steps()["step"]
    if not known.between(steps[0], steps[1] - 1).any():
        has = f"it has {known.min()} to {known.max()}" if len(known) else "none has finished"
        until = f"to before {steps[1]}" if steps[1] < ALL_STEPS[1] else "on"
        raise OverlapScopeError(f"{recording.path}: has no step from {steps[0]} {until}; {has}")
    first, end = with_neighbors(steps, neighbors)
    share = float(known.between(first, end - 1).mean())
    _require_room(recording.path, share)
    if share == 1:
        return recording.trace()
    return replace(recording.trace((first, end)), extent="chosen")


def _require_room(path: Path | str, share: float = 1.0) -> None:
    if not is_remote(path):
        path = Path(path)
        require_memory(path, (folder / EVENTS_FILE for folder in find_rank_folders(path).values()), share)


def _open_remote(path: Path, *, is_damaged: bool) -> Recording:
    """Open the tables of a recording on remote storage, where nothing is written."""
    try:
        (path / TABLES_FOLDER / cache.CONTENTS_FILE).read_bytes()
        known = None if is_damaged else _load_stored(path, None)
    except FileNotFoundError:
        what = f"no {TABLES_FOLDER}/ there; open the recording once where it is, and copy its {TABLES_FOLDER}/ there"
        raise OverlapScopeError(f"{path}: {what}") from None
    except Exception as error:  # each kind of storage has its own errors
        raise OverlapScopeError(f"{path}: can't be read ({' '.join(str(error).split())})") from None
    if known is None:
        raise OverlapScopeError(f"{path}: its tables are damaged, or of another version; copy them there again")
    return known


def _load_stored(path: Path, fingerprint: str | None) -> Recording | None:
    """Return a recording whose tables are on disk and up to date; else None."""
    stored = cache.load_tables(path, fingerprint)
    if stored is None:
        return None
    try:
        unsplit = stored.read_unsplit()
    except DamagedTables:
        return None
    return Recording(path=path, run=stored.run, problems=stored.problems, unsplit=unsplit, events=stored)


def _read_into_memory(
    path: Path, folders: dict[int, Path], progress: Progress | None, latest_records: int | None = None
) -> Recording:
    problems: list[Problem] = []
    shards = list(read_shards(folders, problems, latest_records, progress))
    clocks = [clock for shard in shards for clock in shard.clocks]
    compared = [] if share_one_clock(clocks) else shards
    by_clock = merge_by_clock(collect_all_reduces(shard.clocks, shard.tables["collectives"]) for shard in compared)
    found = assemble_shards(folders, shards, by_clock, problems)
    return Recording(
        path=path, run=found.run, problems=tuple(found.problems), unsplit=found.unsplit, events=concat_tables(shards)
    )


def _select_steps(table: pd.DataFrame, steps: StepRange) -> pd.DataFrame:
    return table[(table["step"] >= steps[0]) & (table["step"] < steps[1])].reset_index(drop=True)


def _select_spans_during(spans: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the spans of ranks that overlap the time of their steps."""
    of_rank = steps.groupby("rank").agg({"start_ns": "min", "end_ns": "max"}).reindex(spans["rank"])
    touches = spans["end_ns"].to_numpy() >= of_rank["start_ns"].to_numpy()
    touches &= spans["start_ns"].to_numpy() <= of_rank["end_ns"].to_numpy()
    return spans[touches].reset_index(drop=True)


def empty_trace(path: Path, ranks: Iterable[int]) -> Trace:
    """Return a trace without events, for a folder with other data of these ranks, such as dumps of another tool."""
    unknown = {"host": "unknown", "pid": -1, "device": "unknown", "boot": None, "clock": "none"}
    unknown |= {"offset_ns": 0, "drift_ppm": 0.0, "error_ns": float("nan"), "closed": False}
    tables: dict[str, Any] = empty_tables() | {
        "links": add_peer_ranks(empty_tables()["links"]),
        "ranks": pd.DataFrame([{"rank": rank, **unknown} for rank in ranks]),
        "plans": build_plans_table([]),
    }
    return Trace(path=path, run={}, problems=(), **tables)


def _select_common_steps(trace: Trace, problems: list[Problem]) -> dict[str, pd.DataFrame]:
    """Return the tables without what lies before the first step that is present on all ranks with steps."""
    firsts = trace.steps.groupby("rank")[["step", "start_ns"]].min().max()
    if firsts.isna().any():
        return {}
    for rank, latest in trace.steps.groupby("rank")["step"].max().items():
        if latest < firsts["step"]:
            what = f"its latest step is {latest}, before all steps shown of other ranks"
            problems.append(Problem("note", f"{trace.path}: rank {rank} is not shown: {what}"))
    own = trace.user_collectives
    kept = {name: _select_steps(getattr(trace, name), (firsts["step"], ALL_STEPS[1])) for name in TABLES}
    return kept | {"user_collectives": own[own["start_ns"] >= firsts["start_ns"]].reset_index(drop=True)}

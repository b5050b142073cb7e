"""Tidy tables made from the files of ranks, with one row per observation, in nanoseconds.

========== ====================================================================================================
steps      rank, step, start_ns, end_ns, is_light
phases     rank, model, step, phase, start_ns, end_ns, no_sync
gradients  rank, model, step, plan_epoch, parameter, ready_ns
copies     rank, model, step, plan_epoch, bucket, direction ("in", "out"), start_ns, end_ns
collectives rank, model, group, step, plan_epoch, plan_hash, bucket (-1: none), op, dtype, elements, bytes,
           call_site, ready_ns, launch_ns, start_ns, end_ns, end_uncertainty_ns, start_is_bound
incidents  rank, step, incident, time_ns
pauses     rank, step, generation, start_ns, end_ns
segments   ``SEGMENT_COLUMNS``; plans: ``PLAN_COLUMNS``
modes      ``MODE_COLUMNS``
links      rank, time_ns, local, peer, peer_rank (-1: unknown), ``LINK_COUNTERS``
machine    ``MACHINE_COLUMNS``: facts about the machine; machine_sources: ``MACHINE_SOURCE_COLUMNS``
========== ====================================================================================================

Times are those of each rank's clock. ``ready_ns`` is missing for collectives without a bucket, ``start_ns`` and
``end_ns`` for collectives that were launched but never seen to complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.clock_alignment import RankClock
from overlapscope.trace.clocks import ClockMap
from overlapscope.trace.collective_arrival import occurrence_index
from overlapscope.trace.event_log import RECORD_DTYPE, Records
from overlapscope.trace.folders import parse_unix_offset_ns
from overlapscope.trace.rank_folder import (
    LINK_COUNTERS,
    LINK_ENDPOINTS,
    LinkRow,
    PlanRows,
    RankRecording,
    Rounds,
    read_rank_recording,
)
from overlapscope.trace.schema import DTYPE_BYTES, DTYPES, NO_INDEX, OPS, RECORD_BYTES, Flag, Kind, Phase

TABLES: Final = ("steps", "phases", "gradients", "copies", "collectives", "incidents", "pauses", "segments")
"""Names of the tables that ``build_event_tables`` returns."""

PHASE_NAMES: Final = tuple(phase.name.lower() for phase in Phase)

_DTYPE_BYTES: Final = np.array([DTYPE_BYTES[name] for name in DTYPES], dtype=np.int64)


_NO_RECORDS: Final[Records] = np.empty(0, dtype=RECORD_DTYPE)

TIMES: Final = ("start_ns", "end_ns", "ready_ns", "launch_ns", "time_ns", "since_ns")
"""Columns that hold points in time; other columns of nanoseconds hold durations."""


def build_event_tables(logs: Mapping[int, Records], *, starts_mid_step: bool = False) -> dict[str, pd.DataFrame]:
    """Convert the records of some ranks to tables, in which the rows of a rank are contiguous.

    Args:
        logs: records of each rank, in the order of their sequence numbers.
        starts_mid_step: true if they may begin in the middle of a step.
    """
    kept = [drop_steps_cut_by_ring(records, starts_mid_step=starts_mid_step) for records in logs.values()]
    records = np.concatenate([_as_numbers(own) for own in kept]) if kept else _as_numbers(_NO_RECORDS)
    rank = np.repeat(np.array([*logs], dtype=np.int64), [len(own) for own in kept])
    by_kind = _by_kind(records, rank)
    steps, incidents, pauses = by_kind[Kind.STEP], by_kind[Kind.INCIDENT], by_kind[Kind.PAUSE]
    gradients, segments = by_kind[Kind.GRADIENT_READY], by_kind[Kind.SEGMENT]
    return {
        "steps": steps.table(
            step=steps["step"],
            start_ns=steps["start_ns"],
            end_ns=steps["end_ns"],
            is_light=(steps["flags"] & Flag.LIGHT) != 0,
        ),
        "phases": _phases(by_kind[Kind.PHASE]),
        "gradients": gradients.table(
            **gradients.coordinates, parameter=gradients["index"], ready_ns=gradients["end_ns"]
        ),
        "copies": _copies(by_kind[Kind.COPY_IN], by_kind[Kind.COPY_OUT]),
        "collectives": _collectives(by_kind[Kind.LAUNCH], by_kind[Kind.COLLECTIVE], by_kind[Kind.BUCKET_READY]),
        "incidents": incidents.table(
            step=incidents["step"], incident=incidents["index"], time_ns=incidents["start_ns"]
        ),
        "pauses": pauses.table(
            step=pauses["step"], generation=pauses["index"], start_ns=pauses["start_ns"], end_ns=pauses["end_ns"]
        ),
        "segments": segments.table(
            **segments.coordinates,
            segment=segments["index"],
            start_ns=segments["start_ns"],
            end_ns=segments["end_ns"],
        ),
    }


@dataclass(frozen=True, eq=False)
class _RankedRecords:
    """Records of one kind, rank by rank."""

    rank: npt.NDArray[np.int64]
    records: Records

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, field: str) -> npt.NDArray[Any]:
        return self.records[field]

    def of(self, which: npt.NDArray[np.bool_]) -> _RankedRecords:
        return self if which.all() else _RankedRecords(self.rank[which], self.records[which])

    @property
    def coordinates(self) -> dict[str, npt.NDArray[Any]]:
        return {name: self[name] for name in ("model", "step", "plan_epoch")}

    def table(self, **columns: Any) -> pd.DataFrame:
        signed = {
            name: values.astype(np.int64) if values.dtype.kind == "u" else values for name, values in columns.items()
        }
        return pd.DataFrame({"rank": self.rank} | signed)


def _by_kind(records: npt.NDArray[np.int64], rank: npt.NDArray[np.int64]) -> dict[Kind, _RankedRecords]:
    kind = np.ascontiguousarray(_as_records(records)["kind"])
    order = np.argsort(kind, kind="stable")  # a single pass for 8-bit numbers
    edges = np.searchsorted(kind[order], [*Kind, max(Kind) + 1])
    rows = [order[begin:end] for begin, end in pairwise(edges.tolist())]
    return {
        name: _RankedRecords(rank[own], _as_records(records.take(own, axis=0)))
        for name, own in zip(Kind, rows, strict=True)
    }


def _as_numbers(records: Records) -> npt.NDArray[np.int64]:
    """View records as 64-bit integers, shape (N, 8), because numpy copies such rows eight times as fast as records."""
    return records.view(np.int64).reshape(-1, RECORD_BYTES // 8)


def _as_records(numbers: npt.NDArray[np.int64]) -> Records:
    return numbers.reshape(-1).view(RECORD_DTYPE)


def map_to_clocks(tables: Mapping[str, pd.DataFrame], clocks: Mapping[int, ClockMap]) -> dict[str, pd.DataFrame]:
    """Map the times of tables to another clock; the rows of a rank have to be contiguous.

    Args:
        clocks: maps of the ranks whose times are to be mapped.
    """
    return {name: _map_table_to_clocks(table, clocks) for name, table in tables.items()} if clocks else dict(tables)


def _map_table_to_clocks(table: pd.DataFrame, clocks: Mapping[int, ClockMap]) -> pd.DataFrame:
    if table.empty:
        return table
    rank = table["rank"].to_numpy()
    edges = [*np.flatnonzero(np.append(True, rank[1:] != rank[:-1])[: len(rank)]).tolist(), len(rank)]
    moved = {name: table[name].to_numpy(np.int64, copy=True, na_value=0) for name in TIMES if name in table}
    spans = [(begin, end, clocks.get(int(rank[begin]))) for begin, end in pairwise(edges)]
    for clock, of_clock in groupby(spans, key=lambda span: span[2]):  # ranks of one host share a map
        run_number = list(of_clock)
        begin, end = run_number[0][0], run_number[-1][1]
        for times_ns in moved.values() if clock is not None else ():
            times_ns[begin:end] = clock(times_ns[begin:end])
    columns = {
        name: times_ns
        if isinstance(table[name].dtype, np.dtype)
        else pd.arrays.IntegerArray(times_ns, table[name].isna().to_numpy())
        for name, times_ns in moved.items()
    }
    return table.assign(**columns)


def drop_steps_cut_by_ring(records: Records, *, starts_mid_step: bool = False) -> Records:
    """Drop steps that may be incomplete because of a gap in the sequence numbers, or where the latest records begin.

    Device times are written late, in order, with a step's own record last. So before a gap only the steps that have
    ended are complete, and after it only those that begin after it, according to the records that are never late. The
    latest step is kept if it has not ended: no statistics use it, and it shows how far the rank got.

    Example: records 1 to 3 are all of step 0 and the beginning of step 1, records 4 to 8 are overwritten, and records 9
    to 12 are the end of step 7, step 8, and the beginning of step 9. Steps 1 and 7 are incomplete, and so may be step
    8, the first with a prompt record after the gap. Steps 0 and 9 are kept.
    """
    run_number = np.concatenate([[0], np.cumsum(np.diff(records["sequence"].astype(np.int64)) > 1)])
    last = run_number[-1]
    if not last and not starts_mid_step:
        return records
    step = records["step"].astype(np.int64)
    is_prompt = np.isin(records["kind"], (Kind.PHASE_BEGIN, Kind.LAUNCH))
    cut_up_to = np.full(last + 1, np.iinfo(np.int64).max)
    np.minimum.at(cut_up_to, run_number[is_prompt], step[is_prompt])
    if records["sequence"][0] == 1:
        cut_up_to[0] = -1
    # Steps are 32-bit numbers, so a run and a step share 64 bits without loss.
    coordinates, is_end = (run_number << 32) | step, records["kind"] == Kind.STEP
    has_ended = (run_number == last) | np.isin(coordinates, coordinates[is_end])
    is_newest = (step == step.max()) & (run_number == last) & ~np.any(is_end & (step == step.max()))
    return records[(step > cut_up_to[run_number]) & has_ended | is_newest]


def _categories(numbers: npt.NDArray[Any], names: Sequence[str]) -> pd.Categorical[str]:
    return pd.Categorical.from_codes(numbers.astype(np.int8), categories=pd.Index(names))


def _phases(phases: _RankedRecords) -> pd.DataFrame:
    return phases.table(
        model=phases["model"],
        step=phases["step"],
        phase=_categories(phases["index"], PHASE_NAMES),
        start_ns=phases["start_ns"],
        end_ns=phases["end_ns"],
        no_sync=(phases["flags"] & Flag.NO_SYNC) != 0,
    )


def _copies(copies_in: _RankedRecords, copies_out: _RankedRecords) -> pd.DataFrame:
    rank = np.concatenate([copies_in.rank, copies_out.rank])
    records = np.concatenate([copies_in.records, copies_out.records])
    order = np.lexsort((records["sequence"], rank))
    copies = _RankedRecords(rank[order], records[order])
    direction = np.repeat(np.array([0, 1], dtype=np.int8), [len(copies_in), len(copies_out)])[order]
    return copies.table(
        **copies.coordinates,
        bucket=copies["index"],
        direction=_categories(direction, ["in", "out"]),
        start_ns=copies["start_ns"],
        end_ns=copies["end_ns"],
    )


def _collectives(launches: _RankedRecords, completions: _RankedRecords, readies: _RankedRecords) -> pd.DataFrame:
    """Return one row per launch, with the completion and the bucket's readiness of the same occurrence in its step.

    An all-gather gathers parameters, for which no gradient has to be ready.
    """
    elements = launches["elements"].astype(np.int64)
    done = _match_occurrences(launches, completions, match_op=True)
    ready = np.full(len(launches), -1)
    for op in set(np.unique(launches["op"]).tolist()) - {OPS.index("all_gather")}:
        of_op = launches["op"] == op  # occurrences are counted per operation, because a bucket may have several
        ready[of_op] = _match_occurrences(launches.of(of_op), readies, match_op=False)
    uncertainty = _take_nullable(completions["end_uncertainty_ns"].astype(np.int64), done)
    is_bound = _take_nullable((completions["flags"] & Flag.START_IS_LOWER_BOUND).astype(np.int64), done)
    return launches.table(
        model=launches["model"],
        group=launches["group"],
        step=launches["step"],
        plan_epoch=launches["plan_epoch"],
        plan_hash=launches["plan_hash"],
        bucket=np.where(launches["index"] == NO_INDEX, -1, launches["index"].astype(np.int64)),
        op=_categories(launches["op"], OPS),
        dtype=_categories(launches["dtype"], DTYPES),
        elements=elements,
        bytes=elements * _DTYPE_BYTES[launches["dtype"]],
        call_site=launches["call_site"],
        ready_ns=_take_nullable(readies["end_ns"], ready),
        launch_ns=launches["start_ns"],
        start_ns=_take_nullable(completions["start_ns"], done),
        end_ns=_take_nullable(completions["end_ns"], done),
        end_uncertainty_ns=uncertainty.fillna(0).astype("int64"),
        start_is_bound=(is_bound.fillna(0) != 0).to_numpy(dtype=bool),
    )


def _match_occurrences(launches: _RankedRecords, others: _RankedRecords, *, match_op: bool) -> npt.NDArray[Any]:
    """Return the position of each launch's counterpart in ``others``, or -1.

    The n-th launch of a bucket in a step belongs to the n-th of ``others`` with the same bucket and step. Example:
    launches of buckets 0, 1, 0 and completions of buckets 0, 0 give positions 0, -1, 1.
    """
    fields = ["model", "step", "index"] + (["op"] if match_op else [])
    sides = [[side.rank, *(side[field] for field in fields)] for side in (launches, others)]
    if len(launches) == len(others) and all(np.array_equal(*pair) for pair in zip(*sides, strict=True)):
        return np.arange(len(launches))  # as in most recordings
    keys = [np.concatenate(pair) for pair in zip(*([*side, occurrence_index(*side)] for side in sides), strict=True)]
    is_other = np.arange(len(keys[0])) >= len(launches)
    order = np.lexsort((is_other, *keys))
    # Equal keys occur at most once on each side, so equal neighbors are a launch and its counterpart.
    is_pair = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    position = np.full(len(launches), -1)
    position[order[:-1][is_pair]] = order[1:][is_pair] - len(launches)
    return position


def _take_nullable(values: npt.NDArray[Any], positions: npt.NDArray[Any]) -> pd.Series[int]:
    """Return ``values[positions]`` as nullable integers, missing where the position is -1."""
    if not len(values):
        return pd.Series(pd.NA, index=range(len(positions)), dtype="Int64")
    return pd.Series(values[positions]).astype("Int64").mask(pd.Series(positions < 0))


PLAN_COLUMNS: Final = (
    *("model", "plan_epoch", "plan_hash", "bucket", "position"),
    *("parameter", "name", "shape", "elements", "dtype", "bytes"),
)

SEGMENT_COLUMNS: Final = (
    *("rank", "model", "step", "plan_epoch", "bucket", "lane", "phase", "round", "rounds"),
    *("sent_to", "sent_bytes", "received_from", "received_bytes", "start_ns", "end_ns"),
)

MODE_COLUMNS: Final = ("rank", "step", "agreed_step", "every", "detail", "time_ns")
"""Columns of recording modes, see ``recording_modes.BegunMode``."""

MACHINE_COLUMNS: Final = ("rank", "time_ns", "since_ns", "source", "name", "value")
"""Columns of what ranks have sampled of the machine: the rank that did, and ``machine_log.MachineReading``."""

MACHINE_SOURCE_COLUMNS: Final = ("rank", "source", "label", "facts", "why")
"""Columns of the sources that ranks use, and of what could not be read: ``machine_log.MachineSource``."""

_UNKNOWN: Final = (-1, 0, "", 0, 0, "", 0, "", 0)

UNKNOWN_RANK: Final = -1
"""Rank at the other end of a connection if it is unknown."""


def build_plans_table(plans: Iterable[PlanRows]) -> pd.DataFrame:
    """Return the plans of some ranks, each once."""
    rows = [row for distinct in dict.fromkeys(plans) for row in distinct]
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS)).drop_duplicates(ignore_index=True)


def add_segment_content(segments: pd.DataFrame, rounds: Mapping[int, Rounds]) -> pd.DataFrame:
    """Add descriptions to segments.

    Args:
        segments: table from ``build_event_tables``.
        rounds: descriptions by rank; a rank without segments may be missing.

    Returns:
        ``SEGMENT_COLUMNS``: ``sent_to`` and ``received_from`` are ranks as text, ``1, 2``. ``bucket`` is -1 for a
            segment whose description is lost.
    """
    keys = zip(segments["rank"].tolist(), segments["segment"].tolist(), strict=True)
    found = [rounds[rank].get(number, _UNKNOWN) for rank, number in keys]
    names = ("bucket", "lane", "phase", "round", "rounds", "sent_to", "sent_bytes", "received_from", "received_bytes")
    types = dict.fromkeys(names, "int64") | dict.fromkeys(("phase", "sent_to", "received_from"), "str")
    return pd.concat([segments, _tabulate(found, types)], axis=1)[list(SEGMENT_COLUMNS)]


def build_link_samples(rows: Mapping[int, list[LinkRow]]) -> pd.DataFrame:
    """Return the samples of some ranks as a table, in the time of each rank's host.

    Args:
        rows: rows by rank.
    """
    types = {"time_ns": "int64"} | dict.fromkeys(LINK_ENDPOINTS, "str") | dict.fromkeys(LINK_COUNTERS, "int64")
    samples = _tabulate([*chain.from_iterable(rows.values())], types)
    samples.insert(0, "rank", np.repeat(np.array([*rows], dtype=np.int64), [len(own) for own in rows.values()]))
    return samples


def add_peer_ranks(samples: pd.DataFrame) -> pd.DataFrame:
    """Add the rank at the other end: the one that has the same connection with its endpoints swapped.

    It is unknown where addresses are translated on the way, or if two hosts each have a connection between the same
    addresses and ports.
    """
    ends = samples[["rank", *LINK_ENDPOINTS]].drop_duplicates()
    ends = ends.drop_duplicates(LINK_ENDPOINTS, keep=False)
    others = ends.rename(columns={"rank": "peer_rank", "local": "peer", "peer": "local"})
    found = samples.merge(others, how="left", on=LINK_ENDPOINTS)
    found.insert(4, "peer_rank", found.pop("peer_rank").fillna(UNKNOWN_RANK).astype("int64"))
    return found


_RECORDS_PER_BATCH: Final = 1_000_000
"""Target number of records of a shard: more would not fit into the caches, fewer take longer to convert than to
read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Tables of some ranks, several at a time, because tables cost time per table. Times are of each rank's clock."""

    ranks: pd.DataFrame
    """Columns: rank, host, pid, device, closed."""
    clocks: list[RankClock]
    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one."""
    tables: dict[str, pd.DataFrame]
    """Event tables by name: ``tables.TABLES``. The rows of a rank are contiguous."""
    unsplit: dict[str, pd.DataFrame]
    """Other tables: user_collectives, links, machine, machine_sources, modes, call_sites."""
    plans: set[PlanRows]


def read_shards(
    folders: Mapping[int, Path],
    problems: list[Problem],
    latest_records: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Shard]:
    """Read the ranks of a recording, several at a time; ranks that can't be read are reported as problems.

    Args:
        folders: rank folders by rank.
        problems: receives problems with files.
        latest_records: number of the latest records to read of each rank; None: all.
        progress: called with (number of ranks read so far, number of ranks).
    """
    known_plans: dict[bytes, PlanRows] = {}
    files: list[RankRecording] = []
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done, len(folders))
        try:
            files.append(read_rank_recording(rank, folder, problems, known_plans, latest_records=latest_records))
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
        if sum(len(one.records) for one in files) >= _RECORDS_PER_BATCH:
            yield build_shard(files, starts_mid_step=latest_records is not None)
            files = []
    if files:
        yield build_shard(files, starts_mid_step=latest_records is not None)
    if progress:
        progress(len(folders), len(folders))


def build_shard(files: Sequence[RankRecording], *, starts_mid_step: bool = False) -> Shard:
    """Build the tables of some ranks.

    Args:
        starts_mid_step: true if records may begin in the middle of a step.
    """
    tables = build_event_tables(
        {one.rank: one.records for one in files if len(one.records)}, starts_mid_step=starts_mid_step
    )
    return Shard(
        ranks=pd.DataFrame(
            [
                {
                    "rank": one.rank,
                    "host": str(one.rank_info.get("host", "unknown")),
                    "pid": pid if isinstance(pid := one.rank_info.get("pid"), int) else -1,
                    "device": str(one.rank_info.get("device", "unknown")),
                    "closed": one.was_closed,
                }
                for one in files
            ]
        ),
        clocks=[_clock_of(one) for one in files],
        run=next((one.run for one in files if one.run), {}),
        tables=tables | {"segments": add_segment_content(tables["segments"], {one.rank: one.rounds for one in files})},
        unsplit={
            "user_collectives": _user_collectives(files),
            "links": build_link_samples({one.rank: one.links for one in files}),
            "machine": _machine(files),
            "machine_sources": _machine_sources(files),
            "modes": _modes(files),
            "call_sites": _call_sites(files),
        },
        plans={one.plans for one in files},
    )


@lru_cache(maxsize=1)
def empty_tables() -> dict[str, pd.DataFrame]:
    """Return all tables without rows."""
    nothing = build_shard([])
    return nothing.tables | nothing.unsplit


def _user_collectives(files: Sequence[RankRecording]) -> pd.DataFrame:
    rank = np.repeat(
        np.array([one.rank for one in files], np.int64), [one.user_collectives_ns.shape[1] for one in files]
    )
    nothing = np.zeros((2, 0), dtype=np.int64)
    start_ns, end_ns = np.concatenate([nothing, *(one.user_collectives_ns for one in files)], axis=1)
    return pd.DataFrame({"rank": rank, "start_ns": start_ns, "end_ns": end_ns})


def _machine(files: Sequence[RankRecording]) -> pd.DataFrame:
    rows = [(one.rank, *reading) for one in files for reading in one.machine.readings]
    return _tabulate(
        rows, dict.fromkeys(MACHINE_COLUMNS, "int64") | {"source": "str", "name": "str", "value": "float64"}
    )


def _machine_sources(files: Sequence[RankRecording]) -> pd.DataFrame:
    rows = [(one.rank, *source) for one in files for source in one.machine.sources]
    return _tabulate(rows, dict.fromkeys(MACHINE_SOURCE_COLUMNS, "str") | {"rank": "int64"})


def _modes(files: Sequence[RankRecording]) -> pd.DataFrame:
    rows = [
        (one.rank, mode.step, mode.agreed_step, mode.every, mode.detail, mode.time_ns)
        for one in files
        for mode in one.modes
    ]
    return _tabulate(rows, dict.fromkeys(MODE_COLUMNS, "int64") | {"detail": "str"})


def _tabulate(rows: Sequence[tuple[Any, ...]], types: Mapping[str, str]) -> pd.DataFrame:
    """Return a table of rows, of which there may be none, with columns of these types."""
    columns: Iterable[tuple[Any, ...]] = zip(*rows, strict=True) if rows else [()] * len(types)
    return pd.DataFrame(
        {name: pd.Series(values, dtype=kind) for (name, kind), values in zip(types.items(), columns, strict=True)}
    )


def _call_sites(files: Sequence[RankRecording]) -> pd.DataFrame:
    rows = [(one.rank, *site) for one in files for site in one.call_sites]
    return pd.DataFrame(rows, columns=["rank", "call_site", "file", "line", "function"])


def _clock_of(files: RankRecording) -> RankClock:
    boot, records = files.rank_info.get("boot_id"), files.records
    return RankClock(
        rank=files.rank,
        boot=boot and str(boot),
        unix_offset_ns=parse_unix_offset_ns(files.rank_info),
        bursts=files.bursts,
        peers=json.dumps(files.run.get("ranks")),
        begin_ns=int(records["start_ns"].min()) if len(records) else 0,
        end_ns=int(records["end_ns"].max()) if len(records) else 0,
        hooked_models=files.hooked_models,
        ends_are_kernels=files.rank_info.get("ends_are_kernels") is True,
    )

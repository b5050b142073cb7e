"""From logs to tables: shards of ranks that are read in parallel and fit into memory, and their assembly.

Assembly aligns the clocks, and builds the tables that are not split by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.text import format_ranks, rank_list
from overlapscope.trace import cache
from overlapscope.trace.cache import ConvertedShards, checkpoint_shard, drop_checkpoints, load_checkpoint, staging_dir
from overlapscope.trace.clock_alignment import Alignment, RankClock, align_clocks, collect_all_reduces, merge_by_clock
from overlapscope.trace.clocks import ClockMap
from overlapscope.trace.event_log import count_record_bytes, read_step_bounds
from overlapscope.trace.folders import parse_expected_ranks
from overlapscope.trace.json_files import read_json, read_lines
from overlapscope.trace.off_steps import describe_all_off_steps
from overlapscope.trace.rank_folder import RankFolder
from overlapscope.trace.schema import EVENTS_FILE, PARAMETERS_FILE, RANK_FILE, RECORD_BYTES
from overlapscope.trace.table_file import TableFile
from overlapscope.trace.tables import TABLES, Shard, add_peer_ranks, build_plans_table, map_to_clocks, read_shards
from overlapscope.workers import Workers


@dataclass(frozen=True, kw_only=True, eq=False)
class AssembledRecording:
    """Data of all ranks together."""

    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one; empty if none has."""
    unsplit: dict[str, pd.DataFrame]
    """Tables that are not split, as in ``Trace`` (``cache.UNSPLIT_TABLES``), and the
    clock maps that ``build_clock_maps`` reads."""
    problems: list[Problem]


def assemble_shards(
    folders: Mapping[int, Path], shards: Sequence[Shard], by_clock: Mapping[str, pd.DataFrame], problems: list[Problem]
) -> AssembledRecording:
    """Combine the shards of a recording and align their clocks.

    Args:
        folders: rank folders by rank, of all ranks.
        by_clock: all-reduces by clock, see ``align_clocks``.
        problems: problems found so far.

    Raises:
        OverlapScopeError: no rank could be read.
    """
    if not shards:
        raise OverlapScopeError(problems[0].message)
    run = next((shard.run for shard in shards if shard.run), {})
    clocks = [clock for shard in shards for clock in shard.clocks]
    alignments, unaligned = align_clocks(clocks, by_clock)
    maps = _maps_table(clocks, alignments)
    by_rank = build_clock_maps(maps)
    on_common_clock = [map_to_clocks(shard.unsplit, by_rank) for shard in shards]
    unsplit = {
        name: pd.concat([each[name] for each in on_common_clock], ignore_index=True) for name in shards[0].unsplit
    }
    columns = pd.DataFrame([_clock_columns(*each) for each in zip(clocks, alignments, strict=True)])
    ranks = pd.concat([shard.ranks for shard in shards], ignore_index=True)
    unsplit["ranks"] = pd.concat([ranks.drop(columns="closed"), columns, ranks["closed"]], axis=1)
    unsplit["plans"] = build_plans_table(rows for shard in shards for rows in shard.plans)
    unsplit["links"] = add_peer_ranks(unsplit["links"])
    unsplit["clocks"] = maps
    path = next(iter(folders.values())).parent
    return AssembledRecording(
        run=run,
        unsplit=unsplit,
        problems=[
            *problems,
            *_report_modes(path, unsplit["modes"]),
            *_report_missing_event_logs(path, folders),
            *_report_python_reducer(path, folders),
            *_report_missing_ranks(path, folders, run),
            *unaligned,
        ],
    )


def build_clock_maps(clocks: pd.DataFrame) -> dict[int, ClockMap]:
    """Return the map from each rank's clock to the common clock, without ranks that use the common clock.

    Args:
        clocks: one row per knot of a map: rank, own_ns, offset_ns, error_ns; the rows of a rank are contiguous.
    """
    rank = clocks["rank"].to_numpy()
    columns = [clocks[name].to_numpy() for name in ("own_ns", "offset_ns", "error_ns")]
    edges = [*np.flatnonzero(np.append(True, rank[1:] != rank[:-1])[: len(rank)]).tolist(), len(rank)]
    found: dict[int, ClockMap] = {}
    known: dict[bytes, ClockMap] = {}
    for begin, end in pairwise(edges):
        own_ns, offset_ns, error_ns = (column[begin:end] for column in columns)
        content = own_ns.tobytes() + offset_ns.tobytes() + error_ns.tobytes()
        if content not in known:  # ranks of one host share a clock
            known[content] = ClockMap(own_ns=own_ns, offset_ns=offset_ns, error_ns=error_ns)
        found[int(rank[begin])] = known[content]
    return found


def _maps_table(clocks: Sequence[RankClock], alignments: Sequence[Alignment]) -> pd.DataFrame:
    both = zip(clocks, alignments, strict=True)
    maps = [(clock.rank, alignment.map) for clock, alignment in both if alignment.clock != "same boot"]
    rank = np.repeat(np.array([rank for rank, _ in maps], dtype=np.int64), [len(each.own_ns) for _, each in maps])
    return pd.DataFrame(
        {
            "rank": rank,
            "own_ns": np.concatenate([np.empty(0, np.int64), *(each.own_ns for _, each in maps)]),
            "offset_ns": np.concatenate([np.empty(0, np.int64), *(each.offset_ns for _, each in maps)]),
            "error_ns": np.concatenate([np.empty(0, np.float64), *(each.error_ns for _, each in maps)]),
        }
    )


def _clock_columns(rank: RankClock, alignment: Alignment) -> dict[str, Any]:
    """Return the clock columns of the table of ranks; offset and drift are those over the recorded time span."""
    offset_ns, last_offset_ns = (int(ns) for ns in alignment.map.offset_at([rank.begin_ns, rank.end_ns]))
    return {
        "boot": rank.boot,
        "clock": alignment.clock,
        "offset_ns": offset_ns,
        "drift_ppm": 1e6 * (last_offset_ns - offset_ns) / max(1, rank.end_ns - rank.begin_ns),
        "error_ns": alignment.map.error_over(rank.begin_ns, rank.end_ns),
    }


def _report_modes(path: Path, modes: pd.DataFrame) -> list[Problem]:
    """Return notes on steps that are not there because recording was off, and on ranks that switched late."""
    notes = [f"recording was off {steps}" for steps in describe_all_off_steps(modes)]
    late = modes[modes["step"] > modes["agreed_step"]]
    notes += [
        f"{rank_list(ranks)} saw the request for step {agreed} late, in step {step}"
        for (agreed, step), ranks in late.groupby(["agreed_step", "step"])["rank"]
    ]
    return [Problem("note", f"{path}: {note}") for note in notes]


def _report_missing_event_logs(path: Path, folders: Mapping[int, Path]) -> list[Problem]:
    without = [rank for rank, folder in folders.items() if RankFolder(folder).has_only_collective_logs()]
    if not without:
        return []
    who = "no rank has" if len(without) == len(folders) else f"{len(without)} of {len(folders)} ranks don't have"
    what = "only the order of their collectives can be shown"
    return [Problem("note", f"{path}: {who} an event log of steps, as no reduction of gradients was seen; {what}")]


def _report_python_reducer(path: Path, folders: Mapping[int, Path]) -> list[Problem]:
    """Return a note on models whose all-reduces may be part of compiled code, according to the lowest rank."""
    names = read_lines(folders[min(folders)] / PARAMETERS_FILE, [], _class_if_reduced_in_python)
    if not names:
        return []
    who = f"the Python reducer of torch's DDP reduces the gradients of {', '.join(names)}"
    what = (
        "each alone, or as torch.compile puts them together: in the order of collectives, and not as buckets of a step"
    )
    return [Problem("note", f"{path}: {who}, {what}")]


def _class_if_reduced_in_python(line: Any) -> list[str]:
    return [line["class"]] if line["settings"].get("reduced_by") == "python_reducer" else []


def _report_missing_ranks(path: Path, folders: Mapping[int, Path], run: dict[str, Any]) -> list[Problem]:
    expected = parse_expected_ranks(run)
    missing = sorted(set(expected) - folders.keys())
    if not missing:
        return []
    names = format_ranks(missing)
    if "imported" in run:
        what = (
            f"of {len(expected)} ranks, {len(missing)} {'was' if len(missing) == 1 else 'were'} not imported: {names}"
        )
        return [Problem("note", f"{path}: {what}; import the traces of all ranks to see who is waited for")]
    return [Problem("error", f"{path}: {len(missing)} of {len(expected)} ranks left no log: {names}")]


_RECORDS_PER_SHARD: Final = 4_000_000
_RECORDS_PER_RANGE: Final = 8_000_000
"""Number of records that one process holds at once; with everything computed from them that takes a gigabyte."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Partition of a recording into shards of ranks and ranges of steps."""

    shards: list[dict[int, Path]]
    """Rank folders of each shard, by rank."""
    between: list[int]
    """Steps at which ranges end and the next ones begin."""


@dataclass(frozen=True, kw_only=True)
class _ShardTask:
    number: int
    folders: dict[int, Path]
    staging: Path
    between: list[int]
    compares_clocks: bool


def partition_recording(folders: Mapping[int, Path]) -> Partition:
    """Partition a recording such that each shard, and each range of steps, has a few million records.

    Example: 20 million records of steps 0 to 99 make 3 ranges of 34 steps, which end before steps 34 and 68, and a last
    one of 32 steps.
    """
    shards: list[dict[int, Path]] = [{}]
    records = total = 0
    steps: list[int] = []
    for rank, folder in folders.items():
        own = count_record_bytes(folder / EVENTS_FILE) // RECORD_BYTES
        if shards[-1] and records + own > _RECORDS_PER_SHARD:
            shards.append({})
            records = 0
        shards[-1][rank] = folder
        records += own
        total += own
    if total > _RECORDS_PER_RANGE:
        steps = read_step_bounds(next(iter(folders.values())) / EVENTS_FILE)
    if not steps:
        return Partition(shards=shards, between=[])
    first, latest = steps
    ranges = math.ceil(total / _RECORDS_PER_RANGE)
    each = max(3, math.ceil((latest + 1 - first) / ranges))
    return Partition(shards=shards, between=list(range(first + each, latest, each)))


def convert_recording(
    path: Path,
    folders: Mapping[int, Path],
    fingerprint: str,
    plan: Partition,
    workers: Workers,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write the tables of a recording, reusing shards that an interrupted process has finished.

    Args:
        progress: called with (number of ranks read so far, number of ranks).

    Raises:
        OSError: they can't be written.
        OverlapScopeError: no rank can be read.
    """
    compares_clocks = len({read_json(folder / RANK_FILE, []).get("boot_id") for folder in folders.values()}) > 1
    with staging_dir(path, f"{fingerprint} {[sorted(shard) for shard in plan.shards]} {plan.between}") as staging:
        tasks = [
            _ShardTask(
                number=number, folders=shard, staging=staging, between=plan.between, compares_clocks=compares_clocks
            )
            for number, shard in enumerate(plan.shards)
        ]
        in_order = _convert_all(staging, tasks, workers, progress)
        assembled = assemble_shards(
            folders,
            [shard for each in in_order for shard in each.shards],
            merge_by_clock(each.by_clock for each in in_order),
            [problem for each in in_order for problem in each.problems],
        )
        files = [each.files for each in in_order]
        drop_checkpoints(staging)
        cache.publish_tables(
            staging, path, fingerprint, assembled.unsplit, assembled.run, assembled.problems, plan.between, files
        )


def _convert_all(
    staging: Path, tasks: Sequence[_ShardTask], workers: Workers, progress: Callable[[int, int], None] | None
) -> list[ConvertedShards]:
    """Return the converted shards of all tasks, in order, those that were finished before from their checkpoints."""
    found = {task.number: shard for task in tasks if (shard := load_checkpoint(staging, task.number)) is not None}
    left = [task for task in tasks if task.number not in found]
    ranks = sum(len(task.folders) for task in tasks)
    done = ranks - sum(len(task.folders) for task in left)
    if progress:
        progress(done, ranks)
    for index, converted in workers.map(_convert, left):
        found[left[index].number] = converted
        done += len(left[index].folders)
        if progress:
            progress(done, ranks)
    return [found[number] for number in range(len(tasks))]


def _convert(task: _ShardTask) -> ConvertedShards:
    problems: list[Problem] = []
    shards = list(read_shards(task.folders, problems))
    files: dict[str, TableFile] = {}
    by_clock: dict[str, pd.DataFrame] = {}
    if shards:
        tables = concat_tables(shards)
        files = cache.write_shard(task.staging, task.number, tables, task.between)
        if task.compares_clocks:
            by_clock = collect_all_reduces([clock for shard in shards for clock in shard.clocks], tables["collectives"])
    without = [replace(shard, tables={}) for shard in shards]
    converted = ConvertedShards(shards=without, files=files, problems=problems, by_clock=by_clock)
    checkpoint_shard(task.staging, task.number, converted)
    return converted


def concat_tables(shards: list[Shard]) -> dict[str, pd.DataFrame]:
    """Concatenate the event tables of several shards."""
    if len(shards) == 1:
        return {name: shards[0].tables[name] for name in TABLES}
    return {name: pd.concat([shard.tables[name] for shard in shards], ignore_index=True) for name in TABLES}

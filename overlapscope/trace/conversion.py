"""Conversion of event logs to Parquet tables, in shards of ranks that are read in parallel and fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pandas as pd

from overlapscope.trace import store
from overlapscope.trace.alignment import collect_all_reduces
from overlapscope.trace.assembly import assemble_shards
from overlapscope.trace.causality import merge_by_clock
from overlapscope.trace.draft import ConvertedShards, checkpoint_shard, drop_checkpoints, load_checkpoint, staging_dir
from overlapscope.trace.folders import read_json
from overlapscope.trace.format import EVENTS_FILE, RANK_FILE, RECORD_BYTES
from overlapscope.trace.log import Problem, count_record_bytes, read_step_bounds
from overlapscope.trace.part import Shard, read_shards
from overlapscope.trace.table_file import TableFile
from overlapscope.trace.tables import TABLES
from overlapscope.workers import Workers

_RECORDS_PER_SHARD: Final = 4_000_000
_RECORDS_PER_RANGE: Final = 8_000_000
"""Number of records that one process holds at once; with everything computed from them that takes a gigabyte."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Partition of a recording into shards of ranks and ranges of steps."""

    parts: list[dict[int, Path]]
    """Rank folders of each shard, by rank."""
    between: list[int]
    """Steps at which ranges end and the next ones begin."""


@dataclass(frozen=True, kw_only=True)
class _ShardTask:
    number: int
    folders: dict[int, Path]
    draft: Path
    between: list[int]
    compares_clocks: bool


def partition_recording(folders: Mapping[int, Path]) -> Partition:
    """Partition a recording such that each shard, and each range of steps, has a few million records.

    Example: 20 million records of steps 0 to 99 make 3 ranges of 34 steps, which end before steps 34 and 68, and a last
    one of 32 steps.
    """
    parts: list[dict[int, Path]] = [{}]
    records = total = 0
    steps: list[int] = []
    for rank, folder in folders.items():
        own = count_record_bytes(folder / EVENTS_FILE) // RECORD_BYTES
        if parts[-1] and records + own > _RECORDS_PER_SHARD:
            parts.append({})
            records = 0
        parts[-1][rank] = folder
        records += own
        total += own
    if total > _RECORDS_PER_RANGE:
        steps = read_step_bounds(next(iter(folders.values())) / EVENTS_FILE)
    if not steps:
        return Partition(parts=parts, between=[])
    first, latest = steps
    ranges = math.ceil(total / _RECORDS_PER_RANGE)
    each = max(3, math.ceil((latest + 1 - first) / ranges))
    return Partition(parts=parts, between=list(range(first + each, latest, each)))


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
    with staging_dir(path, f"{fingerprint} {[sorted(part) for part in plan.parts]} {plan.between}") as draft:
        tasks = [
            _ShardTask(number=number, folders=part, draft=draft, between=plan.between, compares_clocks=compares_clocks)
            for number, part in enumerate(plan.parts)
        ]
        found = {task.number: part for task in tasks if (part := load_checkpoint(draft, task.number)) is not None}
        left = [task for task in tasks if task.number not in found]
        done = len(folders) - sum(len(task.folders) for task in left)
        if progress:
            progress(done, len(folders))
        for index, converted in workers.map(_convert, left):
            found[left[index].number] = converted
            done += len(left[index].folders)
            if progress:
                progress(done, len(folders))
        in_order = [found[number] for number in range(len(tasks))]
        assembled = assemble_shards(
            folders,
            [part for each in in_order for part in each.parts],
            merge_by_clock(each.by_clock for each in in_order),
            [problem for each in in_order for problem in each.problems],
        )
        files = [each.files for each in in_order]
        drop_checkpoints(draft)
        store.publish_tables(
            draft, path, fingerprint, assembled.unsplit, assembled.run, assembled.problems, plan.between, files
        )


def _convert(task: _ShardTask) -> ConvertedShards:
    problems: list[Problem] = []
    parts = list(read_shards(task.folders, problems))
    files: dict[str, TableFile] = {}
    by_clock: dict[str, pd.DataFrame] = {}
    if parts:
        tables = concat_tables(parts)
        files = store.write_shard(task.draft, task.number, tables, task.between)
        if task.compares_clocks:
            by_clock = collect_all_reduces([clock for part in parts for clock in part.clocks], tables["collectives"])
    without = [replace(part, tables={}) for part in parts]
    converted = ConvertedShards(parts=without, files=files, problems=problems, by_clock=by_clock)
    checkpoint_shard(task.draft, task.number, converted)
    return converted


def concat_tables(parts: list[Shard]) -> dict[str, pd.DataFrame]:
    """Concatenate the event tables of several shards."""
    if len(parts) == 1:
        return {name: parts[0].tables[name] for name in TABLES}
    return {name: pd.concat([part.tables[name] for part in parts], ignore_index=True) for name in TABLES}

"""Shards of a recording: tables of several ranks at a time, because tables cost time per table, not per rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.alignment import RankClock
from overlapscope.trace.links import build_link_samples
from overlapscope.trace.log import Problem
from overlapscope.trace.plans import PlanRows
from overlapscope.trace.rank_files import RankRecording, read_rank_recording
from overlapscope.trace.segment_reader import add_segment_content
from overlapscope.trace.tables import build_event_tables

_RECORDS_PER_BATCH: Final = 1_000_000
"""Target number of records of a shard: more would not fit into the caches, fewer take longer to convert than to
read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Some ranks of a recording. Times are those of each rank's clock."""

    ranks: pd.DataFrame
    """Columns: rank, host, pid, device, closed."""
    clocks: list[RankClock]
    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one."""
    tables: dict[str, pd.DataFrame]
    """Event tables by name: ``tables.TABLES``. The rows of a rank are contiguous."""
    unsplit: dict[str, pd.DataFrame]
    """Other tables: user_collectives, links, call_sites."""
    plans: set[PlanRows]


def read_shards(
    folders: Mapping[int, Path],
    problems: list[Problem],
    latest_records: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Shard]:
    """Read the ranks of a recording, several at a time; ranks that can't be read are reported as problems.

    Args:
        folders: rank folders by rank.
        problems: receives problems with files.
        only_newest: number of the latest records to read of each rank; None: all.
        progress: called with the number of ranks that are done.
    """
    known_plans: dict[bytes, PlanRows] = {}
    files: list[RankRecording] = []
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done)
        try:
            files.append(read_rank_recording(rank, folder, problems, known_plans, latest_records=latest_records))
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
        if sum(len(one.records) for one in files) >= _RECORDS_PER_BATCH:
            yield build_shard(files, starts_mid_step=latest_records is not None)
            files = []
    if files:
        yield build_shard(files, starts_mid_step=latest_records is not None)


def build_shard(files: Sequence[RankRecording], *, starts_mid_step: bool = False) -> Shard:
    """Build the tables of some ranks.

    Args:
        are_newest: true if records may begin in the middle of a step.
    """
    tables = build_event_tables(
        {one.rank: one.records for one in files if len(one.records)}, starts_mid_step=starts_mid_step
    )
    return Shard(
        ranks=pd.DataFrame(
            [
                {
                    "rank": one.rank,
                    "host": one.rank_info.get("host", "unknown"),
                    "pid": one.rank_info.get("pid", -1),
                    "device": one.rank_info.get("device", "unknown"),
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


def _call_sites(files: Sequence[RankRecording]) -> pd.DataFrame:
    rows = [(one.rank, *site) for one in files for site in one.call_sites]
    return pd.DataFrame(rows, columns=["rank", "call_site", "file", "line", "function"])


def _clock_of(files: RankRecording) -> RankClock:
    try:
        sample = files.rank_info["clock_samples"][0]
        unix_offset_ns = int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        unix_offset_ns = None
    boot, records = files.rank_info.get("boot_id"), files.records
    return RankClock(
        rank=files.rank,
        boot=boot and str(boot),
        unix_offset_ns=unix_offset_ns,
        bursts=files.bursts,
        peers=json.dumps(files.run.get("ranks")),
        begin_ns=int(records["start_ns"].min()) if len(records) else 0,
        end_ns=int(records["end_ns"].max()) if len(records) else 0,
        hooked_models=files.hooked_models,
    )

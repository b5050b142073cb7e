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
from overlapscope.trace.links import link_samples
from overlapscope.trace.log import Problem
from overlapscope.trace.plans import PlanRows
from overlapscope.trace.rank_files import RankFiles, read_rank
from overlapscope.trace.segment_reader import with_content
from overlapscope.trace.tables import event_tables

_RECORDS_AT_ONCE: Final = 1_000_000
"""Target number of records of a shard: more would not fit into the caches, fewer take longer to convert than to
read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some ranks of a recording. Times are those of each rank's clock."""

    ranks: pd.DataFrame
    """Columns: rank, host, pid, device, closed."""
    clocks: list[RankClock]
    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one."""
    tables: dict[str, pd.DataFrame]
    """Event tables by name: ``tables.TABLES``. The rows of a rank are contiguous."""
    whole: dict[str, pd.DataFrame]
    """Other tables: user_collectives, links, call_sites."""
    plans: set[PlanRows]


def read_parts(
    folders: Mapping[int, Path],
    problems: list[Problem],
    only_newest: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Part]:
    """Read the ranks of a recording, several at a time; ranks that can't be read are reported as problems.

    Args:
        folders: rank folders by rank.
        problems: receives problems with files.
        only_newest: number of the latest records to read of each rank; None: all.
        progress: called with the number of ranks that are done.
    """
    known_plans: dict[bytes, PlanRows] = {}
    files: list[RankFiles] = []
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done)
        try:
            files.append(read_rank(rank, folder, problems, known_plans, only_newest=only_newest))
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
        if sum(len(one.records) for one in files) >= _RECORDS_AT_ONCE:
            yield part_of(files, are_newest=only_newest is not None)
            files = []
    if files:
        yield part_of(files, are_newest=only_newest is not None)


def part_of(files: Sequence[RankFiles], *, are_newest: bool = False) -> Part:
    """Build the tables of some ranks.

    Args:
        are_newest: true if records may begin in the middle of a step.
    """
    tables = event_tables({one.rank: one.records for one in files if len(one.records)}, are_newest=are_newest)
    return Part(
        ranks=pd.DataFrame(
            [
                {
                    "rank": one.rank,
                    "host": one.where.get("host", "unknown"),
                    "pid": one.where.get("pid", -1),
                    "device": one.where.get("device", "unknown"),
                    "closed": one.was_closed,
                }
                for one in files
            ]
        ),
        clocks=[_clock_of(one) for one in files],
        run=next((one.run for one in files if one.run), {}),
        tables=tables | {"segments": with_content(tables["segments"], {one.rank: one.rounds for one in files})},
        whole={
            "user_collectives": _user_collectives(files),
            "links": link_samples({one.rank: one.links for one in files}),
            "call_sites": _call_sites(files),
        },
        plans={one.plans for one in files},
    )


@lru_cache(maxsize=1)
def empty_tables() -> dict[str, pd.DataFrame]:
    """Return all tables without rows."""
    nothing = part_of([])
    return nothing.tables | nothing.whole


def _user_collectives(files: Sequence[RankFiles]) -> pd.DataFrame:
    rank = np.repeat(
        np.array([one.rank for one in files], np.int64), [one.user_collectives_ns.shape[1] for one in files]
    )
    nothing = np.zeros((2, 0), dtype=np.int64)
    start_ns, end_ns = np.concatenate([nothing, *(one.user_collectives_ns for one in files)], axis=1)
    return pd.DataFrame({"rank": rank, "start_ns": start_ns, "end_ns": end_ns})


def _call_sites(files: Sequence[RankFiles]) -> pd.DataFrame:
    rows = [(one.rank, *site) for one in files for site in one.call_sites]
    return pd.DataFrame(rows, columns=["rank", "call_site", "file", "line", "function"])


def _clock_of(files: RankFiles) -> RankClock:
    try:
        sample = files.where["clock_samples"][0]
        unix_offset_ns = int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        unix_offset_ns = None
    boot, records = files.where.get("boot_id"), files.records
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

"""Assembly of the shards of a recording: clock alignment, and the tables that are not split by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.alignment import Alignment, RankClock, align_clocks
from overlapscope.trace.clock import ClockMap
from overlapscope.trace.folders import parse_expected_ranks, read_lines
from overlapscope.trace.format import PARAMETERS_FILE
from overlapscope.trace.links import add_peer_ranks
from overlapscope.trace.log import Problem
from overlapscope.trace.part import Shard
from overlapscope.trace.plans import build_plans_table
from overlapscope.trace.rank_files import has_only_collective_logs
from overlapscope.trace.tables import map_to_clocks

_MOST_NAMES: Final = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class AssembledRecording:
    """Data of all ranks together."""

    run: dict[str, Any]
    """``run.json`` of the lowest rank that has one; empty if none has."""
    unsplit: dict[str, pd.DataFrame]
    """Tables that are not split: ranks, plans, call_sites, links and user_collectives as in ``Trace``, and the clock
    maps that ``build_clock_maps`` reads."""
    problems: list[Problem]


def assemble_shards(
    folders: Mapping[int, Path], parts: Sequence[Shard], by_clock: Mapping[str, pd.DataFrame], problems: list[Problem]
) -> AssembledRecording:
    """Combine the shards of a recording and align their clocks.

    Args:
        folders: rank folders by rank, of all ranks.
        by_clock: all-reduces by clock, see ``align_clocks``.
        problems: problems found so far.

    Raises:
        OverlapScopeError: no rank could be read.
    """
    if not parts:
        raise OverlapScopeError(problems[0].message)
    run = next((part.run for part in parts if part.run), {})
    clocks = [clock for part in parts for clock in part.clocks]
    alignments, unaligned = align_clocks(clocks, by_clock)
    maps = _maps_table(clocks, alignments)
    by_rank = build_clock_maps(maps)
    on_common_clock = [map_to_clocks(part.unsplit, by_rank) for part in parts]
    unsplit = {
        name: pd.concat([each[name] for each in on_common_clock], ignore_index=True) for name in parts[0].unsplit
    }
    columns = pd.DataFrame([_clock_columns(*each) for each in zip(clocks, alignments, strict=True)])
    ranks = pd.concat([part.ranks for part in parts], ignore_index=True)
    unsplit["ranks"] = pd.concat([ranks.drop(columns="closed"), columns, ranks["closed"]], axis=1)
    unsplit["plans"] = build_plans_table(rows for part in parts for rows in part.plans)
    unsplit["links"] = add_peer_ranks(unsplit["links"])
    unsplit["clocks"] = maps
    path = next(iter(folders.values())).parent
    return AssembledRecording(
        run=run,
        unsplit=unsplit,
        problems=[
            *problems,
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


def _report_missing_event_logs(path: Path, folders: Mapping[int, Path]) -> list[Problem]:
    without = [rank for rank, folder in folders.items() if has_only_collective_logs(folder)]
    if not without:
        return []
    who = "no rank has" if len(without) == len(folders) else f"{len(without)} of {len(folders)} ranks don't have"
    what = "only the order of their collectives can be shown"
    return [Problem("note", f"{path}: {who} an event log, which DistributedDataParallel writes; {what}")]


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
    names = ", ".join(map(str, missing[:_MOST_NAMES])) + (" ..." if len(missing) > _MOST_NAMES else "")
    return [Problem("error", f"{path}: {len(missing)} of {len(expected)} ranks left no log: {names}")]

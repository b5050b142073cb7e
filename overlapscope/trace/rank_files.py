"""Files of one rank as read from its folder: records and lines, before tables are built from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapscope.trace.clock import bounds_from_pings
from overlapscope.trace.folders import has_collective_logs, read_json, read_lines
from overlapscope.trace.format import (
    CALL_SITES_FILE,
    CLOCK_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    LINKS_FILE,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    Kind,
)
from overlapscope.trace.kept_records import merge_incident_logs, recover_from_ready_files
from overlapscope.trace.links import LinkRow, parse_link_sample
from overlapscope.trace.log import RECORD_DTYPE, Problem, Records, is_closed, read_latest_records, read_log
from overlapscope.trace.plans import PlanRows, read_plans
from overlapscope.trace.seal import Manifest
from overlapscope.trace.segment_reader import Rounds, read_rounds
from overlapscope.trace.user_collectives import read_user_collectives


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRecording:
    """Contents of the files of a rank."""

    rank: int
    folder: Path
    was_closed: bool
    """True if its event log was closed."""
    records: Records
    """Records in the order of their sequence numbers."""
    rank_info: dict[str, Any]
    """``rank.json``"""
    run: dict[str, Any]
    """``run.json``"""
    plans: PlanRows
    rounds: Rounds
    """Description of each segment by its number; empty if there are no segments."""
    links: list[LinkRow]
    call_sites: list[tuple[Any, ...]]
    """Columns: call_site, file, line, function."""
    user_collectives_ns: npt.NDArray[np.int64]
    """Begin and end of each wait for a user collective, shape (2, n)."""
    bursts: list[tuple[str | None, Any]]
    """Ping bursts, each with the boot id of rank 0, which answered."""

    @property
    def hooked_models(self) -> list[Any]:
        """Return the models with a communication hook.

        It need not wait for all ranks, so their all-reduces don't bound clock offsets.
        """
        return [model.get("model") for model in self.run.get("models", []) if "comm_hook" in model]


def read_rank_recording(
    rank: int,
    folder: Path,
    problems: list[Problem],
    known_plans: dict[bytes, PlanRows],
    *,
    latest_records: int | None = None,
) -> RankRecording:
    """Read the files of a rank.

    Args:
        problems: receives problems with the files.
        known_plans: cache of the plans of other ranks, see ``read_plans``.
        only_newest: number of the latest records to read; None: all.

    Raises:
        OverlapScopeError: its event log can't be read.
    """
    was_closed, records = _events(folder, problems, latest_records)
    problems += _report_early_end(folder)
    rank_info, run = read_json(folder / RANK_FILE, problems), read_json(folder / RUN_FILE, problems)
    seal = Manifest(folder, problems)
    if latest_records is None:
        records = merge_incident_logs(records, folder, problems)
    records = recover_from_ready_files(records, folder, seal, problems)
    found = RankRecording(
        rank=rank,
        folder=folder,
        was_closed=was_closed,
        records=records,
        rank_info=rank_info,
        run=run,
        links=read_lines(folder / LINKS_FILE, problems, parse_link_sample),
        user_collectives_ns=read_user_collectives(folder, problems),
        rounds=read_rounds(folder, problems) if (records["kind"] == Kind.SEGMENT).any() else {},
        bursts=read_lines(folder / CLOCK_FILE, problems, _burst),
        plans=read_plans(folder / PLANS_FILE, problems, known_plans),
        call_sites=read_lines(folder / CALL_SITES_FILE, problems, _call_site),
    )
    seal.report(problems)
    return found


def has_only_collective_logs(folder: Path) -> bool:
    """Return whether a rank left collective logs and no event log, as with plain torch.distributed."""
    return has_collective_logs(folder) and not (folder / EVENTS_FILE).exists()


def _events(folder: Path, problems: list[Problem], latest_records: int | None) -> tuple[bool, Records]:
    """Return whether the event log is closed, and its records; a log that need not exist counts as empty."""
    path = folder / EVENTS_FILE
    if has_only_collective_logs(folder):
        return False, np.empty(0, dtype=RECORD_DTYPE)
    if latest_records is not None:
        return is_closed(path), read_latest_records(path, latest_records, problems)
    header, records, found = read_log(path)
    problems += found
    return header.closed, records


def _report_early_end(folder: Path) -> list[Problem]:
    """Return a problem if the recording of a rank ended before its training."""
    problems: list[Problem] = []
    ended = read_json(folder / ENDED_FILE, problems) if (folder / ENDED_FILE).exists() else {}
    if (why := ended.get("unrecorded_because")) is not None:
        what = "what this rank did afterwards is missing"
        problems.append(Problem("error", f"{folder}: the recording ended before the training ({why}); {what}"))
    return problems


def _burst(line: Any) -> list[tuple[str | None, Any]]:
    boot_of_rank_0, pings = line["reference"], line["best"]
    bounds_from_pings(pings)  # raises if the line is damaged
    return [(boot_of_rank_0 and str(boot_of_rank_0), pings)]


def _call_site(site: Any) -> list[tuple[Any, ...]]:
    return [(site["call_site"], site["file"], site["line"], site["function"])]

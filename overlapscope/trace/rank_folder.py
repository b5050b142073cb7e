"""Folder of one rank: what its files hold, each with a getter.

Analyses build tables from them (``tables``), and diagnosis the state of the rank (``diagnosis.rank_state``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.clocks import bounds_from_pings
from overlapscope.trace.collective_log import AWAITED, ENTRY_DTYPE, Entries
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.event_log import RECORD_DTYPE, Records, is_closed, read_latest_records, read_log
from overlapscope.trace.folders import has_collective_logs, has_finished_recording
from overlapscope.trace.json_files import read_dataclasses, read_json, read_lines
from overlapscope.trace.live_files import read_ready_times_ns
from overlapscope.trace.machine_log import MachineLog, read_machine_log
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.process_files import (
    StallSnapshot,
    WatchdogReport,
    is_of_process,
    make_foreign_file_problem,
    read_process,
    read_rank_reports,
    read_stall_snapshot,
)
from overlapscope.trace.recording_modes import BegunMode, read_begun_modes
from overlapscope.trace.regular_file import has_file, match_files, parse_once, read_regular_file, remember
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    CLOCK_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    GROUP_PATTERN,
    INCIDENT_PATTERN,
    JOINING_FILE,
    LINKS_FILE,
    PLANS_FILE,
    RANK_FILE,
    REJOINING_FILE,
    RUN_FILE,
    SEGMENTS_FILE,
    SIGNATURES_FILE,
    Kind,
    Message,
    gradient_ready_file,
)

Row = TypeVar("Row")

PlanRows = tuple[tuple[Any, ...], ...]
"""Rows of the table of plans: model, plan_epoch, plan_hash, bucket, position, parameter, name, shape, elements, dtype,
bytes."""

Rounds = dict[int, tuple[Any, ...]]
"""Description of a segment by its number: bucket, lane, phase, round, rounds, sent_to, sent_bytes, received_from,
bytes."""

LINK_ENDPOINTS: Final = ["local", "peer"]
LINK_COUNTERS: Final = [
    "bytes_acked",
    "bytes_received",
    "busy_us",
    "rwnd_limited_us",
    "delivery_bytes_per_s",
    "rtt_us",
    "min_rtt_us",
    "retransmits",
]
"""Counters start with the connection; the delivery rate is the last one that the kernel has measured."""

_LATEST_RECORDS: Final = 2048
"""Maximum number of records read from the end of the event log: several steps, even with one record per gradient."""

_USER_ROLE: Final = re.compile(rb'"role": ?"(user|join)"')
"""What the signatures of a rank with collectives of user code, or of ``join()``, have in them."""

LinkRow = tuple[Any, ...]
"""Time, ``LINK_ENDPOINTS`` and ``LINK_COUNTERS`` of one connection."""


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_unix_time_ns(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_FACTS_OF_RUN: Final = {"models": _is_list_of_objects, "started_unix_ns": _is_unix_time_ns}
"""Facts of ``run.json`` that many use, and whether a value is one."""


class RankFolder:
    """Folder of a rank.

    A file is read each time it is asked for, because those of a running job change: readers choose the order. A file
    that is missing has no content, which is a problem only for those that every rank has.

    Args:
        path: the folder.
        problems: receives problems with files when they are read.
    """

    def __init__(self, path: Path, problems: list[Problem] | None = None) -> None:
        self.path = path
        self.problems: list[Problem] = [] if problems is None else problems

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name; False if the folder may not be read."""
        return has_file(self.path, name)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a small JSON file; empty if it is missing or damaged."""
        return read_json(self.path / name, self.problems) if self.has(name) else {}

    def read_lines(self, name: str, rows_of: Callable[[Any], Iterable[Row]]) -> list[Row]:
        """Return the rows of a JSON Lines file; none if it is missing.

        Args:
            rows_of: returns the rows of one line's content.
        """
        return read_lines(self.path / name, self.problems, rows_of) if self.has(name) else []

    def read_dataclasses(self, cls: type[Row], name: str) -> tuple[Row, ...]:
        """Return what a JSON Lines file holds, a dataclass per line; nothing if it is missing."""
        return read_dataclasses(cls, self.path / name, self.problems) if self.has(name) else ()

    def _read(self, name: str) -> bytes:
        """Return the content of a small file; empty if it can't be read."""
        try:
            return read_regular_file(self.path / name)
        except OSError:
            return b""

    @cached_property
    def manifest(self) -> Manifest:
        """Return the names, sizes and checksums of the files, written once, when the recording was complete."""
        return Manifest(self.path, self.problems)

    def run(self) -> dict[str, Any]:
        """Return what ran, ``run.json``, which every rank has that has joined a group."""
        if self.is_joining():
            return {name: value for name, value in self.joining().items() if name in ("versions", "world_size")}
        run = read_json(self.path / RUN_FILE, self.problems)
        for name, is_fact in _FACTS_OF_RUN.items():
            if name in run and not is_fact(run[name]):
                self.problems.append(Problem("error", f"{self.path / RUN_FILE}: damaged; {name!r} is left out"))
                del run[name]
        return run

    def where(self) -> dict[str, Any]:
        """Return where it ran, ``rank.json``, which every rank has that has joined a group."""
        return self.joining() if self.is_joining() else read_json(self.path / RANK_FILE, self.problems)

    def joining(self) -> dict[str, Any]:
        """Return the process's settings before it waited for the others, ``joining.json``."""
        return self.read_json(JOINING_FILE)

    def rejoining(self) -> dict[str, Any]:
        """Return its latest call of ``init_process_group`` but the first, ``rejoining.json``; empty without one."""
        return self.read_json(REJOINING_FILE)

    def ended(self) -> dict[str, Any]:
        """Return how the process ended, ``ended.json``; empty if another process has written it."""
        content = self.read_json(ENDED_FILE)
        if is_of_process(content, read_process(self.path)):
            return content
        self.problems.append(make_foreign_file_problem(self.path / ENDED_FILE))
        return {}

    def reports(self) -> list[WatchdogReport]:
        """Return the reports of the watchdog of the rank, in order."""
        rank = int(self.path.name.removeprefix("rank_"))
        return read_rank_reports(rank, self.path, self.problems)

    def stall_snapshot(self) -> StallSnapshot | None:
        """Return what the watchdog saw last during a stall; None if the rank never stalled."""
        return read_stall_snapshot(self.path, self.problems)

    def has_only_collective_logs(self) -> bool:
        """Return whether the rank left collective logs and no event log, as with plain torch.distributed."""
        return has_collective_logs(self.path) and not self.has(EVENTS_FILE)

    def is_joining(self) -> bool:
        """Return whether the rank waited for the others to join when it was last seen, and so has no log yet."""
        return self.has(JOINING_FILE) and not self.has(RANK_FILE) and not self.has(EVENTS_FILE)

    def events(self) -> tuple[bool, Records]:
        """Return whether the event log is closed, and its records; a log that need not exist counts as empty.

        Raises:
            OverlapScopeError: the log can't be read.
        """
        if self.has_only_collective_logs() or self.is_joining():
            return False, np.empty(0, dtype=RECORD_DTYPE)
        path = self.path / EVENTS_FILE
        header, records, found = read_log(path)
        self.problems += found
        if not found:
            remember("latest records", path, (records[-_LATEST_RECORDS:].copy(), []))
        return header.closed, records

    def latest_events(self) -> Records:
        """Return the latest records of the event log, of several steps; none if there is no log."""
        records, found = parse_once("latest records", self.path / EVENTS_FILE, self._read_latest_events)
        self.problems += found
        return records

    def _read_latest_events(self) -> tuple[Records, list[Problem]]:
        found: list[Problem] = []
        is_over = has_finished_recording(self.path)
        return read_latest_records(self.path / EVENTS_FILE, _LATEST_RECORDS, found, is_over=is_over), found

    def merge_incidents(self, records: Records) -> Records:
        """Merge the records of the event log and those that incident logs saved from being overwritten."""
        kept = [records]
        for path in sorted(match_files(self.path, INCIDENT_PATTERN)):
            try:
                _, incident_records, found = read_log(path)
            except OverlapScopeError as error:
                self.problems.append(Problem("error", str(error)))
                continue
            self.problems += found
            kept.append(incident_records)
        if len(kept) == 1:
            return records
        merged = np.concatenate(kept)
        _, first = np.unique(merged["sequence"], return_index=True)
        return merged[first]

    def recover_gradients(self, records: Records) -> Records:
        """Add records of ready gradients in buckets that never became ready: theirs had not been written yet."""
        if not len(records):
            return records
        kept = [records]
        plans = records[records["kind"] == Kind.PLAN]
        for model in np.unique(plans["model"]):
            if self.manifest.is_damaged(gradient_ready_file(model)):
                continue
            ready_ns = np.asarray(read_ready_times_ns(self.path, int(model), self.problems), dtype=np.int64)
            logged = records[(records["kind"] == Kind.GRADIENT_READY) & (records["model"] == model)]
            logged = logged[logged["index"] < len(ready_ns)]
            logged_ns = np.zeros(len(ready_ns), dtype=np.int64)
            np.maximum.at(logged_ns, logged["index"], logged["end_ns"])
            (parameters,) = np.nonzero(ready_ns > logged_ns)
            rows = np.zeros(len(parameters), dtype=records.dtype)
            rows["kind"], rows["index"], rows["model"] = Kind.GRADIENT_READY, parameters, model
            rows["start_ns"] = rows["end_ns"] = ready_ns[parameters]
            rows["step"], rows["sequence"] = records["step"].max(), records["sequence"][-1]
            rows["plan_epoch"] = plans["plan_epoch"][plans["model"] == model].max()
            kept.append(rows)
        return np.concatenate(kept) if len(kept) > 1 else records

    def plans(self, known: dict[bytes, PlanRows]) -> PlanRows:
        """Return the rows of its bucket plans.

        Args:
            known: cache of rows by file content, because the files of all ranks are long and mostly the same.
        """
        content = self._read(PLANS_FILE)
        if content not in known:
            found: list[Problem] = []
            rows = tuple(read_lines(self.path / PLANS_FILE, found, _parse_plan))
            self.problems += found
            if found:  # not cached, so that problems are reported for each file
                return rows
            known[content] = rows
        return known[content]

    def rounds(self) -> Rounds:
        """Return the description of each segment by its number."""
        return dict(self.read_lines(SEGMENTS_FILE, _parse_round))

    def links(self) -> list[LinkRow]:
        """Return the samples of TCP connections, one row per connection."""
        return self.read_lines(LINKS_FILE, _parse_link_sample)

    def machine(self) -> MachineLog:
        """Return what the rank has sampled of the machine."""
        return read_machine_log(self.path, self.problems)

    def modes(self) -> tuple[BegunMode, ...]:
        """Return the recording modes that the rank has noted; none if it has always been in the default one."""
        return read_begun_modes(self.path, self.problems)

    def ping_bursts(self) -> list[tuple[str | None, Any]]:
        """Return the ping bursts, each with the boot id of rank 0, which answered."""
        return self.read_lines(CLOCK_FILE, _parse_burst)

    def call_sites(self) -> list[tuple[Any, ...]]:
        """Return the call sites: number, file, line, function."""
        return self.read_lines(
            CALL_SITES_FILE, lambda site: [(site["call_site"], site["file"], site["line"], site["function"])]
        )

    def user_collectives_ns(self) -> npt.NDArray[np.int64]:
        """Return begin and end of the rank's waits for collectives of user code, shape (2, n).

        Only collectives on the host are included whose line waited for them to complete: for others, which are waited
        for later or by a device, the log doesn't show how long the rank waited. A log that has wrapped around is a
        problem; others are reported where logs are read for the order of collectives.
        """
        # Reading logs takes long, and most trainings have no collectives of their own.
        if _USER_ROLE.search(self._read(SIGNATURES_FILE)) is None:
            return np.empty((2, 0), dtype=np.int64)
        entries = self._entries()
        entries = entries[((entries["flags"] & AWAITED) != 0) & (entries["completed_ns"] > 0)]
        return np.stack([entries[name].astype(np.int64) for name in ("announced_ns", "completed_ns")])

    def _entries(self) -> Entries:
        parts = [np.empty(0, dtype=ENTRY_DTYPE)]
        for path in sorted(match_files(self.path, GROUP_PATTERN)):
            try:
                log = CollectiveLogFile(path)
            except OverlapScopeError:
                continue
            entries = log.read(log.oldest, log.latest)
            if log.oldest > 1 and ((entries["flags"] & AWAITED) != 0).any():
                text = f"{path}: at its size limit; waits for user collectives before entry {log.oldest} are unknown"
                self.problems.append(Problem("note", text))
            parts.append(entries)
        return np.concatenate(parts)


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
    machine: MachineLog
    modes: tuple[BegunMode, ...]
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
    path: Path,
    problems: list[Problem],
    known_plans: dict[bytes, PlanRows],
    *,
    latest_records: int | None = None,
) -> RankRecording:
    """Read the files of a rank that tables are built from.

    Args:
        problems: receives problems with the files.
        known_plans: cache of the plans of other ranks, see ``RankFolder.plans``.
        latest_records: number of the latest records to read; None: all.

    Raises:
        OverlapScopeError: its event log can't be read.
    """
    folder = RankFolder(path, problems)
    if latest_records is None or folder.has_only_collective_logs():
        was_closed, records = folder.events()
    else:
        was_closed = is_closed(path / EVENTS_FILE)
        records = read_latest_records(path / EVENTS_FILE, latest_records, problems)
    if (why := folder.ended().get("unrecorded_because")) is not None:
        text = f"{path}: the recording ended before the training ({why}); what this rank did afterwards is missing"
        problems.append(Problem("error", text))
    rank_info, run = folder.where(), folder.run()
    if latest_records is None:
        records = folder.merge_incidents(records)
    records = folder.recover_gradients(records)
    found = RankRecording(
        rank=rank,
        folder=path,
        was_closed=was_closed,
        records=records,
        rank_info=rank_info,
        run=run,
        links=folder.links(),
        machine=folder.machine(),
        modes=folder.modes(),
        user_collectives_ns=folder.user_collectives_ns(),
        rounds=folder.rounds() if (records["kind"] == Kind.SEGMENT).any() else {},
        bursts=folder.ping_bursts(),
        plans=folder.plans(known_plans),
        call_sites=folder.call_sites(),
    )
    folder.manifest.report(problems)
    return found


def _parse_plan(plan: Any) -> list[tuple[Any, ...]]:
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


def _parse_round(line: Any) -> list[tuple[int, tuple[Any, ...]]]:
    sent, received = ([(int(rank), int(size)) for rank, size in line[side]] for side in ("sends", "receives"))
    what = (int(line["bucket"]), int(line["lane"]), str(line["phase"]), int(line["round"]), int(line["rounds"]))
    return [(int(line["segment"]), (*what, *_format_messages(sent), *_format_messages(received)))]


def _format_messages(messages: list[Message]) -> tuple[str, int]:
    """Return the peers of some messages as text, and their total size in bytes."""
    return ", ".join(str(rank) for rank, _ in messages), sum(size for _, size in messages)


def _parse_link_sample(sample: Any) -> list[LinkRow]:
    """Convert a line of ``links.jsonl`` to one row per connection."""
    return [
        (
            int(sample["time_ns"]),
            *(connection[name] for name in LINK_ENDPOINTS),
            *(int(connection[name]) for name in LINK_COUNTERS),
        )
        for connection in sample["connections"]
    ]


def _parse_burst(line: Any) -> list[tuple[str | None, Any]]:
    boot_of_rank_0, pings = line["reference"], line["best"]
    bounds_from_pings(pings)  # raises if the line is damaged
    return [(boot_of_rank_0 and str(boot_of_rank_0), pings)]

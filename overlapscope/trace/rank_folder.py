"""Files of one rank as read from its folder: records and lines, before tables are built from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.clocks import bounds_from_pings
from overlapscope.trace.collective_log import AWAITED, ENTRY_DTYPE, Entries
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.event_log import RECORD_DTYPE, Problem, Records, is_closed, read_latest_records, read_log
from overlapscope.trace.live_files import read_ready_times_ns
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    CLOCK_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    GROUP_PATTERN,
    INCIDENT_PATTERN,
    LINKS_FILE,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    SEGMENTS_FILE,
    SIGNATURES_FILE,
    Kind,
    Message,
    gradient_ready_file,
)
from overlapscope.trace.small_files import has_collective_logs, read_json, read_lines

# Recovery of records that are not in a rank's event log: from incident logs and gradient-ready files.


def merge_incident_logs(records: Records, folder: Path, problems: list[Problem]) -> Records:
    """Merge the records of the event log and those that incident logs saved from being overwritten."""
    kept = [records]
    for path in sorted(folder.glob(INCIDENT_PATTERN)):
        try:
            _, incident_records, found = read_log(path)
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
            continue
        problems += found
        kept.append(incident_records)
    if len(kept) == 1:
        return records
    merged = np.concatenate(kept)
    _, first = np.unique(merged["sequence"], return_index=True)
    return merged[first]


def recover_from_ready_files(records: Records, folder: Path, seal: Manifest, problems: list[Problem]) -> Records:
    """Add records of ready gradients in buckets that never became ready: theirs had not been written yet."""
    if not len(records):
        return records
    kept = [records]
    plans = records[records["kind"] == Kind.PLAN]
    for model in np.unique(plans["model"]):
        if seal.is_damaged(gradient_ready_file(model)):
            continue
        ready_ns = np.asarray(read_ready_times_ns(folder, int(model), problems), dtype=np.int64)
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


# Table of bucket plans, from ``plans.jsonl``: one row per parameter of a plan.
#
# ===== =========================================================================================================
# plans model, plan_epoch, plan_hash, bucket, position, parameter, name, shape, elements, dtype, bytes =====
# =========================================================================================================

PLAN_COLUMNS: Final = (
    *("model", "plan_epoch", "plan_hash", "bucket", "position"),
    *("parameter", "name", "shape", "elements", "dtype", "bytes"),
)

PlanRows = tuple[tuple[Any, ...], ...]


def read_plans(path: Path, problems: list[Problem], known: dict[bytes, PlanRows]) -> PlanRows:
    """Read the rows of one rank's file.

    Args:
        known: cache of rows by file content, because the files of all ranks are long and mostly the same.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if content not in known:
        found: list[Problem] = []
        rows = tuple(read_lines(path, found, _parse_plan))
        problems += found
        if found:  # not cached, so that problems are reported for each file
            return rows
        known[content] = rows
    return known[content]


def build_plans_table(plans: Iterable[PlanRows]) -> pd.DataFrame:
    """Return the plans of some ranks, each once."""
    rows = [row for distinct in dict.fromkeys(plans) for row in distinct]
    return pd.DataFrame(rows, columns=list(PLAN_COLUMNS)).drop_duplicates(ignore_index=True)


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


# Table of segments: rounds of the all-reduces of buckets, with a description of each.

SEGMENT_COLUMNS: Final = (
    *("rank", "model", "step", "plan_epoch", "bucket", "lane", "phase", "round", "rounds"),
    *("sent_to", "sent_bytes", "received_from", "received_bytes", "start_ns", "end_ns"),
)

_UNKNOWN: Final = (-1, 0, "", 0, 0, "", 0, "", 0)


Rounds = dict[int, tuple[Any, ...]]
"""Description of a segment by its number: bucket, lane, phase, round, rounds, sent_to, sent_bytes, received_from,
bytes."""


def read_rounds(folder: Path, problems: list[Problem]) -> Rounds:
    """Read the description of each segment of a rank.

    Args:
        folder: folder of the rank.
        problems: receives problems with its file.
    """
    return dict(read_lines(folder / SEGMENTS_FILE, problems, _round_rows))


def add_segment_content(segments: pd.DataFrame, rounds: Mapping[int, Rounds]) -> pd.DataFrame:
    """Add descriptions to segments.

    Args:
        segments: table from ``event_tables``.
        rounds: descriptions by rank; a rank without segments may be missing.

    Returns:
        ``SEGMENT_COLUMNS``: ``sent_to`` and ``received_from`` are ranks as text, ``1, 2``. ``bucket`` is -1 for a
            segment whose description is lost.
    """
    keys = zip(segments["rank"].tolist(), segments["segment"].tolist(), strict=True)
    found = [rounds[rank].get(number, _UNKNOWN) for rank, number in keys]
    names = ("bucket", "lane", "phase", "round", "rounds", "sent_to", "sent_bytes", "received_from", "received_bytes")
    content = {
        name: pd.Series(values, dtype="str" if name in ("phase", "sent_to", "received_from") else "int64")
        for name, values in zip(names, zip(*found, strict=True) if found else [()] * len(names), strict=True)
    }
    return segments.assign(**content)[list(SEGMENT_COLUMNS)]


def _round_rows(line: Any) -> list[tuple[int, tuple[Any, ...]]]:
    sent, received = ([(int(rank), int(size)) for rank, size in line[side]] for side in ("sends", "receives"))
    what = (int(line["bucket"]), int(line["lane"]), str(line["phase"]), int(line["round"]), int(line["rounds"]))
    return [(int(line["segment"]), (*what, *_format_messages(sent), *_format_messages(received)))]


def _format_messages(messages: list[Message]) -> tuple[str, int]:
    """Return the peers of some messages as text, and their total size in bytes."""
    return ", ".join(str(rank) for rank, _ in messages), sum(size for _, size in messages)


# Times in which a rank waited for collectives of user code, from its collective logs.
#
# Only collectives on the host are included whose line waited for them to complete: for others, which are waited for
# later or by a device, the log doesn't show how long the rank waited.


def read_user_collectives(folder: Path, problems: list[Problem]) -> npt.NDArray[np.int64]:
    """Read begin and end of a rank's waits for user collectives, shape (2, n).

    Args:
        folder: folder of the rank.
        problems: receives a problem if the log has wrapped around. Other problems with logs are reported by
            ``group_reader``, when they are read for the order of collectives.
    """
    entries = _entries(folder, problems) if _has_user_collectives(folder) else np.empty(0, dtype=ENTRY_DTYPE)
    entries = entries[((entries["flags"] & AWAITED) != 0) & (entries["completed_ns"] > 0)]
    return np.stack([entries[name].astype(np.int64) for name in ("announced_ns", "completed_ns")])


def _has_user_collectives(folder: Path) -> bool:
    """Return whether a rank has user collectives, because reading logs takes long, and most trainings have none."""
    return any(read_lines(folder / SIGNATURES_FILE, [], lambda line: [line["role"] == "user"]))


def _entries(folder: Path, problems: list[Problem]) -> Entries:
    parts = [np.empty(0, dtype=ENTRY_DTYPE)]
    for path in sorted(folder.glob(GROUP_PATTERN)):
        try:
            log = CollectiveLogFile(path)
        except OverlapScopeError:
            continue
        entries = log.read(log.oldest, log.latest)
        if log.oldest > 1 and ((entries["flags"] & AWAITED) != 0).any():
            text = f"{path}: came round; waits in collectives of the user's own before entry {log.oldest} are not known"
            problems.append(Problem("note", text))
        parts.append(entries)
    return np.concatenate(parts)


# Table of TCP connection samples, with the rank at the other end of each connection.
#
# ===== =========================================================================================================
# links rank, time_ns, local, peer, peer_rank (-1: unknown), bytes_acked, bytes_received, busy_us, rwnd_limited_us,
# delivery_bytes_per_s, rtt_us, min_rtt_us, retransmits =====
# =========================================================================================================
#
# Counters start with the connection; the delivery rate is the last one that the kernel has measured.

UNKNOWN_RANK: Final = -1
_ENDPOINTS: Final = ["local", "peer"]
_COUNTERS: Final = [
    "bytes_acked",
    "bytes_received",
    "busy_us",
    "rwnd_limited_us",
    "delivery_bytes_per_s",
    "rtt_us",
    "min_rtt_us",
    "retransmits",
]

LinkRow = tuple[Any, ...]


def parse_link_sample(sample: Any) -> list[LinkRow]:
    """Convert a line of ``links.jsonl`` to one row per connection."""
    return [
        (
            int(sample["time_ns"]),
            *(connection[name] for name in _ENDPOINTS),
            *(int(connection[name]) for name in _COUNTERS),
        )
        for connection in sample["connections"]
    ]


def build_link_samples(rows: Mapping[int, list[LinkRow]]) -> pd.DataFrame:
    """Return the samples of some ranks as a table, in the time of each rank's host.

    Args:
        rows: rows by rank.
    """
    samples = pd.DataFrame(list(chain.from_iterable(rows.values())), columns=["time_ns", *_ENDPOINTS, *_COUNTERS])
    samples = samples.astype(dict.fromkeys(["time_ns", *_COUNTERS], "int64") | dict.fromkeys(_ENDPOINTS, "str"))
    samples.insert(0, "rank", np.repeat(np.array([*rows], dtype=np.int64), [len(own) for own in rows.values()]))
    return samples


def add_peer_ranks(samples: pd.DataFrame) -> pd.DataFrame:
    """Add the rank at the other end: the one that has the same connection with its endpoints swapped.

    It is unknown where addresses are translated on the way, or if two hosts each have a connection between the same
    addresses and ports.
    """
    ends = samples[["rank", *_ENDPOINTS]].drop_duplicates()
    ends = ends.drop_duplicates(_ENDPOINTS, keep=False)
    others = ends.rename(columns={"rank": "peer_rank", "local": "peer", "peer": "local"})
    found = samples.merge(others, how="left", on=_ENDPOINTS)
    found.insert(4, "peer_rank", found.pop("peer_rank").fillna(UNKNOWN_RANK).astype("int64"))
    return found


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

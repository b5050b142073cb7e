"""Reader of Nsight Systems reports: a ``Profile`` of each rank in it.

Reads the SQLite file that ``nsys export --type sqlite`` makes of a report. NVTX ranges are those that PyTorch pushes
under ``torch.autograd.profiler.emit_nvtx()`` (``nsys profile --pytorch=autograd-nvtx``), kernels and launches are from
CUPTI. Columns are as in the scripts that come with Nsight Systems 2022.4 (``gputrace.py``, ``kernexectrace.py``).
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.interop.collective_calls import CALL_COLUMNS, find_enclosing_spans, link_kernels, parse_op
from overlapscope.interop.kineto import (
    KERNEL_COLUMNS,
    OPERATOR_PREFIX,
    SPAN_PREFIXES,
    WORK_LAUNCH_PATTERN,
    Profile,
    TraceMetadata,
    classify_span,
    parse_kernel_op,
    parse_rank_in_name,
)
from overlapscope.trace.regular_file import open_regular_file

_MAGIC: Final = b"SQLite format 3\x00"
_PROCESS_DIVISOR: Final = 1 << 24
"""Divisor of a ``globalTid`` or ``globalPid`` that leaves a number which all threads of a process share."""
_ARGUMENTS_SEPARATOR: Final = re.compile(r", (?:seq|op_id|input_op_ids|sizes) = ")
"""Separator between the name of an operator and the arguments that ``emit_nvtx`` appends (``getNvtxStr``)."""
_SIZES: Final = re.compile(r", sizes = (\[[\[\]\d, -]*\])")
_BYTES: Final = re.compile(r'"Message size \[bytes\]":\s*(\d+)')
"""Message size in the payload that NCCL attaches to its own NVTX ranges (``nvtx_payload_schemas.h``)."""
_NCCL_CALL: Final = re.compile(r"nccl[A-Z]")
_GRADIENT_DTYPES: Final = {4: "float32", 8: "float64"}
"""Element type of gradients by its size in bytes; 2 is missing, as it may be float16 or bfloat16."""
_LOST_EVENTS: Final = re.compile(r"\b(lost|dropped|not (?:have )?(?:been )?collected|incomplete)\b", re.IGNORECASE)
_DEVICE_TABLES: Final = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "set",
}


def is_sqlite_report(path: Path) -> bool:
    """Return whether a file is an SQLite database.

    Raises:
        OverlapScopeError: it is a report that has to be exported first, or can't be read.
    """
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise OverlapScopeError(f"{path}: make SQLite of it first: nsys export --type sqlite {path}")
    try:
        with open_regular_file(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None


def read_report(path: Path) -> list[Profile]:
    """Read the profile of each process that trains, which is a rank.

    Raises:
        OverlapScopeError: the file is not an export of Nsight Systems, or has no NVTX ranges of PyTorch.
    """
    with (
        _translate_errors(path),
        closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as database,
    ):
        report = _Report(database)
        ranges = report.ranges()
        launches, kernels = report.launches(), report.kernels()
        forwards = ranges[ranges["kind"] == "forward"]
        trains = forwards if len(forwards) else ranges
        processes = sorted((trains if len(trains) else kernels)["process"].unique().tolist())
        if not processes:
            raise OverlapScopeError(
                f"{path}: neither kernels nor ranges of PyTorch in it; train under "
                "torch.autograd.profiler.emit_nvtx(), or record with 'nsys profile --pytorch=autograd-nvtx'"
            )
        return [
            _profile_of(
                _source_of(path, report, kernels[kernels["process"] == process], is_only=len(processes) == 1),
                *(table[table["process"] == process] for table in (ranges, launches, kernels)),
            )
            for process in processes
        ]


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, pd.errors.DatabaseError, KeyError, TypeError, ValueError, OverflowError) as error:
        what = " ".join(str(error.__cause__ or error).split())  # the message of pandas itself repeats the query
        raise OverlapScopeError(f"{path}: not as Nsight Systems exports it ({what})") from None


class _Report:
    """Queries on the tables of a report, which has no table for events that never happened."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def rows(self, table: str, query: str) -> pd.DataFrame:
        """Run a query; the result is empty if there is no such table."""
        return pd.read_sql_query(query, self._database) if table in self._tables else pd.DataFrame()

    def value(self, table: str, query: str) -> Any:
        """Return the first value that a query finds; None if there is none."""
        rows = self.rows(table, query)
        return rows.iloc[0, 0] if len(rows) else None

    def ranges(self) -> pd.DataFrame:
        """Return the NVTX ranges that we use, in order of start.

        Columns: kind, name, bytes (of the message, in NCCL's ranges; else 0), process, thread, start_ns, end_ns.
        """
        columns = {name for (_, name, *_) in self._database.execute("PRAGMA table_info(NVTX_EVENTS)")}
        payload = "jsonText" if "jsonText" in columns else "NULL"
        wanted = [f"{beginning}*" for beginning, _ in SPAN_PREFIXES] + [
            f"{OPERATOR_PREFIX}*",
            "nccl[A-Z]*",
        ]
        either = " OR ".join(f"name GLOB '{pattern}'" for pattern in wanted)
        found = self.rows(
            "NVTX_EVENTS",
            f"SELECT * FROM (SELECT start AS start_ns, end AS end_ns, globalTid AS thread, {payload} AS payload, "
            "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId)) AS name FROM NVTX_EVENTS "
            f"WHERE end IS NOT NULL) WHERE {either} ORDER BY start_ns",
        ).reindex(columns=["start_ns", "end_ns", "thread", "payload", "name"])
        names = {name: _classify_range(_operator_name(name)) for name in found["name"].unique()}
        found["kind"] = found["name"].map(names)
        found["bytes"] = [_parse_bytes(payload) for payload in found["payload"]]
        found["process"] = found["thread"] // _PROCESS_DIVISOR
        return found

    def launches(self) -> pd.DataFrame:
        """Return the calls that launch work on the device: correlation, process, thread, start_ns."""
        found = self.rows(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "SELECT correlationId AS correlation, globalTid AS thread, start AS start_ns, "
            "(SELECT value FROM StringIds WHERE id = nameId) AS name FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start",
        ).reindex(columns=["correlation", "thread", "start_ns", "name"])
        works = {name: WORK_LAUNCH_PATTERN.search(str(name)) is not None for name in found["name"].unique()}
        found = found[found["name"].map(works).astype(bool)]
        return found.assign(process=found["thread"] // _PROCESS_DIVISOR)

    def kernels(self) -> pd.DataFrame:
        """Return the work on the device in order of start.

        Columns: kind, process, device, stream, correlation, op, start_ns, end_ns.
        """
        parts = []
        for table, kind in _DEVICE_TABLES.items():
            name = "(SELECT value FROM StringIds WHERE id = shortName)" if kind == "kernel" else "NULL"
            part = self.rows(
                table,
                f"SELECT start AS start_ns, end AS end_ns, globalPid / {_PROCESS_DIVISOR} AS process, "
                f"deviceId AS device, streamId AS stream, correlationId AS correlation, {name} AS name FROM {table}",
            ).reindex(columns=["start_ns", "end_ns", "process", "device", "stream", "correlation", "name"])
            ops = {name: parse_kernel_op(name) if isinstance(name, str) else "" for name in part["name"].unique()}
            parts.append(part.assign(kind=kind, op=part["name"].map(ops)))
        found = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
        return found.sort_values("start_ns", kind="stable", ignore_index=True)


def _source_of(path: Path, report: _Report, kernels: pd.DataFrame, *, is_only: bool) -> TraceMetadata:
    devices = kernels["device"].dropna().unique()
    rank = parse_rank_in_name(path) if is_only else None
    if not is_only:
        if len(devices) != 1:
            raise OverlapScopeError(
                f"{path}: holds several ranks, and which is which can't be told by their devices; record each rank "
                "into a file of its own: nsys profile -o rank%q{RANK} ..."
            )
        rank = int(devices[0])
    host = report.value("TARGET_INFO_SYSTEM_ENV", "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'")
    name = None
    if len(devices):
        name = report.value("TARGET_INFO_GPU", f"SELECT name FROM TARGET_INFO_GPU WHERE id = {int(devices[0])}")
    begun = report.value("TARGET_INFO_SESSION_START_TIME", "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    diagnostics = report.rows("DIAGNOSTIC_EVENT", "SELECT text FROM DIAGNOSTIC_EVENT")
    lost = [" ".join(str(text).split()) for text in diagnostics.get("text", []) if _LOST_EVENTS.search(str(text))]
    return TraceMetadata(
        path=path,
        tool="Nsight Systems",
        rank=rank,
        host=None if host is None else str(host),
        world_size=None,
        backend="nccl" if (kernels["op"] != "").any() else None,
        device=str(name or "device") if len(devices) else "cpu",
        base_ns=int(begun or 0),
        notes=tuple(f"Nsight Systems says: {text}" for text in dict.fromkeys(lost)),
    )


def _profile_of(source: TraceMetadata, ranges: pd.DataFrame, launches: pd.DataFrame, kernels: pd.DataFrame) -> Profile:
    calls = _extract_calls(ranges)
    spans = ranges[ranges["kind"].notna() & ~ranges["kind"].isin(["call", "nccl"])].copy()
    spans["name"] = [_operator_name(name) for name in spans["name"]]
    return Profile(
        source=source,
        spans=spans[["kind", "name", "thread", "start_ns", "end_ns"]].reset_index(drop=True),
        collectives=calls,
        trained=pd.DataFrame({"start_ns": []}),
        launches=launches[["correlation", "thread", "start_ns"]].reset_index(drop=True),
        kernels=link_kernels(kernels.assign(id=-1), launches, calls)[list(KERNEL_COLUMNS)].reset_index(drop=True),
        annotations=calls.iloc[:0].assign(is_of_device=True),
        host_compute_ns=np.zeros((2, 0), dtype=np.int64),
    )


def _extract_calls(ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the operators of torch.distributed: ``CALL_COLUMNS``."""
    calls = ranges.loc[ranges["kind"] == "call", ["name", "thread", "start_ns", "end_ns"]].reset_index(drop=True)
    calls["id"] = np.arange(len(calls))
    calls["op"] = [parse_op(_operator_name(name).removeprefix(OPERATOR_PREFIX)) for name in calls["name"]]
    calls["elements"] = [_parse_elements(name) for name in calls["name"]]
    sums = ranges[ranges["kind"] == "nccl"]
    inside = find_enclosing_spans(calls, sums["thread"].to_numpy(), sums["start_ns"].to_numpy())
    bytes_of = pd.Series(sums["bytes"].to_numpy(), dtype=np.int64).groupby(inside).sum()
    calls["bytes"] = calls["id"].map(bytes_of).fillna(0).astype(np.int64)
    autograd = ranges[ranges["kind"] == "autograd"].reset_index(drop=True)
    autograd["id"] = np.arange(len(autograd))
    is_gradient_reduction = (
        find_enclosing_spans(autograd, calls["thread"].to_numpy(), calls["start_ns"].to_numpy()) >= 0
    )
    calls["dtype"] = [
        _GRADIENT_DTYPES.get(size // elements, "") if of_gradients and elements and size % elements == 0 else ""
        for of_gradients, elements, size in zip(
            is_gradient_reduction.tolist(), calls["elements"].tolist(), calls["bytes"].tolist(), strict=True
        )
    ]
    return calls.assign(group="", description="", group_size=0)[list(CALL_COLUMNS)]


def _classify_range(name: str) -> str | None:
    if name.startswith(OPERATOR_PREFIX):
        return "call"
    return "nccl" if _NCCL_CALL.match(name) else classify_span(name)


def _operator_name(text: str) -> str:
    return _ARGUMENTS_SEPARATOR.split(text, maxsplit=1)[0]


def _parse_elements(text: str) -> int:
    """Return the number of elements of an operator's first tensor; 0 if its NVTX range does not have the sizes."""
    found = _SIZES.search(text)
    shapes = json.loads(found[1]) if found else []
    return next((math.prod(shape) for shape in shapes if shape), 0)


def _parse_bytes(payload: object) -> int:
    found = _BYTES.search(payload) if isinstance(payload, str) else None
    return int(found[1]) if found else 0

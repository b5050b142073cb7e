"""A trace of torch.profiler, written as Nsight Systems would have exported the same under ``emit_nvtx``.

Tables are those that Nsight Systems 2022.4 made (``NVTX_EVENTS``, ``StringIds``), or of which its own scripts ask for
these columns; the rest of their columns is left out.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

TABLES: Final = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER NOT NULL, devStateName TEXT NOT NULL, name TEXT NOT NULL,
    nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, jsonTextId INTEGER, jsonText TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER);
CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, source INTEGER, text TEXT);
"""
_GLOBAL: Final = 1 << 24
_ELEMENT_BYTES: Final = {"Float": 4, "Long": 8}


class Report:
    """An export to be filled."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)
        self._database.executescript(TABLES)
        self._strings: dict[str, int] = {}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(v, k) for k, v in self._strings.items()])
        self._database.commit()
        self._database.close()

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def add(self, table: str, **row: object) -> None:
        marks = ", ".join("?" * len(row))
        self._database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", [*row.values()])

    def begins(self, utc_ns: int, host: str, devices: Iterable[tuple[int, str]] = ()) -> None:
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=utc_ns)
        self.add("TARGET_INFO_SYSTEM_ENV", globalVid=0, devStateName="Local", name="Hostname", nameEnum=0, value=host)
        for number, name in devices:
            self.add("TARGET_INFO_GPU", id=number, name=name)

    def range(self, name: str, thread: int, edges: tuple[int, int], payload: str | None = None) -> None:
        """A range whose name was registered, or was not."""
        text = {"text": name} if len(name) % 2 else {"textId": self.string(name)}
        self.add("NVTX_EVENTS", start=edges[0], end=edges[1], eventType=59, globalTid=thread, jsonText=payload, **text)


def export(trace: Path, path: Path, *, process: int = 4711, device: int = 0, has_sizes: bool = True) -> Path:
    """Write a trace as a report; may be called again for another process of it.

    Args:
        has_sizes: as under ``emit_nvtx(record_shapes=True)``.
    """
    content = json.loads(gzip.decompress(trace.read_bytes()))
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    said = [(_edges(event), event["args"]) for event in events if event["name"] == "record_param_comms"]
    sums = {edges: (args["In msg nelems"], _ELEMENT_BYTES.get(args["dtype"], 0)) for edges, args in said}
    with Report(path) as report:
        report.begins(content["baseTimeNanoseconds"], "node7", [(device, "NVIDIA A100")])
        for number, event in enumerate(events):
            _add(report, event, number, process * _GLOBAL, device, sums if has_sizes else {})
    return path


def _add(report: Report, event: dict[str, Any], number: int, process: int, device: int, sums: dict[Any, int]) -> None:
    category, name, (start, end) = event.get("cat"), event["name"], _edges(event)
    args = event.get("args", {})
    if category in ("cpu_op", "user_annotation"):
        thread = process + event["tid"] % _GLOBAL
        inside = (what for edges, what in sums.items() if start <= edges[0] and edges[1] <= end)
        elements, element_bytes = next(inside, (None, 0))
        if name.startswith("c10d::") and elements is not None:
            report.range(f"{name}, op_id = {number}, sizes = [[{elements}], []]", thread, (start, end))
            payload = f'{{"NCCL communicator ID": 18446603, "Message size [bytes]": {element_bytes * elements}}}'
            report.range("ncclAllReduce", thread, (start + 1, end - 1), payload)
        else:
            report.range(f"{name}, seq = {number}, op_id = {number}", thread, (start, end))
    elif category == "cuda_runtime":
        place = {"globalTid": process + event["tid"] % _GLOBAL, "correlationId": args["correlation"]}
        report.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, nameId=report.string(f"{name}_v7000"), **place)
    elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
        kind = category.removeprefix("gpu_").upper()
        place = {"deviceId": device, "streamId": args["stream"], "globalPid": process}
        names = {}
        if category == "kernel":
            names = {"demangledName": report.string(name), "shortName": report.string(name.partition("(")[0])}
        where = place | {"correlationId": args["correlation"]} | names
        report.add(f"CUPTI_ACTIVITY_KIND_{kind}", start=start, end=end, **where)


def _edges(event: dict[str, Any]) -> tuple[int, int]:
    start_ns = round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)

"""Reader of torch.profiler (Kineto) traces: one rank's trace as a ``Profile``.

Only the events we need are kept: annotations and operators that identify phases, buckets and collectives, launches, and
kernels. The field names are those of libkineto's ``output_json.cpp`` and ``MetadataFieldCatalog.h``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Int64Array, merge_spans
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.collective_calls import (
    CALL_COLUMNS,
    GENERIC,
    collect_calls,
    link_kernels,
    parse_dtype,
    parse_op,
)
from overlapscope.interop.event_stream import Event, EventStream

ProgressCallback = Callable[[int, int], None]
"""Callback that is called with (bytes read so far, bytes in total)."""

_COLLECTIVE: Final = "record_param_comms"
_COMPUTE_PREFIX: Final = "aten::"
_NOT_LAUNCHED: Final = ("wait", "init")
"""Names of ``record_param_comms`` that launch nothing."""
OPERATOR_PREFIX: Final = "c10d::"
"""Prefix of the names of torch.distributed's operators."""
_HANDLER_FILE_NAME: Final = re.compile(r"^(?P<host>.+)_\d+\.\d+\.pt\.trace\.json(\.gz)?$")
"""File names that ``tensorboard_trace_handler`` gives."""
_RANK_IN_NAME: Final = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
_WORKER_IN_NAME: Final = re.compile(r"worker[-_ ]?(\d+)", re.IGNORECASE)
SPAN_PREFIXES: Final = (
    ("ProfilerStep#", "step"),
    ("DistributedDataParallel.forward", "forward"),
    ("Optimizer.step#", "optimizer"),
    ("enumerate(DataLoader)#", "fetch"),
    ("autograd::engine::evaluate_function", "autograd"),
    ("torch::distributed::reducer::mul_out", "copy_in"),
    ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "copy_out"),
    ("nccl:", "backend"),
    ("gloo:", "backend"),
)
"""Prefixes of names of annotations and operators, and the kind of span of each."""
_DEVICE_CATEGORIES: Final = {"kernel": "kernel", "Kernel": "kernel", "gpu_memcpy": "copy", "Memcpy": "copy"} | {
    "gpu_memset": "set",
    "Memset": "set",
}
"""Categories of events on the device, as written today and in 2021, and our kind of each."""
_LAUNCH_CATEGORIES: Final = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime")
WORK_LAUNCH_PATTERN: Final = re.compile(r"LaunchKernel|LaunchCooperative|Memcpy|Memset|GraphLaunch")
"""Calls of the runtime that launch work; others have a correlation id too, but run nothing on the device."""
KERNEL_COLUMNS: Final = ("kind", "stream", "correlation", "id", "op", "start_ns", "end_ns")
_BACKEND_KERNEL: Final = re.compile(r"^(nccl|rccl|void nccl|void rccl|msccl)", re.IGNORECASE)
"""Names of NCCL's kernels: ``ncclKernel_AllReduce_...`` until 2.18, ``ncclDevKernel_...`` since; RCCL has the same."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The trace of one rank. Times are nanoseconds since ``source.base_ns``; all tables are sorted by start_ns."""

    source: TraceMetadata
    spans: pd.DataFrame
    """Annotations and operators: kind (of ``SPAN_PREFIXES``), name, thread, start_ns, end_ns."""
    collectives: pd.DataFrame
    """Launches of collectives, ``collective_calls.CALL_COLUMNS``; elements are 0 if unknown."""
    trained: pd.DataFrame
    """start_ns of operators whose gradient is computed later, as flow events show; empty in old traces."""
    launches: pd.DataFrame
    """Launches of work on the device: correlation, thread, start_ns."""
    kernels: pd.DataFrame
    """Work on the device: kind (kernel, copy, set), stream, correlation, id, op, start_ns, end_ns.

    ``op`` is that of a collective, empty for other work; ``id`` is that of the launch in ``collectives``.
    """
    annotations: pd.DataFrame
    """The backend's annotations of collectives, ``collective_calls.CALL_COLUMNS``."""
    host_compute_ns: Int64Array
    """(2, n) Union of the spans in which operators ran on the host."""


@dataclass(frozen=True, kw_only=True)
class TraceMetadata:
    """Metadata of a trace."""

    path: Path
    tool: str
    """Name of the tool that wrote it."""
    rank: int | None
    """Rank; None if neither the trace nor its file name has it."""
    host: str | None
    world_size: int | None
    backend: str | None
    device: str
    """Name of the device, or ``cpu``."""
    base_ns: int
    """Unix time at which the profile's times begin; 0 if they are Unix times themselves."""
    problem: str | None = None
    """Why the end of the file is missing, if it is. Any event may be missing, as they are not in order of time."""
    notes: tuple[str, ...] = ()
    """Sentences in which the tool reports other missing data."""


def read_profile(path: Path, progress: ProgressCallback | None = None) -> Profile:
    """Read the trace of one rank.

    Args:
        progress: called after each batch of events.

    Raises:
        OverlapScopeError: the file is not such a trace.
    """
    stream = EventStream(path)
    rows = _ProfileBuilder()
    for batch in stream.batches():
        try:
            rows.take(batch)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise OverlapScopeError(f"{path}: an event is not as torch.profiler writes it ({what})") from None
        if progress is not None:
            progress(stream.read_bytes, stream.size_bytes)
    header = stream.header
    info = header.get("distributedInfo") or {}
    devices = header.get("deviceProperties") or []
    launches, annotations = rows.launches.table(), rows.annotations.table()
    collectives = collect_calls(rows.parameters.table(), annotations, rows.operators.table())
    kernels = link_kernels(rows.kernels.table(), launches, collectives)
    device = str(devices[0].get("name", "device")) if devices else "device"
    return Profile(
        source=TraceMetadata(
            path=path,
            tool="torch.profiler",
            rank=_first_int(info.get("rank"), parse_rank_in_name(path)),
            host=header.get("host_name") or (named["host"] if (named := _HANDLER_FILE_NAME.match(path.name)) else None),
            world_size=_first_int(info.get("world_size")),
            backend=info.get("backend"),
            device=device if len(kernels) else "cpu",
            base_ns=_first_int(header.get("baseTimeNanoseconds")) or 0,
            problem=stream.problem,
        ),
        spans=rows.spans.table(),
        collectives=collectives,
        trained=rows.trained.table(),
        launches=launches,
        kernels=kernels,
        annotations=annotations,
        host_compute_ns=rows.host_compute_ns,
    )


def parse_rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file or its folder, as of ``rank_3/trace.json``; None if it has none."""
    for name in (path.name, path.parent.name):
        if found := _RANK_IN_NAME.findall(name) or _WORKER_IN_NAME.findall(name):
            return int(found[-1])
    return None


class _TableBuilder:
    """A growing table: rows are appended as tuples and packed after each batch, as tuples take ten times the memory."""

    def __init__(self, *columns: str) -> None:
        self._columns = pd.Index(columns)
        self._parts: list[pd.DataFrame] = []
        self.rows: list[tuple[Any, ...]] = []

    def pack(self) -> None:
        if self.rows or not self._parts:
            self._parts.append(pd.DataFrame(self.rows, columns=self._columns))
            self.rows = []

    def table(self) -> pd.DataFrame:
        self.pack()
        filled = [part for part in self._parts if len(part)]
        whole = pd.concat(filled or self._parts[:1], ignore_index=True)
        return whole.sort_values("start_ns", kind="stable", ignore_index=True)


class _ProfileBuilder:
    """The tables of a profile while events are read."""

    def __init__(self) -> None:
        self.spans = _TableBuilder("kind", "name", "thread", "start_ns", "end_ns")
        self.parameters = _TableBuilder(*CALL_COLUMNS)
        """``record_param_comms``; gloo emits none."""
        self.operators = _TableBuilder(*CALL_COLUMNS)
        self.annotations = _TableBuilder(*CALL_COLUMNS, "is_of_device")
        self.host_compute_ns: Int64Array = np.zeros((2, 0), dtype=np.int64)
        self._host_compute: list[tuple[int, int]] = []
        self.trained = _TableBuilder("start_ns")
        self.launches = _TableBuilder("correlation", "thread", "start_ns")
        self.kernels = _TableBuilder(*KERNEL_COLUMNS)

    def take(self, events: Iterable[Event]) -> None:
        self._add(events)
        for table in (self.spans, self.parameters, self.operators, self.annotations):
            table.pack()
        for table in (self.trained, self.launches, self.kernels):
            table.pack()
        computed_ns = np.array(self._host_compute, dtype=np.int64).reshape(-1, 2).T
        self.host_compute_ns = merge_spans(np.concatenate([self.host_compute_ns, computed_ns], axis=1))
        self._host_compute = []

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.get("ph") != "X":
                if event.get("ph") == "s" and event.get("cat") == "fwdbwd":
                    self.trained.rows.append((_ns(event["ts"]),))
                continue
            category, name = event.get("cat"), event.get("name", "")
            if category in ("cpu_op", "user_annotation", "Operator"):
                self._add_host_event(event, name)
            elif category in _LAUNCH_CATEGORIES:
                args = event.get("args", {})
                if "correlation" in args and WORK_LAUNCH_PATTERN.search(name):
                    self.launches.rows.append((args["correlation"], event["tid"], _ns(event["ts"])))
            elif category in _DEVICE_CATEGORIES:
                args = event.get("args", {})
                op = parse_kernel_op(name) if category in ("kernel", "Kernel") else ""
                identity = int(args.get("External id", args.get("external id", -1)))
                stream = args.get("stream", event["tid"])
                where = stream, args.get("correlation", -1), identity, op
                self.kernels.rows.append((_DEVICE_CATEGORIES[category], *where, *_event_span(event)))

    def _add_host_event(self, event: Event, name: str) -> None:
        if name.startswith(_COMPUTE_PREFIX):
            self._host_compute.append(_event_span(event))
            return
        kind = classify_span(name)
        if kind is not None:
            self.spans.rows.append((kind, name, event["tid"], *_event_span(event)))
        if name == _COLLECTIVE:
            args = event.get("args", {})
            name, size = args.get("Collective name") or "", int(args.get("In msg nelems") or 0)
            if name in _NOT_LAUNCHED:
                return
            op = parse_op(name) or (GENERIC if name else "")
            group_name = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}".strip()
            group = group_name, str(args.get("Process Group Description", "")), int(args.get("Group size") or 0)
            what = op, size, parse_dtype(args.get("dtype") or ""), *group
            self.parameters.rows.append((int(args.get("External id", -1)), *what, event["tid"], *_event_span(event)))
        elif name.startswith(OPERATOR_PREFIX) or kind == "backend":
            args = event.get("args", {})
            what = parse_op(name.partition(":")[2]), *_first_input(args), "", "", 0
            row = (int(args.get("External id", -1)), *what, event["tid"], *_event_span(event))
            if kind == "backend":
                self.annotations.rows.append((*row, not name.startswith("gloo")))
            else:
                self.operators.rows.append(row)


@lru_cache(maxsize=4096)  # there are few distinct names
def classify_span(name: str) -> str | None:
    """Classify an annotation or operator by its name as a kind of ``SPAN_PREFIXES``; None if it is none of them."""
    return next((kind for beginning, kind in SPAN_PREFIXES if name.startswith(beginning)), None)


def _first_input(args: dict[str, Any]) -> tuple[int, str]:
    """Return number of elements and element type of an operator's first input; (0, "") without ``record_shapes``."""
    dims, types = args.get("Input Dims") or [[]], args.get("Input type") or [""]
    shape = dims[0]
    while shape and isinstance(shape[0], list):  # a list of tensors
        shape = shape[0]
    name = str(types[0])
    return (math.prod(shape) if shape else 0), parse_dtype(name.removeprefix("TensorList").strip("()[] "))


@lru_cache(maxsize=4096)
def parse_kernel_op(name: str) -> str:
    """Return the operation in the name of a kernel of the backend; empty for other kernels."""
    return (parse_op(name) or GENERIC) if _BACKEND_KERNEL.match(name) else ""


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _event_span(event: Event) -> tuple[int, int]:
    start_ns = _ns(event["ts"])
    return start_ns, start_ns + max(0, _ns(event.get("dur", 0)))


def _first_int(*values: Any) -> int | None:
    return next((int(value) for value in values if value is not None), None)

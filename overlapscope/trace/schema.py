"""Layout of a recording on disk: the contract between the recorder and every reader.

A recording is a folder per run with a folder per rank; writers share no files. ``RANK_FILES`` lists the files of a
rank: clearing, the manifest and docs/trace-format.md follow it. Beside the rank folders are ``exits_*.jsonl`` (how
processes ended), ``watchdog/`` (messages between ranks while the job's store is out of reach) and ``tables/`` (Parquet
tables, made from the files on first read).

A record is ``RECORD_BYTES`` long. It starts with the CRC-32 of the rest: a record is *complete* if that is correct, so
one that was truncated by SIGKILL, that is being overwritten in the ring, or that was damaged later, is recognized
without a lock. It ends with its sequence number. These count from 1, so a slot of zeros was never written, and sorting
by them puts a wrapped ring in order.

What an event *is* (kind, bucket, dtype, element count, plan ...) is known long before it happens, so it is packed once
into a constant ``body``; on the hot path only the times, the step and the sequence number are added.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum, IntFlag
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Final
from zlib import crc32

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.json_files import MANIFEST_NAME, dump_json_line

NO_BUCKET: Final = -1

Message = tuple[int, int]
"""Peer (rank of the job) and size in bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Round of one rank in a bucket's all-reduce by sends and receives: messages that are in flight at the same time.

    A round recurs in every step, so its description is a line in ``segments.jsonl``, and a record has only its number
    and its times.
    """

    bucket: int
    lane: int = 0
    """Number that tells apart all-reduces that run in parallel."""
    phase: str = ""
    """Name that the strategy gives to this part of the all-reduce, such as ``reduce-scatter``."""
    round: int = 1
    """Number of the round within the phase, from 1."""
    rounds: int = 0
    """Number of rounds of the phase, equal on all ranks; 0: unknown, and ``round`` is the rank's own count."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    def to_json(self, number: int) -> str:
        """Serialize a line of ``segments.jsonl``, with its line end."""
        return dump_json_line({"segment": number, **asdict(self)})


FORMAT_VERSION: Final = 1
MAGIC: Final = b"OVLSCOPE"
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 64
DEFAULT_LIMIT_BYTES: Final = 64 * 1024**2
"""Default size of one rank's event log: about a million records."""
PINNED_SHARE: Final = 8
"""One in this many slots of a full log holds the first steps and is never overwritten."""

RUN_FILE: Final = "run.json"
RANK_FILE: Final = "rank.json"
EVENTS_FILE: Final = "events.log"
INCIDENT_PATTERN: Final = "incident_*.log"
PLANS_FILE: Final = "plans.jsonl"
CALL_SITES_FILE: Final = "call_sites.jsonl"
CLOCK_FILE: Final = "clock.jsonl"
LINKS_FILE: Final = "links.jsonl"
MACHINE_FILE: Final = "machine.jsonl"
GROUP_PATTERN: Final = "group_*.log"
POINT_TO_POINT_PATTERN: Final = "p2p_*.log"
SIGNATURES_FILE: Final = "signatures.jsonl"
CREATED_GROUPS_FILE: Final = "created_groups.jsonl"
SEGMENTS_FILE: Final = "segments.jsonl"
PARAMETERS_FILE: Final = "parameters.jsonl"
GRADIENT_READY_PATTERN: Final = "gradients_*.bin"
REPLICAS_FILE: Final = "replicas.jsonl"
FINGERPRINTS_PATTERN: Final = "fingerprints_*.bin"
HYPERPARAMETERS_FILE: Final = "hyperparameters.jsonl"
JOINING_FILE: Final = "joining.json"
REJOINING_FILE: Final = "rejoining.json"
UNREDUCED_FILE: Final = "unreduced.jsonl"
INTERRUPTED_BACKWARDS_FILE: Final = "interrupted_backwards.jsonl"
NON_FINITE_FILE: Final = "non_finite.jsonl"
LOOP_FACTS_FILE: Final = "loop_facts.jsonl"
CAUGHT_ERRORS_FILE: Final = "caught_{}.jsonl"
"""By process id: of a rank's process, or of one that it has forked."""
CAUGHT_ERRORS_PATTERN: Final = CAUGHT_ERRORS_FILE.format("*")
FROZEN_FILE: Final = "frozen.json"
LIVENESS_FILE: Final = "alive.bin"
MODES_FILE: Final = "modes.jsonl"
STALL_FILE: Final = "stall.json"
REPORTS_FILE: Final = "reports.jsonl"
STACKS_PATTERN: Final = "stacks_*.txt"
ENDED_FILE: Final = "ended.json"
MANIFEST_FILE: Final = MANIFEST_NAME
STAGED_PATTERN: Final = "*.part"
"""Files that were about to replace one of a rank's files when its process died."""


@dataclass(frozen=True)
class FileKind:
    """Kind of file in a rank's folder."""

    name: str
    """Name; a pattern if there may be several."""
    meaning: str
    writer: str
    """Module of ``instrumented_ddp`` or ``overlapscope`` that writes it, with the writer's name: ``module:name``."""
    reader: str
    """Module of ``overlapscope`` and name of the reader: ``module:name``."""

    @property
    def is_log(self) -> bool:
        """Return whether it consists of entries with checksums of their own."""
        return self.name.endswith(".log")

    @property
    def is_ring(self) -> bool:
        """Return whether it is a memory-mapped log, truncated to its content when it is closed."""
        return self.is_log and self.name != INCIDENT_PATTERN


RANK_FILES: Final = (
    FileKind(RUN_FILE, "what ran", "recording.metadata:describe_run", "trace.rank_folder:RankFolder.run"),
    FileKind(RANK_FILE, "where it ran", "recording.metadata:describe_rank", "trace.rank_folder:RankFolder.where"),
    FileKind(
        JOINING_FILE,
        "the process's settings before it waited for the other ranks",
        "watchdog.init_watch",
        "trace.rank_folder:RankFolder.joining",
    ),
    FileKind(
        REJOINING_FILE,
        "the latest of its later calls of init_process_group",
        "watchdog.init_watch",
        "trace.rank_folder:RankFolder.rejoining",
    ),
    FileKind(
        CLOCK_FILE,
        "ping bursts: this rank's clock and rank 0's",
        "recording.clock_sync",
        "trace.rank_folder:RankFolder.ping_bursts",
    ),
    FileKind(
        EVENTS_FILE, "event log: steps, phases, buckets", "trace.event_log:EventLogWriter", "trace.event_log:read_log"
    ),
    FileKind(
        MODES_FILE,
        "recording modes: what was recorded of which steps",
        "recording.modes:ModeFollower",
        "trace.recording_modes:read_begun_modes",
    ),
    FileKind(
        INCIDENT_PATTERN,
        "records saved from being overwritten at an incident",
        "trace.event_log:EventLogWriter.preserve",
        "trace.event_log:read_log",
    ),
    FileKind(PLANS_FILE, "bucket plans", "recording.metadata", "trace.rank_folder:RankFolder.plans"),
    FileKind(
        SEGMENTS_FILE,
        "rounds of all-reduces by sends and receives",
        "recording.records",
        "trace.rank_folder:RankFolder.rounds",
    ),
    FileKind(
        LINKS_FILE,
        "samples of the kernel's counters of TCP connections",
        "recording.tcp_stats",
        "trace.rank_folder:RankFolder.links",
    ),
    FileKind(
        MACHINE_FILE,
        "what the machine said: GPUs, control groups, pressure, interfaces",
        "machine.sampler",
        "trace.machine_log:read_machine_log",
    ),
    FileKind(
        GROUP_PATTERN,
        "collective log of a process group",
        "trace.collective_log:CollectiveLogWriter",
        "trace.collective_log_reader:CollectiveLogFile",
    ),
    FileKind(
        POINT_TO_POINT_PATTERN,
        "sends and receives of a process group",
        "trace.collective_log:CollectiveLogWriter",
        "trace.collective_log_reader:CollectiveLogFile",
    ),
    FileKind(
        SIGNATURES_FILE,
        "what the numbers in collective logs stand for",
        "collectives.signatures",
        "trace.collective_log_reader:CollectiveLogs.signatures",
    ),
    FileKind(
        CREATED_GROUPS_FILE,
        "process groups that were made, with their lists of ranks",
        "collectives.created_groups",
        "diagnosis.rank_state:read_rank",
    ),
    FileKind(CALL_SITES_FILE, "source lines", "collectives.call_sites", "trace.rank_folder:RankFolder.call_sites"),
    FileKind(PARAMETERS_FILE, "models and their parameters", "recording.models", "diagnosis.rank_models:read_models"),
    FileKind(
        GRADIENT_READY_PATTERN,
        "which gradients of a model are ready, and since when",
        "trace.live_files:GradientReadyFile",
        "trace.live_files:read_is_ready",
    ),
    FileKind(
        REPLICAS_FILE,
        "models of which fingerprints are taken",
        "replicas.replicas",
        "diagnosis.rank_models:read_replicas",
    ),
    FileKind(
        FINGERPRINTS_PATTERN,
        "fingerprints of a model's parameters",
        "trace.live_files:FingerprintFile",
        "trace.live_files:read_fingerprint_passes",
    ),
    FileKind(
        HYPERPARAMETERS_FILE,
        "settings of optimizers, and their changes",
        "replicas.optimizer_settings",
        "diagnosis.replica_drift:read_hyperparameters",
    ),
    FileKind(
        UNREDUCED_FILE,
        "first updates with gradients that were never reduced",
        "recording.models",
        "diagnosis.rank_state:read_rank",
    ),
    FileKind(
        INTERRUPTED_BACKWARDS_FILE,
        "backward passes that an exception interrupted",
        "recording.models",
        "diagnosis.rank_state:read_rank",
    ),
    FileKind(
        NON_FINITE_FILE,
        "steps in which gradients were not finite",
        "recording.finite_check:GradientCheck",
        "diagnosis.rank_state:read_rank",
    ),
    FileKind(
        LOOP_FACTS_FILE,
        "what the training loop does with gradients and data",
        "recording.loop_facts:LoopFactsWriter",
        "diagnosis.rank_state:read_rank",
    ),
    FileKind(
        CAUGHT_ERRORS_PATTERN,
        "exceptions that did not end the process",
        "recording.caught_errors:CaughtErrors",
        "diagnosis.caught_errors:read_caught_errors",
    ),
    FileKind(
        FROZEN_FILE,
        "parameters frozen after they were passed to DDP",
        "recording.models",
        "diagnosis.rank_models:read_unready_parameters",
    ),
    FileKind(
        LIVENESS_FILE,
        "when the watchdog last ran, and the memory use then",
        "trace.live_files:LivenessFile",
        "trace.live_files:read_alive_file",
    ),
    FileKind(
        STALL_FILE,
        "what the watchdog saw during a stall",
        "trace.process_files:write_stall_snapshot",
        "trace.process_files:read_stall_snapshot",
    ),
    FileKind(
        REPORTS_FILE,
        "reports of the watchdog",
        "trace.process_files:ReportLog",
        "trace.process_files:read_rank_reports",
    ),
    FileKind(
        STACKS_PATTERN,
        "Python stacks at a report",
        "trace.process_files:ReportLog.add",
        "diagnosis.rank_state:read_stacks",
    ),
    FileKind(ENDED_FILE, "how the process ended", "recording.exit_recorder", "trace.rank_folder:RankFolder.ended"),
    FileKind(
        MANIFEST_FILE,
        "names, sizes and checksums of the other files",
        "trace.manifest:write_manifest",
        "trace.manifest:Manifest",
    ),
)
"""All files of a rank, in the order of their use: what ran, what it did, what it trained, how it ended."""


@lru_cache(maxsize=1024)
def find_file_kind(name: str) -> FileKind | None:
    """Return the kind of a file in a rank's folder by its name; None if it is none of a recording's."""
    return next((kind for kind in RANK_FILES if fnmatchcase(name, kind.name)), None)


CONTROL_FILE: Final = "control.json"
"""File in the folder of an attempt by which users say what its ranks record."""
CALIBRATION_FILE: Final = "calibration.json"
"""File in the folder of an attempt with times of all-reduces by size, if they were measured."""
JOB_FILE: Final = "job.json"
"""File in the folder of a run that several commands of one job record into: which job."""
TABLES_FOLDER: Final = "tables"
WATCHDOG_FOLDER: Final = "watchdog"

NO_INDEX: Final = 0xFFFFFFFF
"""``index`` of a collective that belongs to no bucket, such as a broadcast of buffers."""

NO_CALL_SITE: Final = 0
"""``call_site`` of an event whose source line is unknown; call sites are numbered from 1."""


class Kind(IntEnum):
    """Kind of a record. Times are host nanoseconds; for events without a duration, ``start_ns == end_ns``."""

    STEP = 1
    """One optimizer step, from the end of the step before to the end of its last optimizer."""
    PHASE_BEGIN = 2
    """A phase begins (``index``: a ``Phase``). Written at once, so that a dead rank shows where it was."""
    PHASE = 3
    """A phase has ended (``index``: a ``Phase``)."""
    GRADIENT_READY = 4
    """A parameter's gradient is accumulated (``index``: the parameter)."""
    BUCKET_READY = 5
    """The last gradient of a bucket is ready."""
    COPY_IN = 6
    """Gradients are copied into a bucket."""
    LAUNCH = 7
    """The host is about to enqueue a collective: on disk before the collective is."""
    COLLECTIVE = 8
    """A collective has completed."""
    COPY_OUT = 9
    """A reduced bucket is copied back to the gradients."""
    PLAN = 10
    """A bucket plan becomes active (``elements``: number of elements of all buckets)."""
    INCIDENT = 11
    """An incident occurred (``index``: the number of the ``incident_*.log`` that holds the records that led to it)."""
    PAUSE = 12
    """Garbage collection paused the process, in host time on any device (``index``: the generation collected)."""
    SEGMENT = 13
    """A round of a bucket's all-reduce has ended (``index``: its line in ``segments.jsonl``)."""


class Phase(IntEnum):
    """Activity of a rank. Phases of one rank do not overlap."""

    DATA_WAIT = 0
    """Wait for a batch of torch's DataLoader."""
    FORWARD = 1
    BACKWARD = 2
    """From the first gradient of the module's output until autograd has finished, without the wait for buckets."""
    FINALIZE = 3
    """Wait for buckets that are still being reduced, and the copies back; in a forward, wait for sharded parameters."""
    OPTIMIZER = 4
    EVALUATION = 5
    """Forward pass without gradients."""
    LOOP = 6
    """Rest of the time from an update to the next forward: other data loading, logging, zero_grad, other models."""


class Flag(IntFlag):
    """How a record's times were obtained, and what kind of pass it belongs to."""

    NONE = 0
    DEVICE_CLOCK = 1
    """Times are from device events, mapped to host nanoseconds."""
    START_IS_LOWER_BOUND = 2
    """The start is when the work was enqueued; it may have begun later."""
    END_IS_UPPER_BOUND = 4
    """The end is when completion was noticed; the true end is at most ``end_uncertainty_ns`` earlier."""
    NO_SYNC = 8
    """A pass under ``no_sync()``: gradients are accumulated and not reduced."""
    LIGHT = 16
    """A light step: without copies, and without the ready times of gradients."""
    END_IS_POLLED = 32
    """Nobody waited for the end, it was seen in passing: it may be late by all of ``end_uncertainty_ns``."""


OPS: Final = ("none", "all_reduce", "broadcast", "reduce_scatter", "all_gather", "reduce")
"""Collective operations, by their number in a record."""


def count_lanes(backend: str) -> int:
    """Return how many all-reduces of one process group run at a time: gloo runs two, NCCL one.

    Args:
        backend: backend as torch names it and ``run.json`` has it: ``nccl``, ``gloo``, ``cpu:gloo,cuda:nccl``.
    """
    return 2 if "gloo" in backend else 1


DTYPE_BYTES: Final = {
    "unknown": 0,
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Element types in the order of their numbers in a record, with the bytes per element."""

DTYPES: Final = tuple(DTYPE_BYTES)

RECORD_FIELDS: Final = (
    ("crc32", "<u4"),
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("step", "<u4"),
    ("end_uncertainty_ns", "<u4"),
    # the body, constant for one kind of event of one bucket or parameter
    ("kind", "u1"),
    ("op", "u1"),
    ("dtype", "u1"),
    ("flags", "u1"),
    ("index", "<u4"),
    ("model", "<u2"),
    ("group", "<u2"),
    ("elements", "<u8"),
    ("plan_epoch", "<u2"),
    ("call_site", "<u2"),
    ("plan_hash", "<u4"),
    ("sequence", "<u8"),
)
"""Name and numpy type of each field, packed without padding; also stored in every header."""

RECORD: Final = struct.Struct("<qqII28sQ")
"""A record as the writer packs it, without the checksum: start, end, step, uncertainty, body, sequence."""

CHECKED_RECORD: Final = struct.Struct(f"<I{RECORD.size}s")
"""The checksum and the record that it covers."""

_BODY: Final = struct.Struct("<BBBBIHHQHHI")
_HEADER: Final = struct.Struct("<8sIIIIQQQ")


def pack_body(
    kind: Kind,
    *,
    op: str = "none",
    dtype: str = "unknown",
    flags: Flag = Flag.NONE,
    index: int = 0,
    model: int = 0,
    group: int = 0,
    elements: int = 0,
    plan_epoch: int = 0,
    call_site: int = NO_CALL_SITE,
    plan_hash: int = 0,
) -> bytes:
    """Pack the constant part of a record (28 bytes).

    Args:
        index: bucket, parameter, phase, incident, generation or segment number, depending on ``kind``.
        model: number of the DDP instance in its process.
        group: number of the process group in its process; 0 is the group of the first model.
        plan_hash: first 32 bits of the plan's hash.
    """
    dtype_number = DTYPES.index(dtype) if dtype in DTYPE_BYTES else 0
    return _BODY.pack(
        kind, OPS.index(op), dtype_number, flags, index, model, group, elements, plan_epoch, call_site, plan_hash
    )


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """Header page of an event log.

    The page also holds the record layout and the names of all numbers as JSON, so that a log can be read by a program
    that knows only where this JSON is.
    """

    capacity_records: int
    """Number of slots in the file when it is full."""
    pinned_records: int
    """Number of slots at the beginning that the ring never overwrites."""
    written_records: int = 0
    """Number of records ever written; set when the log is closed, 0 before."""
    closed: bool = False
    version: int = FORMAT_VERSION

    @property
    def full_bytes(self) -> int:
        """Return the size of the file until it is closed."""
        return HEADER_BYTES + self.capacity_records * RECORD_BYTES

    def pack(self) -> bytes:
        """Serialize the header page, ``HEADER_BYTES`` long."""
        layout = {
            "record": RECORD_FIELDS,
            "kinds": {k.value: k.name.lower() for k in Kind},
            "phases": {p.value: p.name.lower() for p in Phase},
            "flags": {f.value: f.name.lower() for f in Flag if f.name},
            "ops": OPS,
            "dtypes": DTYPES,
            "clock": "CLOCK_MONOTONIC nanoseconds",
        }
        text = json.dumps(layout, separators=(",", ":")).encode()
        page = (
            _HEADER.pack(
                MAGIC,
                self.version,
                HEADER_BYTES,
                RECORD_BYTES,
                int(self.closed),
                self.capacity_records,
                self.pinned_records,
                self.written_records,
            )
            + len(text).to_bytes(4, "little")
            + text
        )
        assert len(page) <= HEADER_BYTES - 4, "the layout no longer fits the header page"
        return add_page_checksum(page.ljust(HEADER_BYTES, b"\0"))

    @classmethod
    def unpack(cls, page: bytes, path: Path) -> LogHeader:
        """Parse a header page.

        Raises:
            OverlapScopeError: not an event log, truncated, damaged, or of a version that this code can't read.
        """
        if page[: len(MAGIC)] != MAGIC[: len(page)] or not page:
            raise OverlapScopeError(f"{path}: not an OverlapScope event log (offset 0: no {MAGIC.decode()} mark)")
        if len(page) < _HEADER.size:
            raise OverlapScopeError(f"{path}: cut short at offset {len(page)}, inside the header; no record is left")
        _, version, header_bytes, record_bytes, closed, capacity, pinned, written = _HEADER.unpack_from(page)
        if version > FORMAT_VERSION:
            raise OverlapScopeError(
                f"{path}: written in trace format {version}; this overlapscope reads up to {FORMAT_VERSION}; "
                "upgrade overlapscope to read it"
            )
        if (header_bytes, record_bytes) != (HEADER_BYTES, RECORD_BYTES):
            raise OverlapScopeError(
                f"{path}: corrupt header (offset 12: {header_bytes}-byte header and {record_bytes}-byte records, "
                f"expected {HEADER_BYTES} and {RECORD_BYTES})"
            )
        if len(page) == HEADER_BYTES and not is_page_intact(page):
            raise OverlapScopeError(f"{path}: damaged header (its checksum is wrong); nothing of the file is used")
        return cls(
            capacity_records=capacity,
            pinned_records=pinned,
            written_records=written,
            closed=bool(closed),
            version=version,
        )


_PAGE_CHECKSUM_BYTES: Final = 4


def add_page_checksum(page: bytes) -> bytes:
    """Return a header page whose last four bytes, which must be unused, hold the CRC-32 of all before them."""
    content = page[:-_PAGE_CHECKSUM_BYTES]
    return content + crc32(content).to_bytes(_PAGE_CHECKSUM_BYTES, "little")


def is_page_intact(page: bytes) -> bool:
    """Return whether a header page is unchanged since it was written."""
    return add_page_checksum(page) == page


def gradient_ready_file(model: int) -> str:
    """Return the name of the gradient-ready file of one model."""
    return f"gradients_{model}.bin"


def rank_folder(trace_folder: Path, rank: int) -> Path:
    """Return the folder of a rank's files."""
    return trace_folder / f"rank_{rank}"

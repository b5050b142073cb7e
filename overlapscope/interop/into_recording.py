"""Writer of imported training runs: a recording that all commands and pages can read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlapscope.errors import OverlapScopeError
from overlapscope.interop.kineto import TraceMetadata
from overlapscope.interop.training import Bucket, ImportedTraining
from overlapscope.trace.event_log import serialize_event_log
from overlapscope.trace.json_files import dump_json_line, write_json
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    DTYPE_BYTES,
    EVENTS_FILE,
    FORMAT_VERSION,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    rank_folder,
)


@dataclass(frozen=True, kw_only=True)
class ImportedRank:
    """The trace of one rank, and the training run found in it."""

    rank: int
    source: TraceMetadata
    training: ImportedTraining


def assign_ranks(sources: Sequence[TraceMetadata]) -> list[int]:
    """Return the rank of each trace, as recorded in it; 0 for a single trace without one.

    Raises:
        OverlapScopeError: there are several traces, and one has no rank or two have the same.
    """
    if len(sources) == 1:
        return [sources[0].rank or 0]
    seen: dict[int, Path] = {}
    for source in sources:
        if source.rank is None:
            raise OverlapScopeError(
                f"{source.path}: does not say of which rank it is; rename it to end in "
                f"rank0{source.path.suffix}, rank1{source.path.suffix} ..."
            )
        if source.rank in seen:
            raise OverlapScopeError(f"{source.path} and {seen[source.rank]} are both of rank {source.rank}")
        seen[source.rank] = source.path
    return [source.rank for source in sources if source.rank is not None]


def write_recording(folder: Path, imported: Sequence[ImportedRank]) -> None:
    """Write the recordings of all ranks into a folder.

    Raises:
        OverlapScopeError: it can't be written.
    """
    try:
        for one in imported:
            _write_rank(rank_folder(folder, one.rank), one, len(imported))
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be written ({error.strerror})") from None


def _write_rank(folder: Path, one: ImportedRank, count: int) -> None:
    source, records = one.source, one.training.records.copy()
    folder.mkdir(parents=True)
    for edge in ("start_ns", "end_ns"):
        records[edge] += source.base_ns
    begin_ns = int(records["start_ns"].min())
    world_size = source.world_size or count
    write_json(
        folder / RUN_FILE,
        {
            "format_version": FORMAT_VERSION,
            "world_size": world_size,
            "ranks": list(range(world_size)),
            "backend": source.backend or "unknown",
            "detail": "buckets",
            "started_unix_ns": begin_ns,
            "versions": {},
            "models": [{"model": 0, "class": "", "ddp_arguments": {}}],
            "imported": {"from": source.tool, "file": source.path.name, "notes": [*source.notes, *one.training.notes]},
        },
    )
    write_json(
        folder / RANK_FILE,
        {
            "rank": one.rank,
            "host": source.host or "unknown",
            "pid": -1,
            "device": source.device,
            # Ranks of one host share a clock; whether ranks of unknown hosts do is not known.
            "boot_id": f"import {one.rank if source.host is None else source.host}",
            "clock_samples": [{"monotonic_ns": begin_ns, "unix_ns": begin_ns}],
        },
    )
    plans = [dump_json_line(_plan(epoch, buckets)) for epoch, buckets in enumerate(one.training.plans)]
    (folder / PLANS_FILE).write_text("".join(plans), encoding="utf-8")
    (folder / CALL_SITES_FILE).touch()
    (folder / EVENTS_FILE).write_bytes(serialize_event_log(records))
    write_manifest(folder)


def _plan(epoch: int, buckets: Sequence[Bucket]) -> dict[str, Any]:
    described = [
        {"dtype": dtype, "device": "unknown", "bytes": elements * DTYPE_BYTES[dtype], "parameters": []}
        for dtype, elements in buckets
    ]
    digest = hashlib.sha256(repr(buckets).encode()).hexdigest()
    return {"model": 0, "epoch": epoch, "hash": digest, "reason": "construction", "buckets": described}

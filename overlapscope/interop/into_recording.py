"""Writer of imported training runs: a recording that all commands and pages can read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.interop.communication import summarize_communication
from overlapscope.interop.kineto import TraceMetadata
from overlapscope.interop.training import Bucket, ImportedTraining
from overlapscope.trace.communication import ImportedCommunication
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

    @property
    def span_ns(self) -> tuple[int, int]:
        """Return the Unix times between which something ran; (0, 0) if nothing did."""
        ran, records = self.training.communication, self.training.records
        edges_ns = [*ran["start_ns"], *ran["end_ns"], *records["start_ns"], *records["end_ns"]]
        if not edges_ns:
            return 0, 0
        return int(min(edges_ns)) + self.source.base_ns, int(max(edges_ns)) + self.source.base_ns


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


def refuse_different_jobs(sources: Sequence[TraceMetadata]) -> None:
    """Check that traces are of one job.

    Raises:
        OverlapScopeError: they say that their jobs had different numbers of ranks, or one has a rank beyond its job's.
    """
    known = [source for source in sources if source.world_size is not None]
    for source in known:
        if source.world_size != known[0].world_size:
            raise OverlapScopeError(
                f"{known[0].path} is of a job of {known[0].world_size} ranks, and {source.path} of one of "
                f"{source.world_size}; import the traces of one job at a time"
            )
    world_size = known[0].world_size if known else None
    if world_size is not None and (beyond := [one for one in sources if (one.rank or 0) >= world_size]):
        raise OverlapScopeError(f"{beyond[0].path} is of rank {beyond[0].rank}, in a job of {world_size} ranks")


def describe_distance(imported: Sequence[ImportedRank]) -> str | None:
    """Say that profiles are far apart, as those of different runs are; None if they are not."""
    spans = [(one.source, *one.span_ns) for one in imported if one.source.base_ns or one.span_ns[0] > _YEAR_NS]
    if len(spans) < 2:
        return None
    first, last = min(spans, key=lambda one: one[2]), max(spans, key=lambda one: one[1])
    apart_ns = last[1] - first[2]
    if apart_ns < _FAR_APART_NS:
        return None
    return f"{last[0].path} begins {apart_ns / 1e9:,.0f} s after {first[0].path} has ended: are they of one run?"


_YEAR_NS: Final = 365 * 24 * 3600 * 10**9
_FAR_APART_NS: Final = 60 * 10**9


def write_recording(folder: Path, imported: Sequence[ImportedRank]) -> None:
    """Write the recordings of all ranks into a folder.

    Raises:
        OverlapScopeError: it can't be written.
    """
    try:
        communication = _summarize_communication(imported)
        for one in imported:
            _write_rank(rank_folder(folder, one.rank), one, len(imported), communication)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be written ({error.strerror})") from None


def _summarize_communication(imported: Sequence[ImportedRank]) -> ImportedCommunication:
    busy = [one.training.busy for one in imported]
    return ImportedCommunication(
        ranks=len(imported),
        steps=min(one.training.steps for one in imported),
        **{
            name: sum(getattr(each, name) for each in busy) / len(busy)
            for name in ("time_ns", "compute_ns", "exposed_ns", "idle_ns")
        },
        groups=summarize_communication(
            {one.rank: one.training.communication for one in imported}, imported[0].source.world_size or len(imported)
        ),
    )


def _write_rank(folder: Path, one: ImportedRank, count: int, communication: ImportedCommunication) -> None:
    source, records = one.source, one.training.records.copy()
    folder.mkdir(parents=True)
    for edge in ("start_ns", "end_ns"):
        records[edge] += source.base_ns
    begin_ns = int(records["start_ns"].min()) if len(records) else source.base_ns
    world_size = source.world_size or count
    write_json(
        folder / RUN_FILE,
        {
            "format_version": FORMAT_VERSION,
            "world_size": world_size,
            "ranks": list(range(world_size)),
            "backend": source.backend or "unknown",
            "detail": "buckets",
            **({"started_unix_ns": begin_ns} if begin_ns > _YEAR_NS else {}),
            "versions": {},
            "models": [{"model": 0, "class": "", "ddp_arguments": {}}],
            "imported": {
                "from": source.tool,
                "file": source.path.name,
                "notes": [*source.notes, *one.training.notes],
                "communication": communication.to_json(),
            },
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
            "ends_are_kernels": source.device != "cpu",
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

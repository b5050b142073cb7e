"""Evidence from dumps of PyTorch's Flight Recorder, so that the rules for recordings apply to them.

A dump has no step, bucket, parameter, phase or process state, and no time of its own: the dumps of one job are assumed
to be from one moment. The process was alive then, because it wrote the dump itself.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.collective_order import OrderSource, make_group_order, read_point_to_point_orders
from overlapscope.diagnosis.evidence import (
    UNKNOWN_STEP,
    CallSite,
    Entry,
    Evidence,
    GroupOrder,
    RankEvidence,
    RankPosition,
    RecordingGap,
)
from overlapscope.diagnosis.order_difference import EntryDifference
from overlapscope.diagnosis.stall_timeout import STUCK_AFTER_NS
from overlapscope.diagnosis.text import plural
from overlapscope.errors import Problem
from overlapscope.text import rank_list
from overlapscope.trace.collective_log import FAILED, REACHED, UNREACHED, ProcessGroup, Signature
from overlapscope.trace.flight_recorder import Dump, DumpEntry, read_all_dumps
from overlapscope.trace.schema import DTYPE_BYTES

# Conversion of operations in a Flight Recorder dump to signatures of collective logs.

_OPS: Final = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_v": "all_gather",
    "ALLGATHER_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "gather_single": "gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "sparse_all_reduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "recvAnySource": "recv",
}
"""Operations by the names of backends, which depend on how the tensors are passed."""

_DTYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_UNEVEN: Final = ("all_gather_v", "reduce_scatter_v")
"""Operations to which each rank may contribute a different number of elements."""
_COALESCED: Final = "coalesced"
_MOST_NAMES: Final = 3
_OUTPUT_OPS: Final = ("scatter", "recv")
"""Operations whose size on a rank is that of its output."""


def is_end_of_coalesced(entry: DumpEntry) -> bool:
    """Return True if an entry is no operation, but marks the end of those that were launched as one."""
    return entry.name.endswith(_COALESCED) and not any(entry.input_shapes)


def parse_backend(entry: DumpEntry) -> str:
    """Return the backend of an entry: nccl, nccl2, gloo ..., or c10d if torch 2.14's hook has recorded it."""
    return entry.name.partition(":")[0] if ":" in entry.name else ""


def make_signature(parts: Sequence[DumpEntry], members: tuple[int, ...]) -> Signature:
    """Return the signature of one launch, recorded as a whole or as several parts with one number.

    A dump holds no names, buckets, root or reduction operation.

    Args:
        parts: the entries with that number, in order.
        members: the ranks of the group, in order: a send identifies its peer by the index in it.
    """
    end = next((part for part in parts if is_end_of_coalesced(part)), None)
    inner = [part for part in parts if part is not end] or list(parts)
    whole = _op(end.name) if end is not None and _op(end.name) != _COALESCED else ""
    tensors = [_tensors(part) for part in inner]
    return _signature(
        whole or _joined({_op(part.name) for part in inner}, _COALESCED),
        tuple(chain.from_iterable(shapes for shapes, _ in tensors)),
        tuple(chain.from_iterable(dtypes for _, dtypes in tensors)),
        _peer(inner[0].name, members) if len(inner) == 1 else None,
        any(part.name.endswith(_UNEVEN) for part in inner),
    )


def _tensors(part: DumpEntry) -> tuple[Sequence[tuple[int, ...]], Sequence[str]]:
    """Return the shapes and dtypes that make up the size of an operation on a rank."""
    is_of_output = _op(part.name) in _OUTPUT_OPS
    return (part.output_shapes, part.output_dtypes) if is_of_output else (part.input_shapes, part.input_dtypes)


@lru_cache(maxsize=65536)  # ranks launch the same few thousand operations again and again
def _signature(
    op: str, shapes: tuple[tuple[int, ...], ...], dtype_names: tuple[str, ...], peer: int | None, is_uneven: bool
) -> Signature:
    dtypes = [_DTYPES.get(name, name.lower()) for name in dtype_names]
    return Signature(
        op=op,
        dtype=_joined(set(dtypes), "of several types"),
        shapes=shapes,
        elements=0 if is_uneven else sum(map(math.prod, shapes)),
        bytes=sum(math.prod(shape) * DTYPE_BYTES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False)),
        peer=peer,
    )


def _joined(names: set[str], several: str) -> str:
    return " and ".join(sorted(names)) if len(names) <= _MOST_NAMES else several


def _op(name: str) -> str:
    plain = name.rpartition(":")[2].partition(" ")[0]
    return _OPS.get(plain, plain)


def _peer(name: str, members: Sequence[int]) -> int | None:
    """Return the peer of ``nccl:send 0->1`` or ``nccl:recv 1<-0`` as a global rank.

    Example: of members (4, 6), ``nccl:send 0->1`` has the peer 6.
    """
    match = re.search(r"^(?:.*:)?(?:send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$", name)
    if match is None:
        return None
    index = int(match[2])
    return members[index] if index < len(members) else None


# Order of collectives from dumps of PyTorch's Flight Recorder.
#
# All that a dump of gloo or torchcomms says about completion is that nobody waits any more, which is also so after a
# timeout; so a collective counts as completed only if all ranks of its group launched the same. The same is done for
# backends recorded by torch's hook (2.14): of one that does not report ends it retires a collective at its launch.
#
# NCCL's dumps say whether a device has reached a collective, if starts are timed (``TORCH_NCCL_ENABLE_TIMING``); those
# of nccl2 (torch 2.15), which the hook records, only whether one has ended.

_DEFAULT_GROUP = "default_pg"


class FlightRecorderDumps:
    """The collectives of the ranks that left dumps: an ``OrderSource``.

    Args:
        dumps: dump of each rank.
    """

    def __init__(self, dumps: dict[int, Dump]) -> None:
        self.dumps = dumps
        """Dumps by rank."""
        mentioned = {rank for dump in dumps.values() for members in dump.members.values() for rank in members}
        self.expected_ranks = tuple(sorted({*dumps, *mentioned}))
        """All ranks that left a dump or that a dump mentions."""
        self._users: dict[str, set[int]] = {}
        for rank, dump in dumps.items():
            for entry in dump.entries:
                self._users.setdefault(entry.group, set()).add(rank)
        self._entries: dict[ProcessGroup, dict[int, tuple[Entry, ...]]] = {}
        for rank, dump in sorted(dumps.items()):
            has_starts = any(entry.state == "started" or entry.started_ns is not None for entry in dump.entries)
            for group, parts in self._parts_by_group(dump).items():
                self._entries.setdefault(group, {})[rank] = (
                    _point_to_point(parts, group.ranks)
                    if group.is_point_to_point
                    else _collectives(parts, group.ranks, has_starts)
                )
        for group, by_rank in self._entries.items():
            if not _reports_ends(group.backend) or any(dumps[rank].is_from_torchcomms for rank in by_rank):
                self._entries[group] = _with_completions_of_gloo(by_rank)

    @classmethod
    def read(cls, path: Path) -> tuple[FlightRecorderDumps, list[Problem]]:
        """Read one dump, or a folder of them.

        Returns:
            The collectives, and the problems of files that were left out.

        Raises:
            OverlapScopeError: no dump can be read.
        """
        dumps, problems = read_all_dumps(path)
        source = cls(dumps)
        missing = [rank for rank in source.expected_ranks if rank not in dumps]
        if missing:
            did = f"what {plural(missing, 'it', 'they')} did is unknown"
            problems.append(Problem("note", f"{path}: no dump of {rank_list(missing)}; {did}"))
        return source, problems

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each sorted by name."""
        return tuple(sorted(self._entries, key=lambda group: group.order))

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that left entries, in order."""
        return tuple(sorted(self._entries.get(group, {})))

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest entry that is left; 1 if there is none."""
        entries = self._of(group, rank)
        return entries[0].number if entries else 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry; 0 if there is none."""
        entries = self._of(group, rank)
        return entries[-1].number if entries else 0

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the entries with the numbers ``first`` to ``last``, as far as they are left, in order."""
        entries = self._of(group, rank)
        begin = bisect_left(entries, first, key=lambda entry: entry.number)
        return entries[begin : bisect_right(entries, last, key=lambda entry: entry.number)]

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if the latest is completed."""
        at_the_end = takewhile(lambda entry: entry.state != "completed", reversed(self._of(group, rank)))
        return next(iter(reversed(tuple(at_the_end))), None)

    def _of(self, group: ProcessGroup, rank: int) -> tuple[Entry, ...]:
        return self._entries.get(group, {}).get(rank, ())

    def _parts_by_group(self, dump: Dump) -> dict[ProcessGroup, list[DumpEntry]]:
        groups: dict[tuple[str, bool], ProcessGroup] = {}
        found: dict[ProcessGroup, list[DumpEntry]] = {}
        for entry in dump.entries:
            group = groups.get((entry.group, entry.is_point_to_point))
            if group is None:
                group = groups[entry.group, entry.is_point_to_point] = ProcessGroup(
                    name=entry.group,
                    ranks=self._members(dump, entry),
                    is_point_to_point=entry.is_point_to_point,
                    backend=parse_backend(entry),
                    description="" if entry.description == "undefined" else entry.description,
                )
            found.setdefault(group, []).append(entry)
        return found

    def _members(self, dump: Dump, entry: DumpEntry) -> tuple[int, ...]:
        """Return the ranks of a group; gloo does not dump them: then its users, or all for the default group."""
        if dump.members.get(entry.group):
            return dump.members[entry.group]
        return self.expected_ranks if entry.description == _DEFAULT_GROUP else tuple(sorted(self._users[entry.group]))


def _reports_ends(backend: str) -> bool:
    """Return whether a backend's entries say that a collective has ended; a retired one that has not has failed."""
    return backend.startswith(("nccl", "xccl"))


def _collectives(parts: list[DumpEntry], members: tuple[int, ...], has_starts: bool) -> tuple[Entry, ...]:
    """Group parts into collectives by their number: parts that share one were launched as one."""
    in_order = sorted(parts, key=lambda part: (part.number, part.record))
    return tuple(
        _entry(list(same), number, members, has_starts)
        for number, same in groupby(in_order, key=lambda part: part.number)
    )


def _point_to_point(parts: list[DumpEntry], members: tuple[int, ...]) -> tuple[Entry, ...]:
    """Convert sends and receives, numbering them anew: those of a batch share a number, and have no own start."""
    single = [part for part in sorted(parts, key=lambda part: part.record) if not is_end_of_coalesced(part)]
    return tuple(
        _entry([part], sequence_number, members, has_starts=False)
        for sequence_number, part in enumerate(single, start=1)
    )


def _entry(parts: list[DumpEntry], number: int, members: tuple[int, ...], has_starts: bool) -> Entry:
    # Of several that were launched as one, the backend reports the progress of all with the last.
    first, last = parts[0], parts[-1]
    is_completed = last.state == "completed"
    reached = {"started": REACHED, "scheduled": UNREACHED}.get(last.state, 0) if has_starts else 0
    site = next((part.call_site for part in parts if part.call_site), None)
    return Entry(
        number=number,
        signature=make_signature(parts, members),
        step=UNKNOWN_STEP,
        call_site=CallSite(file=site.file, line=site.line, function=site.function) if site else None,
        flags=(FAILED if last.is_retired and not is_completed else 0) | reached,
        announced_ns=first.created_ns,
        launched_ns=first.created_ns,
        completed_ns=(last.completed_ns or last.created_ns) if is_completed else None,
    )


def _with_completions_of_gloo(by_rank: dict[int, tuple[Entry, ...]]) -> dict[int, tuple[Entry, ...]]:
    """Replace gloo's completions, which only say that nobody waits any more, also after timeouts and errors.

    A collective counts as completed if nobody waits for it and all ranks that left a dump launched the same.
    """
    signatures = {rank: {entry.number: entry.signature.hash for entry in entries} for rank, entries in by_rank.items()}
    oldest = {rank: entries[0].number for rank, entries in by_rank.items()}

    def is_over(entry: Entry) -> bool:
        return bool(entry.flags & FAILED) and all(
            entry.number < oldest[other] or signatures[other].get(entry.number) == entry.signature.hash
            for other in by_rank
        )

    return {
        rank: tuple(
            replace(entry, flags=0, completed_ns=entry.announced_ns) if is_over(entry) else entry for entry in entries
        )
        for rank, entries in by_rank.items()
    }


_LIMITS: Final = (
    "Flight Recorder dumps don't hold steps, buckets, parameters or their own time; all are assumed to be from "
    "one moment"
)
_DUMP_AGAIN: Final = "Copy this dump again from where it was made, or dump again."


def read_dumps(path: Path) -> tuple[Evidence, list[Problem]]:
    """Read one dump, or a folder of them, for ``judge``.

    Returns:
        The evidence about each rank and group, and problems with the files or limits of what they show.

    Raises:
        OverlapScopeError: no dump can be read.
    """
    source, problems = FlightRecorderDumps.read(path)
    gaps = tuple(RecordingGap(str(problem), _DUMP_AGAIN) for problem in problems if problem.severity == "error")
    evidence = replace(evidence_from_dumps(source), gaps=gaps)
    return evidence, [Problem("note", f"{path}: {_LIMITS}"), *_overwritten_notes(path, source), *problems]


def evidence_from_dumps(source: FlightRecorderDumps) -> Evidence:
    """Return the evidence that dumps hold about each rank and each group."""
    groups = [group for group in source.groups() if not group.is_point_to_point]
    latest = {rank: _newest_entry(source, rank) for rank in source.dumps}
    return Evidence(
        expected_ranks=source.expected_ranks,
        ranks={
            rank: RankEvidence(
                rank=rank,
                liveness="dumped",
                position=_last_position(latest[rank]),
                idle_ns=_idle_ns(dump, latest[rank]),
            )
            for rank, dump in sorted(source.dumps.items())
        },
        groups=tuple(_order(source, group) for group in groups),
        point_to_point_orders=read_point_to_point_orders(source),
    )


def find_signature_difference(source: OrderSource, group: ProcessGroup) -> int | None:
    """Return the first number at which ranks launched different collectives, among entries that several still have."""
    signatures: dict[int, int] = {}
    differs: set[int] = set()
    for rank in source.recorded(group):
        for entry in source.entries(group, rank, source.oldest(group, rank), source.latest(group, rank)):
            if signatures.setdefault(entry.number, entry.signature.hash) != entry.signature.hash:
                differs.add(entry.number)
    return min(differs, default=None)


def _overwritten_notes(path: Path, source: FlightRecorderDumps) -> list[Problem]:
    oldest = {
        group: max(source.oldest(group, rank) for rank in source.recorded(group))
        for group in source.groups()
        if not group.is_point_to_point
    }
    return [
        Problem("note", f"{path}: {group.title}: only collectives from {number} on are in all dumps")
        for group, number in oldest.items()
        if number > 1
    ]


def _order(source: OrderSource, group: ProcessGroup) -> GroupOrder:
    number = find_signature_difference(source, group)
    if number is None:
        return make_group_order(source, group, None)
    # A difference in the oldest entries that can be compared has probably begun before them.
    oldest = sorted(source.oldest(group, rank) for rank in source.recorded(group))
    predates_log = 1 < number <= oldest[1]
    return make_group_order(
        source, group, EntryDifference(number=number, divergence="signature", predates_log=predates_log)
    )


def _newest_entry(source: FlightRecorderDumps, rank: int) -> Entry | None:
    latest = [
        entry
        for group in source.groups()
        for entry in source.entries(group, rank, source.latest(group, rank), source.latest(group, rank))
    ]
    return max(latest, key=lambda entry: entry.announced_ns, default=None)


def _last_position(latest: Entry | None) -> RankPosition:
    if latest is None:
        return RankPosition(step=UNKNOWN_STEP)
    return RankPosition(step=UNKNOWN_STEP, call_site=latest.call_site, since_ns=latest.announced_ns)


def _idle_ns(dump: Dump, latest: Entry | None) -> int | None:
    """Return the age of the latest collective, if the dump was written so soon after it that nothing is wrong.

    A copied file may have any later modification time, so a long time is no sign of a stall.
    """
    if latest is None:
        return None
    idle_ns = dump.written_ns - latest.announced_ns
    return idle_ns if 0 <= idle_ns < STUCK_AFTER_NS else None

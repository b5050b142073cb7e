"""Order of collectives from dumps of PyTorch's Flight Recorder.

All that a dump of gloo or torchcomms says about completion is that nobody waits any more, which is also so after a
timeout; so a collective counts as completed only if all ranks of its group launched the same.

NCCL's dumps say whether a device has reached a collective, if starts are timed (``TORCH_NCCL_ENABLE_TIMING``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import groupby, takewhile
from pathlib import Path

from overlapscope.diagnosis.evidence import UNKNOWN_STEP, CallSite, Entry
from overlapscope.diagnosis.flight_recorder_signatures import is_end_of_coalesced, make_signature, parse_backend
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.diagnosis.wording import plural, rank_list
from overlapscope.trace.flight_recorder import Dump, DumpEntry
from overlapscope.trace.flight_recorder_files import read_all_dumps
from overlapscope.trace.group_log import FAILED, REACHED, UNREACHED
from overlapscope.trace.log import Problem

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
            if group.backend == "gloo" or any(dumps[rank].is_from_torchcomms for rank in by_rank):
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
        return tuple(sorted(self._entries, key=lambda group: (group.is_point_to_point, group.name, group.ranks)))

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

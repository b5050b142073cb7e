"""Collective logs of all ranks of a recording: the groups, and random access to their entries.

Groups of different ranks are the same if their names and members are, whatever the numbers of their files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import has_finished_recording, read_lines
from overlapscope.trace.format import (
    CALL_SITES_FILE,
    GROUP_PATTERN,
    HEADER_BYTES,
    PLANS_FILE,
    POINT_TO_POINT_PATTERN,
    SIGNATURES_FILE,
)
from overlapscope.trace.group_file import CollectiveLogFile
from overlapscope.trace.group_log import ENTRY_BYTES
from overlapscope.trace.log import Problem
from overlapscope.trace.signature import NO_BUCKET, Signature

GroupKey = tuple[str, tuple[int, ...], bool]
"""Name, members, and whether it is the log of sends and receives."""


@dataclass(frozen=True)
class GroupLogs:
    """Logs of one group."""

    name: str
    ranks: tuple[int, ...]
    """Members of the group, whether or not they left a log."""
    is_point_to_point: bool
    backend: str
    description: str
    files: dict[int, CollectiveLogFile] = field(default_factory=dict)
    """Logs by rank."""


@dataclass
class CollectiveLogs:
    """Collective logs of all ranks, and the lines that the numbers in their entries refer to."""

    folders: dict[int, Path]
    groups: dict[GroupKey, GroupLogs] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _signatures: dict[int, dict[int, Signature]] = field(default_factory=dict)
    _call_sites: dict[int, dict[int, tuple[str, int, str]]] = field(default_factory=dict)
    _names: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """Names of the parameters of a bucket, by plan hash and bucket number."""
    _plans_read: set[int] = field(default_factory=set)
    _interned: dict[Any, Any] = field(default_factory=dict)
    """Interned lines, because most are the same on all ranks."""

    def signatures(self, rank: int) -> dict[int, Signature]:
        """Return a rank's signatures by number."""
        if rank not in self._signatures:

            def row(line: Any) -> list[tuple[int, Signature]]:
                number, signature = Signature.from_json(line)
                numbers = (signature.elements, signature.bytes, signature.bucket, signature.model, signature.plan_epoch)
                texts = (signature.op, signature.reduce_op, signature.dtype, signature.role, signature.plan_hash)
                if not all(isinstance(one, int) for one in (*numbers, signature.peer or 0)):
                    raise TypeError("a number is none")
                if not all(isinstance(text, str) for text in texts):
                    raise TypeError("a text is none")
                return [(number, self._interned.setdefault(signature, signature))]

            path = self.folders[rank] / SIGNATURES_FILE
            self._signatures[rank] = dict(read_lines(path, self.problems, row))
        return self._signatures[rank]

    def named(self, rank: int, signature: Signature) -> Signature:
        """Return a bucket's signature with the names of its parameters, if the rank has recorded the bucket's plan."""
        if signature.bucket == NO_BUCKET or signature.names:
            return signature
        key = signature.plan_hash, signature.bucket
        if key not in self._names and rank not in self._plans_read:
            self._plans_read.add(rank)
            read_lines(self.folders[rank] / PLANS_FILE, self.problems, self._note_plan)
        names = self._names.get(key)
        return signature if names is None else replace(signature, names=names)

    def _note_plan(self, plan: Any) -> list[None]:
        for number, bucket in enumerate(plan["buckets"]):
            names = tuple(str(parameter["name"]) for parameter in bucket["parameters"])
            self._names[str(plan["hash"]), number] = names
        return []

    def call_sites(self, rank: int) -> dict[int, tuple[str, int, str]]:
        """Return a rank's call sites by number: file, line, function."""
        if rank not in self._call_sites:

            def row(line: Any) -> list[tuple[int, tuple[str, int, str]]]:
                site = str(line["file"]), int(line["line"]), str(line["function"])
                return [(int(line["call_site"]), self._interned.setdefault(site, site))]

            path = self.folders[rank] / CALL_SITES_FILE
            self._call_sites[rank] = dict(read_lines(path, self.problems, row))
        return self._call_sites[rank]


def open_collective_logs(
    folders: dict[int, Path], progress: Callable[[int, int], None] | None = None
) -> CollectiveLogs:
    """Open the collective logs of all ranks.

    Args:
        folders: rank folders by rank.
        progress: called with (number of ranks done, number of ranks).
    """
    logs = CollectiveLogs(folders)
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done, len(folders))
        paths = [*folder.glob(GROUP_PATTERN), *folder.glob(POINT_TO_POINT_PATTERN)]
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            _add(logs, rank, path)
    if progress:
        progress(len(folders), len(folders))
    return logs


def _add(logs: CollectiveLogs, rank: int, path: Path) -> None:
    try:
        file = CollectiveLogFile(path, logs.problems)
    except OverlapScopeError as error:
        if has_finished_recording(path.parent) or not _was_just_made(path):
            logs.problems.append(Problem("error", str(error)))
        return
    header = file.header
    if header.rank != rank:
        text = f"{path}: this is the log of rank {header.rank}, in the folder of rank {rank}; it is skipped"
        logs.problems.append(Problem("error", text))
        return
    key = (header.name, header.ranks, header.point_to_point)
    group = logs.groups.get(key)
    if group is None:
        group = GroupLogs(header.name, header.ranks, header.point_to_point, header.backend, header.description)
        logs.groups[key] = group
    if rank in group.files:
        text = f"{path}: a second log of group {header.name}, after {group.files[rank].path.name}; it is skipped"
        logs.problems.append(Problem("error", text))
        return
    file.header = replace(header, ranks=group.ranks)  # so that a thousand ranks share one list of a thousand members
    group.files[rank] = file


def _was_just_made(path: Path) -> bool:
    """Return whether a log has its full size, but no header or entry yet: its process is about to write them."""
    try:
        with path.open("rb") as file:
            begin = file.read(HEADER_BYTES + ENTRY_BYTES)
    except OSError:
        return False
    return len(begin) == HEADER_BYTES + ENTRY_BYTES and not any(begin)

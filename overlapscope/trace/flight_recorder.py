"""Reader of one PyTorch Flight Recorder dump: the collectives that one rank launched, and their state.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder*.hpp``, versions 2.x. Backends fill it differently:
gloo leaves ``state`` at ``scheduled``, and only ``retired`` tells that an operation is no longer waited for; NCCL
records start and end. gloo's ``pg_config`` has one unnamed group, the last that was created, whatever group names the
entries have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.restricted_json import load_json
from overlapscope.trace.restricted_pickle import load_pickle
from overlapscope.trace.untrusted_file import read_bytes
from overlapscope.trace.user_code import is_user_file

_MAJOR_VERSION: Final = "2"
_LONGEST_TEXT: Final = 1000
_LARGEST: Final = 2**63
_MOST_DIMENSIONS: Final = 64
_MOST_RANKS: Final = 65_536


@dataclass(frozen=True, kw_only=True)
class SourceFrame:
    """Source line of a stack frame."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpEntry:
    """One operation as one rank launched it."""

    record: int
    """Number among all entries of the rank, from 0; the recorder keeps only the latest entries."""
    group: str
    description: str
    number: int
    """Sequence number in the group, shared by the parts of a coalesced launch. Sends and receives are numbered
    separately."""
    is_point_to_point: bool
    name: str
    """Name given by the backend: ``nccl:all_reduce``, ``gloo:broadcast``, ``nccl:send 0->1``."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: str = "scheduled"
    """scheduled, started or completed; always scheduled on gloo."""
    is_retired: bool = False
    """True if nothing waits for it any more: it completed, failed or timed out."""
    created_ns: int = 0
    """Wall clock time."""
    started_ns: int | None = None
    completed_ns: int | None = None
    call_site: SourceFrame | None = None
    """Innermost line of the user's code; None in JSON dumps and for launches from autograd's own threads."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Content of one rank's Flight Recorder."""

    path: Path
    written_ns: int
    """Modification time of the file, by the wall clock; copying the file may have changed it."""
    version: str
    rank: int | None
    """Rank, if the file contains it; dumps of torch don't."""
    members: dict[str, tuple[int, ...]]
    """Ranks of the groups that the file lists, by group name."""
    entries: tuple[DumpEntry, ...]
    """Entries in launch order."""
    is_from_torchcomms: bool = False
    """True if the dump is from torchcomms, with its sequence numbers converted to those of PyTorch."""
    left_out: int = 0
    """Number of sends and receives that were dropped because their peers are unknown."""


def read_dump(path: Path) -> Dump:
    """Read the dump of one rank, pickle or JSON.

    Raises:
        OverlapScopeError: the file can't be read, is not a dump, is damaged, or of an unknown version.
    """
    data = read_bytes(path)
    content = load_json(data, path) if data.lstrip()[:1] == b"{" else load_pickle(data, path)
    if not isinstance(content, dict) or "version" not in content:
        raise OverlapScopeError(f"{path}: not a Flight Recorder dump; it holds no dictionary with a version")
    reader = _Reader(path)
    version = reader.text(content["version"], "version")
    if version.partition(".")[0] != _MAJOR_VERSION:
        raise OverlapScopeError(
            f"{path}: written in Flight Recorder format {version}; this overlapscope reads {_MAJOR_VERSION}.x"
        )
    if "entries" not in content:
        raise OverlapScopeError(f"{path}: holds no entries: nothing was launched yet, or it was written without them")
    rank = content.get("rank")
    return Dump(
        path=path,
        written_ns=_written_ns(path),
        version=version,
        rank=None if rank is None else reader.integer(rank, "rank"),
        members=reader.members(content.get("pg_config", {})),
        entries=reader.entries(content["entries"]),
    )


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # deleted since it was read
        return 0


class _Reader:
    """Converter from plain values to dataclasses that checks all types."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts: dict[str, str] = {}
        self._frames: dict[int, SourceFrame | None] = {}  # by id: the stacks of a dump share most of their frames

    def members(self, config: Any) -> dict[str, tuple[int, ...]]:
        if not isinstance(config, dict):
            raise self._damaged("pg_config is not a dictionary")
        return {
            self.text(str(name), "pg_config"): self._ranks(group.get("ranks", ()) if isinstance(group, dict) else group)
            for name, group in config.items()
        }

    def entries(self, listed: Any) -> tuple[DumpEntry, ...]:
        if not isinstance(listed, list):
            raise self._damaged("entries is not a list")
        return tuple(self._entry(entry, index) for index, entry in enumerate(listed))

    def text(self, value: Any, name: str) -> str:
        """Return a text that is safe to print: no control characters, no line ends, limited length."""
        if not isinstance(value, str):
            raise self._damaged(f"{name} is not a string")
        if value not in self._texts:
            self._texts[value] = "".join(
                c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value[:_LONGEST_TEXT]
            )
        return self._texts[value]

    def integer(self, value: Any, name: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not -_LARGEST <= value < _LARGEST:
            raise self._damaged(f"{name} is not an integer")
        return value

    def _entry(self, entry: Any, index: int) -> DumpEntry:
        where = f"entry {index}"
        if not isinstance(entry, dict):
            raise self._damaged(f"{where} is not a dictionary")
        is_point_to_point = entry.get("is_p2p", False)
        number = "p2p_seq_id" if is_point_to_point is True else "collective_seq_id"
        group, description = self._group(entry, where)
        return DumpEntry(
            record=self.integer(entry.get("record_id"), f"record_id of {where}"),
            group=group,
            description=description,
            number=self.integer(entry.get(number), f"{number} of {where}"),
            is_point_to_point=is_point_to_point is True,
            name=self.text(entry.get("profiling_name"), f"profiling_name of {where}"),
            input_shapes=self._shapes(entry, "input_sizes", where),
            output_shapes=self._shapes(entry, "output_sizes", where),
            input_dtypes=self._texts_of(entry, "input_dtypes", where),
            output_dtypes=self._texts_of(entry, "output_dtypes", where),
            state=self.text(entry.get("state"), f"state of {where}"),
            is_retired=entry.get("retired") is True,
            created_ns=self._time(entry, "time_created_ns", where) or 0,
            started_ns=self._time(entry, "time_discovered_started_ns", where),
            completed_ns=self._time(entry, "time_discovered_completed_ns", where),
            call_site=self._call_site(self._list(entry, "frames", where), where),
        )

    def _group(self, entry: Mapping[Any, Any], where: str) -> tuple[str, str]:
        name = f"process_group of {where}"
        group = entry.get("process_group")
        if group is None:
            return str(self.integer(entry.get("pg_id"), f"pg_id of {where}")), ""
        if isinstance(group, str):
            return self.text(group, name), ""
        if not isinstance(group, tuple | list) or len(group) != 2:
            raise self._damaged(f"{name} is not a pair")
        return self.text(group[0], name), self.text(group[1], name)

    def _ranks(self, ranks: Any) -> tuple[int, ...]:
        if isinstance(ranks, str) and len(ranks) < 8 * _MOST_RANKS:  # "[0, 1]"
            ranks = re.findall(r"[0-9]+", ranks)
        if not isinstance(ranks, list | tuple) or len(ranks) > _MOST_RANKS:
            raise self._damaged("ranks in pg_config are not a list")
        return tuple(sorted({self.integer(rank, "a rank in pg_config") for rank in ranks}))

    def _shapes(self, entry: Mapping[Any, Any], name: str, where: str) -> tuple[tuple[int, ...], ...]:
        shapes = self._list(entry, name, where)
        if not all(isinstance(shape, list | tuple) and len(shape) <= _MOST_DIMENSIONS for shape in shapes):
            raise self._damaged(f"{name} of {where} is not a list of shapes")
        return tuple(tuple(self.integer(size, f"a size in {name} of {where}") for size in shape) for shape in shapes)

    def _call_site(self, frames: list[Any], where: str) -> SourceFrame | None:
        for frame in frames:  # innermost first
            if id(frame) not in self._frames:
                self._frames[id(frame)] = self._frame(frame, where)
            if found := self._frames[id(frame)]:
                return found
        return None

    def _frame(self, frame: Any, where: str) -> SourceFrame | None:
        if not isinstance(frame, dict):
            raise self._damaged(f"a frame of {where} is not a dictionary")
        file = self.text(frame.get("filename", ""), f"filename of a frame of {where}")
        if not is_user_file(file):
            return None
        line = self.integer(frame.get("line", 0), f"line of a frame of {where}")
        return SourceFrame(
            file=file, line=line, function=self.text(frame.get("name", ""), f"name of a frame of {where}")
        )

    def _texts_of(self, entry: Mapping[Any, Any], name: str, where: str) -> tuple[str, ...]:
        return tuple(self.text(value, f"one of {name} of {where}") for value in self._list(entry, name, where))

    def _time(self, entry: Mapping[Any, Any], name: str, where: str) -> int | None:
        """Return a time; None if it is missing or 0, as for an event that has not happened."""
        value = entry.get(name)
        return None if value is None else self.integer(value, f"{name} of {where}") or None

    def _list(self, entry: Mapping[Any, Any], name: str, where: str) -> list[Any]:
        value = entry.get(name, [])
        if not isinstance(value, list | tuple):
            raise self._damaged(f"{name} of {where} is not a list")
        return list(value)

    def _damaged(self, what: str) -> OverlapScopeError:
        return OverlapScopeError(f"{self._path}: not a Flight Recorder dump, or damaged: {what}")

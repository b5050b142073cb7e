"""Reader of PyTorch Flight Recorder dumps: the collectives that each rank launched, and their state.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder*.hpp``, versions 2.x. Backends fill it differently:
gloo leaves ``state`` at ``scheduled``, and only ``retired`` tells that an operation is no longer waited for; NCCL
records start and end. gloo's ``pg_config`` has one unnamed group, the last that was created, whatever group names the
entries have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.regular_file import open_regular_file
from overlapscope.trace.untrusted import load_json, load_pickle, read_bytes
from overlapscope.trace.user_code import find_user_file

_MAJOR_VERSION: Final = "2"
_LONGEST_TEXT: Final = 1000
_LARGEST: Final = 2**63
_MOST_DIMENSIONS: Final = 64
_MOST_RANKS: Final = 65_536
_NAME_OF_OP: Final = re.compile(r"(?:[\w.-]+:)?(?P<op>[\w.-]+)(?: [0-9]{1,9}(?:->|<-)[0-9]{1,9})?")
"""``nccl:all_reduce``, ``nccl:send 0->1``, and without a backend in early versions."""
_WORD: Final = re.compile(r"(?P<op>[\w.-]+)")
_OPS: Final = [
    "all_reduce",
    "all_reduce_barrier",
    "allreduce",
    "allreduce_coalesced",
    "all_reduce_sparse",
    "sparse_all_reduce",
    "broadcast",
    "_broadcast_oop",
    "reduce",
    "_reduce_oop",
    "all_gather",
    "all_gather_v",
    "all_gather_p",
    "all_gather_single",
    "allgather",
    "allgather_coalesced",
    "_all_gather_base",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_v",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "ALLREDUCE_coalesced",
    "ALLGATHER_coalesced",
    "REDUCE_SCATTER_coalesced",
    "coalesced",
    "barrier",
    "gather",
    "gather_single",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v_single",
    "alltoall",
    "send",
    "recv",
    "recvAnySource",
    "batch_op_issue",
]
_STATES: Final = ("scheduled", "started", "completed")
_DTYPES: Final = [
    "Float",
    "Double",
    "Half",
    "BFloat16",
    "Long",
    "Int",
    "Short",
    "Char",
    "Byte",
    "Bool",
    "ComplexFloat",
    "ComplexDouble",
    "ComplexHalf",
    "UInt16",
    "UInt32",
    "UInt64",
    "Float8_e4m3fn",
    "Float8_e5m2",
    "Float8_e4m3fnuz",
    "Float8_e5m2fnuz",
]


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
        self._frames: dict[int, SourceFrame] = {}  # by id: the stacks of a dump share most of their frames
        self._words: set[tuple[str, re.Pattern[str]]] = set()

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

    def word(self, value: Any, name: str, known: Collection[str], pattern: re.Pattern[str] = _WORD) -> str:
        """Return a name of PyTorch's; one that is no word, or a known one but for a single letter, is damage.

        Others are of a backend or a version that is unknown here.
        """
        text = self.text(value, name)
        if (text, pattern) not in self._words:
            match = pattern.fullmatch(text)
            if match is None or _is_misspelled(match["op"], known):
                raise self._damaged(f"{name} is {text!r}, which is no known name")
            self._words.add((text, pattern))
        return text

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
            name=self.word(entry.get("profiling_name"), f"profiling_name of {where}", _OPS, _NAME_OF_OP),
            input_shapes=self._shapes(entry, "input_sizes", where),
            output_shapes=self._shapes(entry, "output_sizes", where),
            input_dtypes=self._dtypes(entry, "input_dtypes", where),
            output_dtypes=self._dtypes(entry, "output_dtypes", where),
            state=self.word(entry.get("state"), f"state of {where}", _STATES),
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
        for frame in frames:
            if id(frame) not in self._frames:
                self._frames[id(frame)] = self._frame(frame, where)
        known = [self._frames[id(frame)] for frame in frames]  # innermost first
        found = find_user_file([frame.file for frame in known])
        return None if found is None else known[found]

    def _frame(self, frame: Any, where: str) -> SourceFrame:
        if not isinstance(frame, dict):
            raise self._damaged(f"a frame of {where} is not a dictionary")
        return SourceFrame(
            file=self.text(frame.get("filename", ""), f"filename of a frame of {where}"),
            line=self.integer(frame.get("line", 0), f"line of a frame of {where}"),
            function=self.text(frame.get("name", ""), f"name of a frame of {where}"),
        )

    def _dtypes(self, entry: Mapping[Any, Any], name: str, where: str) -> tuple[str, ...]:
        values = self._list(entry, name, where)
        return tuple(self.word(value, f"one of {name} of {where}", _DTYPES) for value in values)

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


def _is_misspelled(word: str, known: Collection[str]) -> bool:
    """Return whether a word is not known, and one that is differs from it in a single letter."""
    return word not in known and any(
        len(word) == len(other) and sum(a != b for a, b in zip(word, other, strict=True)) == 1 for other in known
    )


_POINT_TO_POINT: Final = ("send", "recv", "batch_op_issue")


def renumber_by_group(dump: Dump) -> Dump:
    """Renumber collectives of a torchcomms dump within their groups, as in dumps of PyTorch; return others unchanged.

    According to ``comms/torchcomms/hooks/fr/FlightRecorder.cpp`` of meta-pytorch/torchcomms, ``collective_seq_id``
    counts what the process has launched in all communicators together, from 0. This includes sends and receives, which
    are not marked as such and have no peer. A group's description is the backend's name. ``completed`` is rarely seen,
    as on gloo.

    Raises:
        OverlapScopeError: the numbers are unknown, because some launches are missing from the dump.
    """
    if not _is_of_torchcomms(dump.entries):
        return dump
    collectives = [entry for entry in dump.entries if _op(entry) not in _POINT_TO_POINT]
    # Missing entries may be of any communicator, or sent to a single rank.
    if any(entry.number != index for index, entry in enumerate(dump.entries)):
        raise OverlapScopeError(
            f"{dump.path}: torchcomms numbers what is launched in all communicators together, and not all of it is in "
            "this dump: it can't be compared with others; give FlightRecorderHook more max_entries, and dump it with "
            "include_completed=True"
        )
    counted: Counter[str] = Counter()
    numbered = []
    for entry in collectives:
        counted[entry.group] += 1
        numbered.append(replace(entry, number=counted[entry.group]))
    return replace(
        dump, entries=tuple(numbered), is_from_torchcomms=True, left_out=len(dump.entries) - len(collectives)
    )


def _is_of_torchcomms(entries: Sequence[DumpEntry]) -> bool:
    return bool(entries) and all(entry.description == entry.name.partition(":")[0] != "" for entry in entries)


def _op(entry: DumpEntry) -> str:
    return entry.name.partition(":")[2]


_NAME: Final = re.compile(r"(?P<prefix>|.*?[^0-9])(?P<rank>[0-9]{1,9})(\.(json|pickle|pkl))?")
"""Name of a dump, such as ``trace_0``, ``nccl_trace_rank_12``, ``trace_0.json``."""
_SNIFFED_BYTES: Final = 65536
_MOST_NAMED: Final = 3
_DEFAULT_GROUP: Final = "0"


def holds_dumps(path: Path) -> bool:
    """Return whether a file looks like a dump of the Flight Recorder, or a folder contains such files."""
    if path.is_file():
        return _looks_like_a_dump(path)
    return any(map(_looks_like_a_dump, _numbered_files(path)))


def read_all_dumps(path: Path) -> tuple[dict[int, Dump], list[Problem]]:
    """Read the dump of each rank.

    If a rank has several, a pickle is preferred to JSON, which has no source lines.

    Args:
        path: one dump, or a folder of dumps.

    Returns:
        The dumps by rank, and problems with other files.

    Raises:
        OverlapScopeError: no dump can be read.
    """
    files = [path] if path.is_file() else _dump_files(path)
    if not files:
        raise OverlapScopeError(_explain_no_dumps(path))
    dumps: dict[int, Dump] = {}
    problems = [] if path.is_file() else _report_unreadable(path, files)
    for file in sorted(files, key=lambda file: (file.suffix == ".json", file.name)):
        try:
            dump = renumber_by_group(read_dump(file))
            rank = _determine_rank(dump)
        except OverlapScopeError as error:
            if len(files) == 1:
                raise
            problems.append(Problem("error", str(error)))
            continue
        if rank not in dumps:
            dumps[rank] = dump
        elif file.suffix != ".json" or dumps[rank].path.suffix == ".json":
            problems.append(Problem("note", f"{file}: a second dump of rank {rank}; {dumps[rank].path.name} is used"))
    if not dumps:
        raise OverlapScopeError(f"{path}: none of its dumps can be read; the first: {problems[0]}")
    _require_one_job(path, dumps)
    if left_out := sum(dump.left_out for dump in dumps.values()):
        what = f"{left_out} sends and receives are left out: torchcomms does not say between whom they are"
        problems.append(Problem("note", f"{path}: {what}"))
    return dumps, problems


def _explain_no_dumps(path: Path) -> str:
    others = [file.name for file in _numbered_files(path)[:_MOST_NAMED]]
    but = f"; {', '.join(others)} {'is none' if len(others) == 1 else 'are none'}" if others else ""
    return f"{path}: contains no Flight Recorder dump (such as trace_0, or trace_0.json){but}"


def _require_one_job(path: Path, dumps: dict[int, Dump]) -> None:
    """Raise an error if the default group does not have the same members in all dumps.

    Other groups can't be compared: each process numbers them separately, and gloo lists only its last group, unnamed.
    """
    worlds = [
        (dump.members[_DEFAULT_GROUP], dump.path.name) for dump in dumps.values() if _DEFAULT_GROUP in dump.members
    ]
    for ranks, name in worlds[1:]:
        first, first_name = worlds[0]
        if ranks != first:
            raise OverlapScopeError(
                f"{path}: holds dumps of different jobs: the default group has {len(first)} ranks in {first_name} and "
                f"{len(ranks)} in {name}; keep those of one job"
            )


def _numbered_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name) and file.is_file())
    except OSError:
        return []


def _dump_files(folder: Path) -> list[Path]:
    """Return the dumps in a folder, and files with similar names, because a dump may be empty or damaged."""
    numbered = _numbered_files(folder)
    prefixes = {_prefix(file) for file in numbered if _looks_like_a_dump(file)}
    return [file for file in numbered if _prefix(file) in prefixes]


def _report_unreadable(folder: Path, files: list[Path]) -> list[Problem]:
    """Return problems for entries named like these dumps that are no readable files."""
    prefixes = {_prefix(file) for file in files}
    try:
        others = sorted(each for each in folder.iterdir() if _NAME.fullmatch(each.name) and not each.is_file())
    except OSError:
        return []
    alike = (each for each in others if _prefix(each) in prefixes)
    return [Problem("error", f"{each}: {_describe_file_type(each)}, and no dump") for each in alike]


def _describe_file_type(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link to nowhere"
    return "a folder" if path.is_dir() else "not a file"


def _prefix(file: Path) -> str:
    match = _NAME.fullmatch(file.name)
    return match["prefix"] if match else ""


def _looks_like_a_dump(file: Path) -> bool:
    try:
        with open_regular_file(file) as opened:
            head = opened.read(_SNIFFED_BYTES)
    except OSError:
        return False
    # Any pickle counts: one that isn't a dump must be rejected by name, not ignored.
    return head[:1] == b"\x80" or (
        head.lstrip()[:1] == b"{" and re.search(rb'"(pg_config|record_id)"', head) is not None
    )


def _determine_rank(dump: Dump) -> int:
    match = _NAME.fullmatch(dump.path.name)
    if match:
        return int(match["rank"])
    if dump.rank is not None:
        return dump.rank
    common = set.intersection(*map(set, dump.members.values())) if dump.members else set()
    if len(common) == 1:
        return common.pop()
    raise OverlapScopeError(f"{dump.path}: doesn't say which rank it is from; name it trace_0, trace_1 ...")

"""Discovery of Flight Recorder dumps in a folder, and the ranks that they are from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.flight_recorder import Dump, read_dump
from overlapscope.trace.log import Problem
from overlapscope.trace.torchcomms import renumber_by_group

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
        others = [file.name for file in _numbered_files(path)[:_MOST_NAMED]]
        but = f"; {', '.join(others)} {'is none' if len(others) == 1 else 'are none'}" if others else ""
        raise OverlapScopeError(f"{path}: contains no Flight Recorder dump (such as trace_0, or trace_0.json){but}")
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
        with file.open("rb") as opened:
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

"""Runs in folders, at any depth: their names, and the tags and notes that users attach to them.

A run is a recording with all its attempts, or a folder of Flight Recorder dumps. Links to folders are not followed, and
a run with a link out of the given folders is left out, so that nothing outside of them is shown.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.flight_recorder import holds_dumps
from overlapscope.trace.folders import find_attempts, is_rank_folder_name
from overlapscope.trace.schema import TABLES_FOLDER, WATCHDOG_FOLDER

NOTES_FILE: Final = "notes.json"
MAX_TAGS: Final = 20
MAX_TAG_LENGTH: Final = 40
MAX_NOTE_LENGTH: Final = 10_000
_MOST_BYTES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RunNotes:
    """Tags and a note that users attach to a run: ``notes.json`` next to its rank folders.

    It may be edited by hand, so it has no checksum, which an edit would invalidate.
    """

    tags: tuple[str, ...] = ()
    note: str = ""


def parse_tags(text: str) -> tuple[str, ...]:
    """Parse comma-separated tags as a user types them: without duplicates or surrounding space."""
    return tuple(dict.fromkeys(tag for each in text.split(",") if (tag := " ".join(each.split()))))


def read_notes(run: Path) -> RunNotes:
    """Read the tags and the note of a run; empty if there is no file.

    Args:
        run: folder of the run.

    Raises:
        OverlapScopeError: there is a file, and it can't be read.
    """
    path = run / NOTES_FILE
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return RunNotes()
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    try:
        content = json.loads(data)
        tags, note = content["tags"], content["note"]
    except (ValueError, KeyError, TypeError, RecursionError):
        tags, note = None, None
    if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise OverlapScopeError(f"{path}: holds no tags and note; repair it, or remove it")
    return RunNotes(tags=tuple(tags), note=note)


def write_notes(run: Path, notes: RunNotes) -> None:
    """Write tags and note atomically; if both are empty, remove the file.

    Raises:
        OverlapScopeError: the folder can't be written to, an existing file can't be read, or there is too much to
            write.
    """
    path = run / NOTES_FILE
    _check_extent(notes.tags, notes.note)
    read_notes(run)  # raises an error: an unreadable file is not overwritten
    part = path.with_suffix(".part")
    try:
        if notes == RunNotes():
            path.unlink(missing_ok=True)
            return
        text = json.dumps({"tags": notes.tags, "note": notes.note}, indent=1, ensure_ascii=False)
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
        part.replace(path)
    except OSError as error:
        raise OverlapScopeError(f"{run}: tags and notes can't be kept here ({error.strerror})") from None


def _check_extent(tags: Iterable[str], note: str) -> None:
    known = tuple(tags)
    if len(known) > MAX_TAGS or any(len(tag) > MAX_TAG_LENGTH for tag in known):
        raise OverlapScopeError(f"a run has at most {MAX_TAGS} tags of {MAX_TAG_LENGTH} characters each")
    if len(note) > MAX_NOTE_LENGTH:
        raise OverlapScopeError(f"a note has at most {MAX_NOTE_LENGTH:,} characters; this one has {len(note):,}")


MAX_DEPTH: Final = 12
"""Maximum depth of the search."""
MAX_FOLDERS: Final = 20_000
"""Maximum number of folders to search: with more, it is a disk and not a folder of recordings."""


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """Run, as shown in one row of a table of runs."""

    name: str
    """Path relative to the given folder, with slashes; if several folders were given, prefixed with the name of that
    folder."""
    path: Path
    """Folder of the run, which is that of the first attempt."""
    attempts: tuple[Path, ...]
    """Folders of all attempts that have left files, in order; only the run's own folder if there is one attempt."""

    @property
    def latest(self) -> Path:
        """Return the folder of the latest attempt."""
        return self.attempts[-1]

    @property
    def latest_name(self) -> str:
        """Return the name under which the latest attempt is found."""
        return f"{self.name}/{self.latest.name}" if self.latest != self.path else self.name


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """Runs found in some folders."""

    runs: tuple[FoundRun, ...] = ()
    left_out: tuple[str, ...] = ()
    """Folders that were not searched, and why: a sentence each, without a full stop."""
    _paths: Mapping[str, Path] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paths = {run.name: run.path for run in self.runs}
        paths |= {f"{run.name}/{path.name}": path for run in self.runs for path in run.attempts if path != run.path}
        object.__setattr__(self, "_paths", paths)

    def path_of(self, name: str) -> Path | None:
        """Return the folder of a run or of one of its attempts by name; None if there is none of this name.

        A name is only looked up, and never made into a path, so that no name leads out of the folders.
        """
        return self._paths.get(name)


def is_run(folder: Path) -> bool:
    """Return whether a folder is itself a recording, or holds dumps."""
    try:
        with os.scandir(folder) as entries:
            if any(is_rank_folder_name(entry.name) and entry.is_dir() for entry in entries):
                return True
    except OSError:
        return False
    return holds_dumps(folder)


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """Find all runs in some folders, sorted by name. A missing folder holds none.

    Args:
        folders: folders to search; each may also be a run itself, which is then named after its folder.
    """
    left_out: list[str] = []
    runs: dict[Path, FoundRun] = {}
    for folder, label in zip(folders, _labels(folders), strict=True):
        root = folder.resolve()
        prefix = f"{label}/" if len(folders) > 1 else ""
        for path in _run_folders(root, left_out):
            name = label if path == root else prefix + path.relative_to(root).as_posix()
            begun = find_attempts(path)
            outside = {each: _find_outside_link(root, each) for each in dict.fromkeys((path, *begun))}
            left_out += [_link_text(root, link) for link in outside.values() if link]
            if not outside[path]:
                attempts = tuple(each for each in begun if not outside[each])
                runs.setdefault(path, FoundRun(name=name, path=path, attempts=attempts or (path,)))
    return FoundRuns(runs=tuple(sorted(runs.values(), key=lambda run: run.name)), left_out=tuple(left_out))


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return a distinct label for each folder."""
    seen: Counter[str] = Counter()
    labels = []
    for folder in folders:
        name = folder.resolve().name or "root"
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return labels


def _run_folders(root: Path, left_out: list[str]) -> Iterator[Path]:
    waiting = [(root, 0)]
    looked_into = 0
    while waiting:
        folder, depth = waiting.pop()
        looked_into += 1
        if looked_into > MAX_FOLDERS:
            left_out.append(f"{root}: holds more than {MAX_FOLDERS:,} folders; the others are not searched")
            return
        links, folders = _scan(folder, left_out)
        outside = [name for name in links if not _is_in(root, folder / name)]
        left_out += [_link_text(root, folder / name) for name in outside]
        own = list(filter(_is_of_a_recording, links + folders))
        if not any(map(_is_read, outside)) and (_is_begun(folder, own) or holds_dumps(folder)):
            yield folder
        inner = [folder / name for name in folders if not _is_internal_folder(name)]
        if depth < MAX_DEPTH:
            waiting += [(path, depth + 1) for path in inner]
        elif inner:
            left_out.append(f"{folder}: {MAX_DEPTH} levels deep; folders in it are not searched")


def _scan(folder: Path, left_out: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the links to folders in a folder, and of the folders."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if entry.is_dir()]
    except FileNotFoundError:  # not created yet, or deleted
        return [], []
    except OSError as error:
        left_out.append(f"{folder}: can't be read ({error.strerror})")
        return [], []
    links = {entry.name for entry in entries if entry.is_symlink()}
    return sorted(links), [entry.name for entry in entries if entry.name not in links]


def _is_begun(folder: Path, own: Sequence[str]) -> bool:
    """Return whether there is a rank folder in a folder, or a later attempt that has left files.

    Args:
        own: names of the folders of ranks and of attempts.
    """
    return any(map(is_rank_folder_name, own)) or (bool(own) and bool(find_attempts(folder)))


def _is_of_a_recording(name: str) -> bool:
    return is_rank_folder_name(name) or (name.startswith("restart_") and name.removeprefix("restart_").isdecimal())


def _is_internal_folder(name: str) -> bool:
    """Return whether a folder of this name belongs to a recording, or is hidden."""
    return _is_of_a_recording(name) or name in (TABLES_FOLDER, WATCHDOG_FOLDER) or name.startswith(".")


def _find_outside_link(root: Path, attempt: Path) -> Path | None:
    """Return a link out of a folder that who reads an attempt would follow; None if there is none.

    A server may be allowed to read what the user who made the link may not.
    """
    ranks = [path for path in attempt.glob("rank_*") if is_rank_folder_name(path.name)]
    beside = (link for link in _links(attempt) if not ranks or _is_read(link.name))
    links = chain([attempt] if attempt.is_symlink() else [], beside, *map(_links, (*ranks, attempt / TABLES_FOLDER)))
    return next((link for link in links if not _is_in(root, link)), None)


def _links(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_symlink()]
    except OSError:
        return []


def _is_read(name: str) -> bool:
    """Return whether reading a recording opens what has this name beside its ranks."""
    is_folder = _is_of_a_recording(name) or name in (TABLES_FOLDER, WATCHDOG_FOLDER)
    return is_folder or name.endswith((".json", ".jsonl"))


def _link_text(root: Path, link: Path) -> str:
    return f"{link}: a link out of {root}, which is not followed"


def _is_in(root: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(root)

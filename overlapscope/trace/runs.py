"""Which runs some folders hold, at any depth, and what they are called.

A run is a recording with all its attempts, or a folder of Flight Recorder dumps. Links to folders are not followed, so
that nothing is shown that is not inside.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from overlapscope.trace.attempts import attempts_in
from overlapscope.trace.flight_recorder_files import holds_dumps
from overlapscope.trace.format import TABLES_FOLDER, WATCHDOG_FOLDER

DEEPEST: Final = 12
"""Levels of folders that are looked into."""
MOST_FOLDERS: Final = 20_000
"""Folders that are looked into: more than that is no folder of recordings, but a disk."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a row of a table of runs is about."""

    name: str
    """Its path from the folder that was given, with slashes; of several folders, with the name of that one before."""
    path: Path
    """Its folder, that of the first attempt."""
    attempts: tuple[Path, ...]
    """The folders of all attempts that have left something, in order; its own if there is one."""

    @property
    def newest(self) -> Path:
        """The folder of the newest attempt."""
        return self.attempts[-1]

    @property
    def newest_name(self) -> str:
        """Under which the newest attempt is found."""
        return f"{self.name}/{self.newest.name}" if self.newest != self.path else self.name


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """The runs of some folders."""

    runs: tuple[Run, ...] = ()
    left_out: tuple[str, ...] = ()
    """What was not looked into, and why: a sentence each, without a full stop."""
    _paths: Mapping[str, Path] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paths = {run.name: run.path for run in self.runs}
        paths |= {f"{run.name}/{path.name}": path for run in self.runs for path in run.attempts if path != run.path}
        object.__setattr__(self, "_paths", paths)

    def path_of(self, name: str) -> Path | None:
        """The folder of a run, or of one of its attempts; None if none is called that.

        A name is only looked up, and never made into a path: no name leads out of the folders.
        """
        return self._paths.get(name)


def is_run(folder: Path) -> bool:
    """Whether a folder is itself a recording, or holds dumps."""
    try:
        with os.scandir(folder) as entries:
            if any(_is_of_a_rank(entry.name) and entry.is_dir() for entry in entries):
                return True
    except OSError:
        return False
    return holds_dumps(folder)


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """All runs in some folders, by name. A folder that is not there holds none.

    Args:
        folders: each may also be a run itself, which is called as the folder is.
    """
    left_out: list[str] = []
    runs: dict[Path, Run] = {}
    for folder, label in zip(folders, _labels(folders), strict=True):
        root = folder.resolve()
        prefix = f"{label}/" if len(folders) > 1 else ""
        for path in _run_folders(root, left_out):
            name = label if path == root else prefix + path.relative_to(root).as_posix()
            later = (each for each in attempts_in(path) if each == path or not _has_link_out(root, each))
            runs.setdefault(path, Run(name=name, path=path, attempts=tuple(later) or (path,)))
    return FoundRuns(runs=tuple(sorted(runs.values(), key=lambda run: run.name)), left_out=tuple(left_out))


def _labels(folders: Sequence[Path]) -> list[str]:
    """What the folders are called, each differently."""
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
        if looked_into > MOST_FOLDERS:
            left_out.append(f"{root}: holds more than {MOST_FOLDERS:,} folders; the others are not looked into")
            return
        try:
            with os.scandir(folder) as found:
                entries = [entry for entry in found if entry.is_dir()]
        except FileNotFoundError:  # not there yet, or no longer
            continue
        except OSError as error:
            left_out.append(f"{folder}: can't be read ({error.strerror})")
            continue
        outside = [entry.name for entry in entries if entry.is_symlink() and not _is_in(root, folder / entry.name)]
        left_out += [f"{folder / name}: a link out of {root}, which is not followed" for name in outside]
        own = [entry.name for entry in entries if _is_of_a_recording(entry.name)]
        if not set(own) & set(outside) and (_is_begun(folder, own) or holds_dumps(folder)):
            yield folder
        inner = [folder / entry.name for entry in entries if not entry.is_symlink() and not _is_part(entry.name)]
        if depth < DEEPEST:
            waiting += [(path, depth + 1) for path in inner]
        elif inner:
            left_out.append(f"{folder}: {DEEPEST} levels deep; folders in it are not looked into")


def _is_begun(folder: Path, own: Sequence[str]) -> bool:
    """Whether a rank has a folder in it, or has left something in a later attempt.

    Args:
        own: names of the folders of ranks and of attempts.
    """
    return any(map(_is_of_a_rank, own)) or (bool(own) and bool(attempts_in(folder)))


def _is_of_a_rank(name: str) -> bool:
    return name.startswith("rank_") and name.removeprefix("rank_").isdecimal()


def _is_of_a_recording(name: str) -> bool:
    return _is_of_a_rank(name) or (name.startswith("restart_") and name.removeprefix("restart_").isdecimal())


def _is_part(name: str) -> bool:
    """Whether a folder of this name belongs to a recording, or is hidden."""
    return _is_of_a_recording(name) or name in (TABLES_FOLDER, WATCHDOG_FOLDER) or name.startswith(".")


def _has_link_out(root: Path, attempt: Path) -> bool:
    return any(path.is_symlink() and not _is_in(root, path) for path in (attempt, *attempt.glob("rank_*")))


def _is_in(root: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(root)

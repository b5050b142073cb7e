"""Rank folders of a recording, and readers of the small JSON files in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.checksum import has_checksum, parse_json_text
from overlapscope.trace.format import ENDED_FILE, EVENTS_FILE, GROUP_PATTERN, MANIFEST_FILE, POINT_TO_POINT_PATTERN
from overlapscope.trace.log import Problem

Row = TypeVar("Row")

_MOST_RANKS: Final = 1_000_000
"""Larger world sizes are treated as damage."""


def find_rank_folders(path: Path) -> dict[int, Path]:
    """Return the rank folders of a recording, by rank.

    Raises:
        OverlapScopeError: no such folder, or no recording in it.
    """
    try:
        return _rank_folders_in(path)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None


def _rank_folders_in(path: Path) -> dict[int, Path]:
    if not path.exists():
        raise OverlapScopeError(
            f"{path}: no such folder; record one with 'overlapscope record -o {path} -- torchrun ...'"
        )
    if not path.is_dir():
        raise OverlapScopeError(f"{path}: this is a file; give the folder that 'overlapscope record -o' wrote")
    found = {}
    for folder in path.glob("rank_*"):
        number = folder.name.removeprefix("rank_")
        if number.isdecimal() and folder.is_dir():
            found[int(number)] = folder
    if found:
        return dict(sorted(found.items()))
    runs = sorted({folder.parent.name for folder in path.glob("*/rank_*") if folder.is_dir()})
    if runs:
        raise OverlapScopeError(f"{path}: holds {len(runs)} recordings; give one of them: {', '.join(runs[:5])}")
    if (path / EVENTS_FILE).exists() or any(path.glob(GROUP_PATTERN)):
        raise OverlapScopeError(f"{path}: this is the folder of one rank; give its parent, {path.resolve().parent}")
    what = "not a recording (no rank_0, rank_1 ... in it)" if any(path.iterdir()) else "empty"
    raise OverlapScopeError(f"{path}: {what}; record a run with 'overlapscope record -o FOLDER -- torchrun ...'")


def has_collective_logs(folder: Path) -> bool:
    """Return whether a rank left a collective log, if only of sends and receives, as a parameter server does."""
    return any(next(folder.glob(pattern), None) for pattern in (GROUP_PATTERN, POINT_TO_POINT_PATTERN))


def has_finished_recording(folder: Path) -> bool:
    """Return whether a rank has finished recording, so that nothing more will be written."""
    return (folder / ENDED_FILE).exists() or (folder / MANIFEST_FILE).exists()


def parse_expected_ranks(run: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks that train together, according to one rank's ``run.json``."""
    ranks = run.get("ranks")
    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
        return tuple(ranks)
    return ranks_in_world(run.get("world_size", 0))


def read_import_source(run: dict[str, Any]) -> str | None:
    """Return the tool whose traces were converted to this recording; None if it was recorded."""
    imported = run.get("imported")
    return str(imported.get("from", "another tool")) if isinstance(imported, dict) else None


def ranks_in_world(size: object) -> tuple[int, ...]:
    """Return all ranks of a job of this size; none if the size is not plausible."""
    return tuple(range(size)) if isinstance(size, int) and size <= _MOST_RANKS else ()


def read_json(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Read the JSON object in a small file; return an empty one and add a problem if it can't be read."""
    try:
        content = parse_json_text(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.append(_unreadable(path, error))
        return {}
    if not isinstance(content, dict):
        problems.append(Problem("error", f"{path}: damaged; it does not hold a JSON object"))
        return {}
    return content


def _unreadable(path: Path, error: OSError | ValueError) -> Problem:
    reason = error.strerror if isinstance(error, OSError) else error
    return Problem("error", f"{path}: can't be read ({reason})")


def read_lines(path: Path, problems: list[Problem], rows_of: Callable[[Any], Iterable[Row]]) -> list[Row]:
    """Read the rows of a JSON Lines file, skipping damaged lines; a truncated last line is skipped silently.

    Args:
        rows_of: returns the rows of one line's content.
    """
    return read_checked_lines(path, problems, lambda content, _: rows_of(content))


def read_checked_lines(path: Path, problems: list[Problem], rows_of: Callable[[Any, bool], Iterable[Row]]) -> list[Row]:
    """Read rows as ``read_lines`` does, where it matters whether a line has a (verified) checksum.

    Args:
        rows_of: returns the rows of one line's content, given also whether the line has a checksum.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(_unreadable(path, error))
        return []
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += rows_of(parse_json_text(line), has_checksum(line)) if line else ()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if number < len(lines):  # after the last line end there is nothing
                problems.append(Problem("error", f"{path}: line {number} is damaged and skipped"))
    return rows

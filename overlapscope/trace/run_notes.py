"""Tags and a note that users attach to a run: ``notes.json`` next to its rank folders.

It may be edited by hand, so it has no checksum, which an edit would invalidate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError

NOTES_FILE: Final = "notes.json"
MAX_TAGS: Final = 20
MAX_TAG_LENGTH: Final = 40
MAX_NOTE_LENGTH: Final = 10_000
_MOST_BYTES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RunNotes:
    """Tags and a note of a run."""

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

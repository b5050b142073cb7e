"""Manifest of a rank's files, ``manifest.json``: written last, so all listed files must exist with the listed content.

It holds the size and CRC-32 of each file; logs have checksums of their own entries instead. There is none if the rank
was killed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any
from zlib import crc32

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.collective_log import CollectiveLogHeader
from overlapscope.trace.json_files import read_json, write_json
from overlapscope.trace.regular_file import open_regular_file, parse_once, read_regular_file
from overlapscope.trace.schema import EVENTS_FILE, HEADER_BYTES, MANIFEST_FILE, LogHeader, find_file_kind


def write_manifest(folder: Path) -> None:
    """Write the manifest of a rank's files."""
    with suppress(OSError):  # a full disk, or the folder was deleted
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and find_file_kind(path.name) is not None]
        # A log that could not be closed is not listed.
        listed = [path for path in files if not _is_ring(path.name) or _is_closed(path)]
        marks = {path.name: _describe_file(path) for path in listed if path.name != MANIFEST_FILE}
        write_json(folder / MANIFEST_FILE, {"files": marks})


class Manifest:
    """Manifest of a rank; empty if there is none, so that nothing is verified.

    Args:
        folder: folder of the rank.
        problems: receives problems with the manifest.
    """

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self._folder = folder
        content = read_json(folder / MANIFEST_FILE, problems) if (folder / MANIFEST_FILE).exists() else {}
        files = content.get("files")
        listed: dict[str, Any] = files if isinstance(files, dict) else {}
        self.files = {name: mark for name, mark in listed.items() if _is_in_a_folder(name)}
        """What it says of each file."""
        if len(self.files) < len(listed):
            problems.append(
                Problem("error", f"{folder / MANIFEST_FILE}: damaged; it lists files outside of its folder")
            )

    def is_damaged(self, name: str) -> bool:
        """Return whether a listed file is missing, truncated or changed."""
        return name in self.files and self._find_damage(name) is not None

    def report(self, problems: list[Problem]) -> None:
        """Report listed files that are missing or changed, unless they already have a problem."""
        damaged = parse_once("damaged files", self._folder, self._find_damaged)
        reported_paths = {problem.message.partition(": ")[0] for problem in problems} if damaged else set()
        problems += [
            Problem("error", f"{path}: {damage}") for path, damage in damaged.items() if path not in reported_paths
        ]

    def _find_damaged(self) -> dict[str, str]:
        """Return what is wrong with listed files, by path."""
        found = ((name, self._find_damage(name)) for name in self.files)
        return {f"{self._folder}/{name}": damage for name, damage in found if damage is not None}

    def _find_damage(self, name: str) -> str | None:
        path, mark = self._folder / name, self.files[name]
        try:
            found, listed_size = path.stat(), mark["bytes"]
            size = found.st_size
            if not S_ISREG(found.st_mode):  # reading a pipe would block
                return "not a file"
            if size < listed_size:
                return f"cut short at offset {size}; it had {listed_size} bytes"
            if _is_ring(name) and (size > listed_size or not _is_closed(path)):
                return "an older copy, from before the log was closed"
            # Data appended later, such as the stacks of a process that crashes at the end, is no damage.
            if "crc32_of_bytes" in mark and _crc32(path, listed_size) != mark["crc32_of_bytes"]:
                return "damaged since it was written (its checksum is wrong)"
        except FileNotFoundError:
            return "missing; it was present when the recording was complete"
        except OSError as error:
            return f"can't be read ({error.strerror})"
        except (KeyError, TypeError, ValueError):
            return f"{MANIFEST_FILE} is damaged: it gives no valid size of this file"
        return None


def _is_in_a_folder(name: str) -> bool:
    """Return whether this is a plain file name, and not a path that leads elsewhere."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _is_ring(name: str) -> bool:
    kind = find_file_kind(name)
    return kind is not None and kind.is_ring


def _is_closed(path: Path) -> bool:
    """Return whether a log is complete according to its header; a damaged header is reported by its readers."""
    unpack = LogHeader.unpack if path.name == EVENTS_FILE else CollectiveLogHeader.unpack
    try:
        with open_regular_file(path) as file:
            return unpack(file.read(HEADER_BYTES), path).closed
    except OverlapScopeError:
        return True


def _describe_file(path: Path) -> dict[str, int]:
    kind, mark = find_file_kind(path.name), {"bytes": path.stat().st_size}
    return mark if kind is not None and kind.is_log else mark | {"crc32_of_bytes": _crc32(path, mark["bytes"])}


def _crc32(path: Path, size: int) -> int:
    if size < 0:
        raise ValueError(size)
    return crc32(read_regular_file(path)[:size])

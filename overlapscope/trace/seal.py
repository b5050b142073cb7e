"""The list of a rank's files, written when nothing more will come: ``sealed.json``. What it promises must be there.

It holds how long each file was, and its CRC-32; logs have checksums of their own. A rank that was killed, or whose
recording is older, has none.
"""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final
from zlib import crc32

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import read_json
from overlapscope.trace.format import (
    EVENTS_FILE,
    GROUP_PATTERN,
    HEADER_BYTES,
    POINT_TO_POINT_PATTERN,
    SEAL_FILE,
    LogHeader,
    write_json,
)
from overlapscope.trace.group_log import GroupHeader
from overlapscope.trace.log import Problem

_LOG: Final = ".log"
_DRAFT: Final = ".part"


def seal(folder: Path) -> None:
    """Write down what a rank has left."""
    with suppress(OSError):  # a full disk, or somebody has removed the folder
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != _DRAFT]
        # Of a log that could not be closed nothing is promised.
        promised = [path for path in files if not _is_ring(path.name) or _is_closed(path)]
        marks = {path.name: _mark(path) for path in promised if path.name != SEAL_FILE}
        write_json(folder / SEAL_FILE, {"files": marks})


class Seal:
    """What was there when a rank's recording was complete; nothing is promised without it.

    Args:
        folder: of the rank.
        problems: takes what is wrong with it.
    """

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self._folder = folder
        content = read_json(folder / SEAL_FILE, problems) if (folder / SEAL_FILE).exists() else {}
        files = content.get("files")
        listed: dict[str, Any] = files if isinstance(files, dict) else {}
        self._files = {name: mark for name, mark in listed.items() if _is_in_a_folder(name)}
        if len(self._files) < len(listed):
            problems.append(Problem("error", f"{folder / SEAL_FILE}: damaged; it lists what can't be in its folder"))

    def is_broken(self, name: str) -> bool:
        """Whether a file is not what it was."""
        return name in self._files and self._damage(name) is not None

    def report(self, problems: list[Problem]) -> None:
        """Name the files that are not what they were, unless something is said of them already."""
        said = {problem.message.partition(": ")[0] for problem in problems}
        for name in self._files:
            path = self._folder / name
            if str(path) not in said and (damage := self._damage(name)) is not None:
                problems.append(Problem("error", f"{path}: {damage}"))

    def _damage(self, name: str) -> str | None:
        path, mark = self._folder / name, self._files[name]
        try:
            found, promised = path.stat(), mark["bytes"]
            size = found.st_size
            if not S_ISREG(found.st_mode):  # reading a pipe would wait
                return "not a file"
            if size < promised:
                return f"cut short at offset {size}; it had {promised} bytes"
            if _is_ring(name) and (size > promised or not _is_closed(path)):
                return "from before the recording was complete; the log was closed later"
            # What came later, as the stacks of a process that crashes in the end, is no damage.
            if "crc32_of_bytes" in mark and _crc32(path, promised) != mark["crc32_of_bytes"]:
                return "damaged since it was written (its checksum is wrong)"
        except FileNotFoundError:
            return "missing; it was there when the recording was complete"
        except OSError as error:
            return f"can't be read ({error.strerror})"
        except (KeyError, TypeError, ValueError):
            return f"what {SEAL_FILE} says of it makes no sense"
        return None


def _is_in_a_folder(name: str) -> bool:
    """Whether this is a name, and no path that leads elsewhere."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name


def _is_ring(name: str) -> bool:
    return name == EVENTS_FILE or fnmatch(name, GROUP_PATTERN) or fnmatch(name, POINT_TO_POINT_PATTERN)


def _is_closed(path: Path) -> bool:
    """Whether a log is complete, by its header; of a damaged header its readers speak."""
    unpack = LogHeader.unpack if path.name == EVENTS_FILE else GroupHeader.unpack
    try:
        with path.open("rb") as file:
            return unpack(file.read(HEADER_BYTES), path).closed
    except OverlapScopeError:
        return True


def _mark(path: Path) -> dict[str, int]:
    mark = {"bytes": path.stat().st_size}
    return mark if path.suffix == _LOG else mark | {"crc32_of_bytes": _crc32(path, mark["bytes"])}


def _crc32(path: Path, size: int) -> int:
    if size < 0:
        raise ValueError(size)
    with path.open("rb") as file:
        return crc32(file.read(size))

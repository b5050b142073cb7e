"""The list of a rank's files, written when nothing more will come: ``sealed.json``. What it promises must be there.

It holds how long each file was, and its CRC-32; logs have checksums of their own. A rank that was killed, or whose
recording is older, has none.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from overlapscope.trace.folders import read_json
from overlapscope.trace.format import SEAL_FILE, write_json
from overlapscope.trace.log import Problem

_LOG: Final = ".log"
_DRAFT: Final = ".part"


def seal(folder: Path) -> None:
    """Write down what a rank has left."""
    with suppress(OSError):  # a full disk, or somebody has removed the folder
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != _DRAFT]
        marks = {path.name: _mark(path) for path in files if path.name != SEAL_FILE}
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
        self._files: dict[str, Any] = files if isinstance(files, dict) else {}

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
            size = path.stat().st_size
            if size < mark["bytes"]:
                return f"cut short at offset {size}; it had {mark['bytes']} bytes"
            # What came later, as the stacks of a process that crashes in the end, is no damage.
            if "crc32_of_bytes" in mark and _crc32(path, mark["bytes"]) != mark["crc32_of_bytes"]:
                return "damaged since it was written (its checksum is wrong)"
        except FileNotFoundError:
            return "missing; it was there when the recording was complete"
        except OSError as error:
            return f"can't be read ({error.strerror})"
        except (KeyError, TypeError):
            return f"what {SEAL_FILE} says of it makes no sense"
        return None


def _mark(path: Path) -> dict[str, int]:
    mark = {"bytes": path.stat().st_size}
    return mark if path.suffix == _LOG else mark | {"crc32_of_bytes": _crc32(path, mark["bytes"])}


def _crc32(path: Path, size: int) -> int:
    return crc32(path.read_bytes()[:size])

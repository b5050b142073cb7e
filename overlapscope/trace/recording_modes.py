"""Recording modes: what ranks record of each step, and how users change that while a job runs.

``control.json`` in the folder of an attempt lists the modes that ``overlapscope control`` has asked for, each from one
step on. Ranks look at it between steps; as the list is the same for all, they switch at the same step without a word.
Each rank notes the modes that it has begun in ``modes.jsonl`` in its own folder, unless it has been in the default one
from the beginning.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.environment import DEFAULT_EVERY, DETAILS, Detail
from overlapscope.trace.json_files import dump_json_line, from_dict, parse_json_text, read_dataclasses, write_json
from overlapscope.trace.regular_file import read_regular_file
from overlapscope.trace.schema import CONTROL_FILE, MODES_FILE

OFF: Final = 0
"""``every`` of a mode that records nothing."""

_MAX_MODES: Final = 64
"""Maximum number of modes in ``control.json``; the oldest, which no rank needs any more, are dropped."""


@dataclass(frozen=True, kw_only=True)
class RecordingMode:
    """What is recorded of the steps from one on."""

    from_step: int
    every: int = DEFAULT_EVERY
    """One in this many steps is recorded in full, see ``is_full_step``. The others are light; with ``OFF`` nothing is
    recorded."""
    detail: Detail = DETAILS[0]


@dataclass(frozen=True, kw_only=True)
class BegunMode:
    """A mode that a rank has begun, a line of ``modes.jsonl``."""

    step: int
    """First step that was recorded so."""
    agreed_step: int
    """Step from which ranks were asked to. If it is before ``step``, this rank has seen the request late."""
    every: int
    """As in ``RecordingMode``."""
    detail: Detail
    time_ns: int
    """Time at which the step began, on the host clock."""

    def to_json(self) -> str:
        """Serialize a line, with its line end."""
        return dump_json_line(asdict(self))


_MIX: Final = 0x9E3779B1
"""The golden ratio as 32 bits, odd: multiplied by it, the upper bits depend on all bits of a number."""


def is_full_step(step: int, every: int) -> bool:
    """Return whether a step is recorded in full: one in each ``every``.

    Which of them changes as if by chance, the same on all ranks: loops log, evaluate and save every so many steps, and
    would do so in all steps of a sample that is taken every so many, or in none.

    Args:
        step: number of the step since the process has begun.
        every: as in ``RecordingMode``.
    """
    if every <= 1:
        return every != OFF
    block, position = divmod(step, every)
    # The checksum alone is linear in its bits: along some periods it would be even more often than odd.
    return position == (zlib.crc32(block.to_bytes(8, "little")) * _MIX >> 24) % every


def read_control(path: Path) -> list[RecordingMode]:
    """Return the modes that an attempt's ranks were asked for, by their first step.

    Args:
        path: ``control.json``; a missing file asks for nothing.

    Raises:
        OverlapScopeError: it can't be read, or is damaged.
    """
    try:
        found = [from_dict(RecordingMode, mode) for mode in parse_json_text(read_regular_file(path))["modes"]]
        if any(mode.every < 0 or mode.detail not in DETAILS for mode in found):
            raise ValueError
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OverlapScopeError(f"{path}: damaged; remove it") from None
    return sorted(found, key=lambda mode: mode.from_step)


def write_control(folder: Path, asked: Sequence[RecordingMode], mode: RecordingMode) -> None:
    """Ask the ranks of an attempt for another mode, in place of those that were to begin at the same step or later.

    Args:
        asked: from ``read_control``.

    Raises:
        OverlapScopeError: the file can't be written.
    """
    modes = [*(one for one in asked if one.from_step < mode.from_step), mode][-_MAX_MODES:]
    try:
        write_json(folder / CONTROL_FILE, {"modes": [asdict(one) for one in modes]})
    except OSError as error:
        raise OverlapScopeError(f"{folder / CONTROL_FILE}: can't be written ({error.strerror})") from None


def read_begun_modes(folder: Path, problems: list[Problem]) -> tuple[BegunMode, ...]:
    """Return the modes that a rank has noted, in order; none if it has been in the default one so far."""
    return read_dataclasses(BegunMode, folder / MODES_FILE, problems)

"""Reader of ``machine.jsonl``: which sources of facts a rank uses, and what it has sampled of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from overlapscope.errors import Problem
from overlapscope.trace.json_files import read_lines
from overlapscope.trace.machine_facts import iter_facts
from overlapscope.trace.schema import MACHINE_FILE


class MachineReading(NamedTuple):
    """A fact that was read."""

    time_ns: int
    since_ns: int
    """When the source was sampled before: what a counter counts happened since."""
    source: str
    name: str
    """One of ``machine_facts.FACTS``; readers ignore others. Empty: nothing had changed."""
    value: float


class MachineSource(NamedTuple):
    """A source that a rank uses, whoever samples it; or facts that could not be read."""

    source: str
    """Its name; just its kind if it could not be opened."""
    label: str
    facts: str
    """Names of facts that can't be read, ``a, b``; ``all``; or empty."""
    why: str
    """Why they can't be read."""


@dataclass(frozen=True, kw_only=True)
class MachineLog:
    """Content of the file of one rank."""

    sources: tuple[MachineSource, ...] = ()
    readings: tuple[MachineReading, ...] = ()


_MOST_NS: Final = 2**62
_FIRST_LINES: Final = 64
"""Number of lines in which all sources are introduced and read for the first time."""
_LATEST_LINES: Final = 512
_RARE: Final = tuple({f'"{fact.name}"'.encode() for _, fact in iter_facts() if fact.is_rare})


def read_machine_log(folder: Path, problems: list[Problem], *, latest_only: bool = False) -> MachineLog:
    """Read the file of a rank; empty if there is none.

    Args:
        problems: receives problems with the file.
        latest_only: True to read of a long file only its ends and rare facts, whatever its length.
    """
    names: dict[int, str] = {}
    rows = read_lines(
        folder / MACHINE_FILE,
        problems,
        lambda line: list(_parse_line(line, names)),
        _choose_lines if latest_only else None,
    )
    return MachineLog(
        sources=tuple(row for row in rows if isinstance(row, MachineSource)),
        readings=tuple(row for row in rows if isinstance(row, MachineReading)),
    )


def _choose_lines(lines: list[bytes]) -> list[int]:
    latest = max(_FIRST_LINES, len(lines) - _LATEST_LINES)
    return [
        index
        for index, line in enumerate(lines)
        if index < _FIRST_LINES or index >= latest or any(name in line for name in _RARE)
    ]


def _parse_line(line: Any, names: dict[int, str]) -> Iterator[MachineSource | MachineReading]:
    if "unreadable" in line:
        yield MachineSource(
            source=str(line["unreadable"]), label="", facts=", ".join(line.get("facts", ["all"])), why=str(line["why"])
        )
    elif "name" in line:
        names[int(line["source"])] = str(line["name"])
        yield MachineSource(source=str(line["name"]), label=str(line["label"]), facts="", why="")
    elif (source := names.get(int(line["source"]))) is not None:  # else the line that introduced it is lost
        time_ns, since_ns = int(line["time_ns"]), int(line["since_ns"])
        values = {str(name): float(value) for name, value in line["values"].items()}
        if max(abs(time_ns), abs(since_ns)) > _MOST_NS or not all(map(math.isfinite, values.values())):
            raise ValueError("no time, or no number")
        for name, value in (values or {"": 0.0}).items():
            yield MachineReading(time_ns=time_ns, since_ns=since_ns, source=source, name=name, value=value)

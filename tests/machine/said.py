"""What a machine said, made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlapscope.machine.readings import MachineReadings
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.machine_log import MachineReading, MachineSource
from overlapscope.trace.schema import MACHINE_FILE, rank_folder

S = 1_000_000_000
HOT, COOL = 0x20, 0


def counted(
    source: str, name: str, values: Sequence[float], *, begin_s: float = 0, every_s: float = 1
) -> list[MachineReading]:
    """A counter or level, read periodically."""
    times = [round((begin_s + number * every_s) * S) for number in range(len(values))]
    return [
        MachineReading(time_ns=at, since_ns=before, source=source, name=name, value=value)
        for at, before, value in zip(times, [times[0], *times[:-1]], values, strict=True)
    ]


def quota(source: str, shares: Sequence[float], **when: float) -> list[MachineReading]:
    """A control group that used up its quota of half a core in so many of the ten periods of each second."""
    throttled = [0.0]
    for share in shares:
        throttled.append(throttled[-1] + 10 * share)
    periods = [10.0 * number for number in range(len(throttled))]
    return [
        *counted(source, "cpu_periods", periods, **when),
        *counted(source, "cpu_throttled_periods", throttled, **when),
        *counted(source, "cpu_quota", [0.5], **when),
    ]


def gpu(source: str, limits: Sequence[int], **when: float) -> list[MachineReading]:
    """A GPU whose clock is held down in some of the seconds, for the reasons given."""
    clocks = [1200.0 if limit else 1950.0 for limit in limits]
    return [
        *counted(source, "clock_limits", [*map(float, limits), 0.0], **when),
        *counted(source, "sm_clock_mhz", [*clocks, 1950.0], **when),
        *counted(source, "temperature_c", [88.0 if limit else 61.0 for limit in limits], **when),
        *counted(source, "max_sm_clock_mhz", [1980.0], **when),
    ]


def readings(rows: Sequence[MachineReading], uses: dict[int, Sequence[str]]) -> MachineReadings:
    """The readings of a job whose ranks use these sources."""
    sources = {
        rank: [MachineSource(source=name, label=name.split()[0], facts="", why="") for name in names]
        for rank, names in uses.items()
    }
    return MachineReadings(rows, sources)


def write_machine(folder: Path, rank: int, rows: Sequence[MachineReading], uses: Sequence[str] = ()) -> None:
    """Write the file of a rank, as the sampler does."""
    names = list(dict.fromkeys([*uses, *(row.source for row in rows)]))
    lines: list[dict[str, object]] = [
        {"time_ns": 0, "source": number, "name": name, "label": name.split()[0]} for number, name in enumerate(names, 1)
    ]
    lines += [
        {
            "time_ns": row.time_ns,
            "since_ns": row.since_ns,
            "source": names.index(row.source) + 1,
            "values": {row.name: row.value},
        }
        for row in sorted(rows)
    ]
    (rank_folder(folder, rank) / MACHINE_FILE).write_text("".join(map(dump_json_line, lines)))

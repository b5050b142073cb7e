"""Facts about machines that ranks sample while they train: what they are called, and how each one counts.

A fact belongs to a *source*: a device, a control group, a host, an interface. A source is named by its kind and what is
unique about it, ``gpu GPU-4f1c...`` or ``net 1f3a9c2b eth0``, so that ranks that use the same one name it alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

FactKind = Literal["level", "counter", "event"]
"""A level holds until the next reading; a counter only grows; an event is a row of its own."""

GPU: Final = "gpu"
CONTROL_GROUP: Final = "cgroup"
HOST: Final = "host"
PROCESS: Final = "process"
INTERFACE: Final = "net"
INFINIBAND: Final = "ib"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A fact about sources of one kind."""

    name: str
    meaning: str
    kind: FactKind = "level"
    is_rare: bool = False
    """True if every change of it is worth a word, however long ago it was."""
    resolution: float = 0.0
    """A reading is written if it differs from the last written one by more than this."""


def _counter(name: str, meaning: str, resolution: float = 0.0) -> Fact:
    return Fact(name=name, meaning=meaning, kind="counter", resolution=resolution)


def _event(name: str, meaning: str) -> Fact:
    return Fact(name=name, meaning=meaning, kind="event", is_rare=True)


def _rare(name: str, meaning: str) -> Fact:
    return Fact(name=name, meaning=meaning, kind="counter", is_rare=True)


_MB: Final = 1024.0**2
_PRESSURE_US: Final = 10_000.0
"""A hundredth of a second: the least stall between two samples that is written."""

_PRESSURES: Final = (
    _counter("cpu_pressure_us", "time in which some task was waiting for a core", _PRESSURE_US),
    _counter("memory_pressure_us", "time in which some task was waiting for memory", _PRESSURE_US),
    _counter("io_pressure_us", "time in which some task was waiting for I/O", _PRESSURE_US),
)

FACTS: Final[dict[str, tuple[Fact, ...]]] = {
    GPU: (
        Fact(name="sm_clock_mhz", meaning="clock of the multiprocessors", resolution=10.0),
        Fact(name="max_sm_clock_mhz", meaning="its maximum"),
        Fact(name="clock_limits", meaning="what holds the clock down: NVML's reasons, a bit each"),
        Fact(name="temperature_c", meaning="temperature of the GPU", resolution=1.0),
        Fact(name="power_w", meaning="power", resolution=10.0),
        Fact(name="power_cap_w", meaning="power cap that is enforced"),
        Fact(name="default_power_cap_w", meaning="power cap that the GPU was made for"),
        _counter("thermal_limited_ns", "time in which the clock was held down by heat"),
        _counter("power_limited_ns", "time in which the clock was held down by the power cap"),
        _counter("ecc_corrected", "memory errors that were corrected since the driver was loaded"),
        _rare("ecc_uncorrected", "memory errors that could not be"),
        Fact(name="pcie_width", meaning="lanes of the PCIe link in use"),
        Fact(name="max_pcie_width", meaning="lanes that it has"),
        _counter("pcie_replays", "PCIe packets that were sent again"),
        Fact(name="nvlinks_active", meaning="NVLinks that are up"),
        Fact(name="nvlinks", meaning="NVLinks that the GPU has"),
        _counter("nvlink_errors", "NVLink replays, recoveries and CRC errors"),
        _event("xid", "the driver reported an error of this number"),
        _event("lost", "the GPU no longer answers"),
    ),
    CONTROL_GROUP: (
        Fact(name="cpu_quota", meaning="cores that the group may use"),
        _counter("cpu_periods", "scheduling periods in which it ran"),
        _counter("cpu_throttled_periods", "those in which it used up its quota and was stopped"),
        Fact(name="memory_bytes", meaning="memory in use", resolution=64 * _MB),
        Fact(name="memory_peak_bytes", meaning="the most so far", resolution=16 * _MB),
        Fact(name="memory_limit_bytes", meaning="the limit"),
        Fact(name="swap_bytes", meaning="memory in swap", resolution=16 * _MB),
        _counter("memory_limit_hits", "times that the limit was reached"),
        _rare("oom_kills", "processes that the kernel killed for memory"),
        *_PRESSURES,
    ),
    HOST: (
        *_PRESSURES,
        Fact(name="swap_used_bytes", meaning="memory in swap", resolution=64 * _MB),
        _counter("swapped_pages", "pages that were moved to swap or back", 256.0),
        _rare("oom_kills", "processes that the kernel killed for memory"),
    ),
    PROCESS: (
        Fact(name="peak_memory_bytes", meaning="the most resident memory so far", resolution=16 * _MB),
        Fact(name="swapped_bytes", meaning="memory in swap", resolution=16 * _MB),
        _counter("queued_ns", "time in which the main thread was ready to run and had no core", 10e6),
    ),
    INTERFACE: (
        _counter("errors", "packets with errors"),
        _counter("drops", "packets that were dropped", 16.0),
        _rare("link_changes", "times that the link went up or down"),
        Fact(name="speed_mbit_per_s", meaning="speed of the link"),
    ),
    INFINIBAND: (
        _counter("errors", "symbol, receive and integrity errors, and recoveries of the link"),
        _rare("link_downs", "times that the link went down"),
        _counter("discards", "packets that were discarded"),
        _counter("retransmits", "packets out of sequence or not acknowledged in time"),
        Fact(name="rate_gbit_per_s", meaning="rate of the link"),
    ),
}
"""Facts by kind of source."""

SW_POWER_CAP: Final = 0x04
HW_SLOWDOWN: Final = 0x08
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80
"""Bits of ``clock_limits`` (``nvmlClocksEventReason*``)."""


def source_kind(source: str) -> str:
    """Return the kind of a source by its name."""
    return source.partition(" ")[0]


def find_fact(source: str, name: str) -> Fact | None:
    """Return a fact by its source and name; None if it is none that this version knows."""
    return next((fact for fact in FACTS.get(source_kind(source), ()) if fact.name == name), None)


def iter_facts() -> Iterator[tuple[str, Fact]]:
    """Yield each fact with its kind of source."""
    for kind, facts in FACTS.items():
        for fact in facts:
            yield kind, fact

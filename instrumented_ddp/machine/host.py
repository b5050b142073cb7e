"""What a host and this process say of themselves: pressure, swap, memory, network interfaces, InfiniBand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from instrumented_ddp.machine.source import KernelFiles, Roots, SourceLostError, read_pressure_us
from overlapscope.trace.machine_facts import HOST, INFINIBAND, INTERFACE, PROCESS

_KB: Final = 1024.0


class _FileSource:
    """A source whose facts are in files of the kernel."""

    def __init__(self, name: str, label: str, paths: Mapping[str, Path]) -> None:
        self.name = name
        self.label = label
        self._files = KernelFiles(paths)

    def take_events(self) -> tuple[tuple[str, float], ...]:
        """Return nothing: all of it is counted."""
        return ()

    def missing(self) -> dict[str, str]:
        """Return what this kernel or container does not show."""
        return {} if self._files.names else {"all": "none of its files can be read"}

    def close(self) -> None:
        """Close its files."""
        self._files.close()


class Host(_FileSource):
    """A source: pressure on cores, memory and I/O, and swap, of the whole host."""

    def __init__(self, roots: Roots, identity: str) -> None:
        pressures = {name: roots.proc / "pressure" / name for name in ("cpu", "memory", "io")}
        paths = pressures | {name: roots.proc / name for name in ("meminfo", "vmstat")}
        super().__init__(f"{HOST} {identity}", "host", paths)

    def read(self) -> dict[str, float]:
        """Return its facts."""
        found = {}
        for name in ("cpu", "memory", "io"):
            if (time_us := read_pressure_us(self._files.read(name))) is not None:
                found[f"{name}_pressure_us"] = time_us
        memory, counts = self._files.read_table("meminfo"), self._files.read_table("vmstat")
        if {"SwapTotal", "SwapFree"} <= memory.keys():
            found["swap_used_bytes"] = (memory["SwapTotal"] - memory["SwapFree"]) * _KB
        if {"pswpin", "pswpout"} <= counts.keys():
            found["swapped_pages"] = counts["pswpin"] + counts["pswpout"]
        if "oom_kill" in counts:
            found["oom_kills"] = counts["oom_kill"]
        return found


class Process(_FileSource):
    """A source: memory of this process, and how long its main thread waited for a core."""

    def __init__(self, roots: Roots, identity: str) -> None:
        process = roots.proc / str(os.getpid())
        paths = {"status": process / "status", "schedstat": process / "schedstat"}
        super().__init__(f"{PROCESS} {identity}", "process", paths)

    def read(self) -> dict[str, float]:
        """Return its facts."""
        status = self._files.read_table("status")
        names = (("VmHWM", "peak_memory_bytes"), ("VmSwap", "swapped_bytes"))
        found = {name: status[key] * _KB for key, name in names if key in status}
        times = self._files.read("schedstat").split()
        if len(times) > 1 and times[1].isdecimal():
            found["queued_ns"] = float(times[1])
        return found


class Interface(_FileSource):
    """A source: errors and drops of a network interface."""

    def __init__(self, folder: Path, identity: str) -> None:
        counters = {name: folder / "statistics" / name for name in (*_ERRORS, *_DROPS)}
        paths = counters | {name: folder / name for name in ("carrier_changes", "speed")}
        super().__init__(f"{INTERFACE} {identity} {folder.name}", folder.name, paths)

    def read(self) -> dict[str, float]:
        """Return its facts.

        Raises:
            SourceLostError: the interface was removed.
        """
        found = {"errors": self._sum(_ERRORS), "drops": self._sum(_DROPS)}
        if found["errors"] is None:
            raise SourceLostError("it was removed")
        found |= {"link_changes": self._files.read_number("carrier_changes")}
        if (speed := self._files.read_number("speed")) is not None and speed > 0:
            found["speed_mbit_per_s"] = speed
        return {name: value for name, value in found.items() if value is not None}

    def _sum(self, names: tuple[str, ...]) -> float | None:
        known = [value for name in names if (value := self._files.read_number(name)) is not None]
        return sum(known) if known else None


_ERRORS: Final = ("rx_errors", "tx_errors")
_DROPS: Final = ("rx_dropped", "tx_dropped")


class InfiniBandPort(_FileSource):
    """A source: counters of an InfiniBand or RoCE port.

    Args:
        folder: of the port, ``/sys/class/infiniband/mlx5_0/ports/1``.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        port = f"{folder.parent.parent.name}/{folder.name}"
        paths = {name: folder / "counters" / name for names in _IB_COUNTERS.values() for name in names}
        paths |= {name: folder / "hw_counters" / name for name in _IB_COUNTERS["retransmits"]}
        super().__init__(f"{INFINIBAND} {identity} {port}", port, paths | {"rate": folder / "rate"})

    def read(self) -> dict[str, float]:
        """Return its facts.

        Raises:
            SourceLostError: the port was removed.
        """
        found = {}
        for fact, names in _IB_COUNTERS.items():
            known = [value for name in names if (value := self._files.read_number(name)) is not None]
            if known:
                found[fact] = sum(known)
        if not found:
            raise SourceLostError("it was removed")
        rate = self._files.read("rate").split()
        if rate and rate[0].replace(".", "", 1).isdecimal():
            found["rate_gbit_per_s"] = float(rate[0])
        return found


_IB_COUNTERS: Final = {
    "errors": (
        "symbol_error",
        "link_error_recovery",
        "port_rcv_errors",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
    ),
    "link_downs": ("link_downed",),
    "discards": ("port_xmit_discards",),
    "retransmits": ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
}
"""Files of a port by the fact that they are added up to; those of the last are in ``hw_counters``."""


def iter_network_sources(roots: Roots, identity: str) -> Iterator[Interface | InfiniBandPort]:
    """Yield the network interfaces and InfiniBand ports that this process sees, but for the loopback."""
    for folder in _list_folder(roots.sys / "class/net"):
        if folder.name != "lo" and (folder / "statistics").is_dir():
            yield Interface(folder, identity)
    for device in _list_folder(roots.sys / "class/infiniband"):
        for port in _list_folder(device / "ports"):
            yield InfiniBandPort(port, identity)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

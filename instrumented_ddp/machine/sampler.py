"""Samples the machine while a rank trains, off its threads, and writes what has changed: ``machine.jsonl``.

Of ranks that share a host, a control group or a GPU, one samples it. Which one is settled by the kernel: the name of a
socket can be bound by one process at a time, and is free again when that one is gone, however it ended.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from instrumented_ddp.machine.control_group import ControlGroup, find_control_groups
from instrumented_ddp.machine.gpu import Gpu, GpuUnreadableError
from instrumented_ddp.machine.host import Host, Process, iter_network_sources
from instrumented_ddp.machine.source import Roots, Source, SourceLostError
from overlapscope.trace.clocks import get_boot_id, host_now_ns
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.machine_facts import GPU, Fact, find_fact
from overlapscope.trace.schema import MACHINE_FILE

_MIN_INTERVAL_S: Final = 1.0
_MAX_INTERVAL_S: Final = 10.0
_INTERVALS_PER_RUN: Final = 1000
"""The interval grows to a thousandth of the time so far: a day has ten thousand samples, ten minutes six hundred."""


class MachineSampler:
    """Samples the sources that this rank uses and no other rank samples; a ``PeriodicTask`` of a thread of its own.

    Args:
        folder: folder of the rank.
        roots: where the kernel's files are.
    """

    name = "machine sampling"

    def __init__(self, folder: Path, roots: Roots | None = None) -> None:
        self._folder = folder
        self._roots = Roots() if roots is None else roots
        self._begun_ns = host_now_ns()
        self._device: torch.device | None = None
        self._sampled: list[_SampledSource] | None = None

    def use_device(self, device: torch.device) -> None:
        """Sample the device on which this rank computes, too, from the next sample on."""
        if device.type == "cuda":
            self._device = device

    def run(self) -> float:
        """Write a sample, and return the interval to the next one in seconds."""
        self._write_sample()
        elapsed_s = (host_now_ns() - self._begun_ns) / 1e9
        return min(max(elapsed_s / _INTERVALS_PER_RUN, _MIN_INTERVAL_S), _MAX_INTERVAL_S)

    def end(self) -> None:
        """Write the last sample."""
        self._write_sample(is_last=True)
        for sampled in self._sampled or ():
            sampled.close()

    def _write_sample(self, *, is_last: bool = False) -> None:
        lines: list[Mapping[str, Any]] = []
        if self._sampled is None:
            self._sampled = []
            lines += self._add(self._find_sources)
        if self._device is not None:
            device, self._device = self._device, None
            lines += self._add(lambda: [Gpu(device)])
        for sampled in self._sampled:
            lines += sampled.sample(is_last=is_last)
        if lines:
            # A full disk costs this sample; the training and the next one go on.
            with suppress(OSError), (self._folder / MACHINE_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(map(dump_json_line, lines)))

    def _add(self, find: Callable[[], Iterable[Source]]) -> list[Mapping[str, Any]]:
        """Add sources, and return the lines that introduce them."""
        assert self._sampled is not None
        begun = len(self._sampled)
        try:
            for source in find():
                self._sampled.append(_SampledSource(source, len(self._sampled) + 1, self._folder.parent))
        except GpuUnreadableError as error:
            return [{"time_ns": host_now_ns(), "unreadable": GPU, "why": str(error)}]
        return [sampled.introduction for sampled in self._sampled[begun:]]

    def _find_sources(self) -> list[Source]:
        groups = find_control_groups(self._roots)
        network = self._identify("net")
        found: list[Source] = [
            Process(self._roots, self._identify("pid", str(os.getpid()))),
            Host(self._roots, self._identify()),
            *iter_network_sources(self._roots, network),
        ]
        if groups:
            found.insert(1, ControlGroup(groups, self._identify("cgroup", *map(str, groups.values()))))
        return found

    def _identify(self, namespace: str = "", *more: str) -> str:
        """Return what tells this host, or a namespace of it, from others, in eight letters."""
        parts = [get_boot_id() or socket.gethostname(), *more]
        if namespace:
            with suppress(OSError):
                parts.append(str((Path("/proc/self/ns") / namespace).readlink()))
        return hashlib.blake2s(" ".join(parts).encode(), digest_size=4).hexdigest()


class _SampledSource:
    """A source and what was written of it.

    Args:
        number: number of the source in the file.
        job: folder of the attempt, the same for all ranks that may sample this source.
    """

    def __init__(self, source: Source, number: int, job: Path) -> None:
        self._source: Source | None = source
        self._name = source.name
        self._number = number
        self._claim = Claim(f"{job.absolute()} {source.name}")
        self._written: dict[str, float] = {}
        self._last_ns: int | None = None
        self._told: set[str] = set()
        self.introduction: dict[str, Any] = {
            "time_ns": host_now_ns(),
            "source": number,
            "name": source.name,
            "label": source.label,
        }

    def sample(self, *, is_last: bool) -> list[dict[str, Any]]:
        """Return the lines of a sample: what has changed, and of the last one also that nothing has.

        Each rank reads a source once, when it begins: should it go on with it after the end of another rank, it sees
        what has happened since, such as why that rank has ended.
        """
        if self._source is None or not (self._claim.is_held() or self._last_ns is None):
            return []
        since_ns, self._last_ns = self._last_ns, host_now_ns()
        line = {"time_ns": self._last_ns, "since_ns": since_ns or self._last_ns, "source": self._number}
        try:
            read = self._source.read()
        except SourceLostError as error:
            self._told.clear()
            return [*self._list_events(line), *self._lose(str(error))]
        changed = {name: value for name, value in read.items() if self._has_changed(name, value)}
        self._written |= changed
        lines = [line | {"values": changed}] if changed or is_last else []
        return [*lines, *self._list_events(line), *self._list_missing()]

    def close(self) -> None:
        """Give the source back."""
        self._claim.close()
        if self._source is not None:
            source, self._source = self._source, None
            source.close()

    def _has_changed(self, name: str, value: float) -> bool:
        fact: Fact | None = find_fact(self._name, name)
        last = self._written.get(name)
        return last is None or abs(value - last) > (0.0 if fact is None else fact.resolution)

    def _list_events(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._source is not None
        return [line | {"values": {name: value}} for name, value in self._source.take_events()]

    def _list_missing(self) -> list[dict[str, Any]]:
        """Return a line for each reason why facts are missing, with their names, once."""
        assert self._source is not None
        new = {name: why for name, why in self._source.missing().items() if name not in self._told}
        self._told |= new.keys()
        reasons: dict[str, list[str]] = {}
        for name, why in new.items():
            reasons.setdefault(why, []).append(name)
        return [self._unreadable(why, names) for why, names in reasons.items()]

    def _lose(self, why: str) -> list[dict[str, Any]]:
        line = self._unreadable(why, ["all"])
        self.close()
        return [line]

    def _unreadable(self, why: str, names: list[str]) -> dict[str, Any]:
        return {"time_ns": host_now_ns(), "unreadable": self._name, "facts": names, "why": why}


class Claim:
    """The right to sample a source, held by one process at a time of those that share a network namespace."""

    def __init__(self, what: str) -> None:
        self._address = f"\0overlapscope-{hashlib.blake2s(what.encode(), digest_size=16).hexdigest()}"
        self._socket: socket.socket | None = None

    def is_held(self) -> bool:
        """Take the right if it is free, and return whether this process has it. True where nothing can be claimed."""
        if self._socket is not None:
            return True
        try:
            taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            return True
        try:
            taken.bind(self._address)
        except OSError:  # another rank has it
            taken.close()
            return False
        self._socket = taken
        return True

    def close(self) -> None:
        """Give the right back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

"""Comparison of this process's replicas with other ranks: what is compared, and the files with fingerprints."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp.recording.housekeeper import Housekeeper
from instrumented_ddp.replicas.fingerprint import Fingerprint
from instrumented_ddp.replicas.replica import Replica
from instrumented_ddp.replicas.settings import Settings
from overlapscope.diagnosis.replicas import Newest, digest_of, newest_of
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.checksum import json_line
from overlapscope.trace.format import REPLICAS_FILE
from overlapscope.trace.sweep_file import SweepFile, taken_at

_log: Final = logging.getLogger(__name__)

_COLLECTED_EVERY_S: Final = 1.0
_MOST_TOLD: Final = 16
"""Maximum number of models reported to neighbors: the latest."""


class Counted(Protocol):
    """An object that counts its reduced backwards."""

    reductions: int


@dataclass
class _Kept:
    """State of one compared instance."""

    replica: Replica
    counted: weakref.ref[Counted]
    file: SweepFile
    key: str
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    is_parameter: tuple[bool, ...]


class Replicas:
    """Replicas of all DDP instances of this process; a ``Job``.

    Args:
        folder: folder of the rank's recording.
        housekeeper: schedules the writing of finished fingerprints.
        gives_up: called after an internal error.
    """

    name = "the comparison of replicas"

    def __init__(self, folder: Path, housekeeper: Housekeeper, gives_up: Callable[[Exception], None]) -> None:
        self._folder = folder
        self._housekeeper = housekeeper
        self._gives_up = gives_up
        self._kept: list[_Kept] = []
        self.settings = Settings(folder)
        """Settings of the optimizers, which may explain why replicas differ."""

    def add(self, model: int, ddp: TorchDDP, counted: Counted) -> Replica | None:
        """Compare a DDP instance with those of the other ranks.

        Args:
            model: its number within the process.
            ddp: the instance, with its reducer. It is referenced weakly.
            counted: counts its reductions.

        Returns:
            The replica to notify when a forward begins; None if nothing can be compared.
        """
        try:
            return self._add(model, ddp, counted)
        except (OSError, OverlapScopeError) as error:
            _log.warning("%s: replicas of model %d are not compared: %s", self._folder, model, error)
        except Exception as error:
            self._gives_up(error)
        return None

    def newest(self) -> dict[str, Newest]:
        """Return the latest digests, which neighbors compare with theirs, by key."""
        self.collect()
        return {
            kept.key: newest
            for kept in self._kept[-_MOST_TOLD:]
            if kept.counted() is not None
            and (newest := newest_of(kept.file.newest(), kept.numbers, kept.is_parameter)) is not None
        }

    def agrees(self, key: str, theirs: Newest) -> bool | None:
        """Return whether a neighbor's latest sweep equals this rank's at that time; None if unknown."""
        for kept in self._kept:
            if kept.key == key:
                own = digest_of(kept.file.sweeps, kept.numbers, kept.is_parameter, theirs.first, theirs.period)
                return None if own is None or own.count != theirs.count else own.digest == theirs.digest
        return None

    def ranks_of(self, key: str) -> tuple[int, ...]:
        """Return the ranks that have a replica of a model."""
        return next((kept.ranks for kept in self._kept if kept.key == key), ())

    def pin(self) -> None:
        """Preserve the current data after replicas were found to differ."""
        for kept in self._kept:
            kept.file.pin()
        self.settings.write()

    def collect(self) -> None:
        """Write the finished sweeps. Called on the housekeeper's thread."""
        for kept in self._kept:
            for sweep in kept.replica.sweeps():
                kept.file.add(*sweep)

    def turn(self) -> float:
        """Write the finished sweeps, and return the seconds until the next call."""
        self.collect()
        return _COLLECTED_EVERY_S

    def end(self) -> None:
        """Write the remaining sweeps."""
        self.collect()

    def close(self) -> None:
        """Stop taking fingerprints. Called on the training thread, before the housekeeper is closed."""
        for kept in self._kept:
            counted = kept.counted()
            kept.replica.close(None if counted is None else counted.reductions)
        self.settings.write()

    def _add(self, model: int, ddp: TorchDDP, counted: Counted) -> Replica | None:
        if not dist.is_initialized():
            return None
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
        tensors = [(name, kind, Fingerprint(tensor, device)) for name, kind, tensor in _tensors_of(ddp)]
        fit = [(name, kind, one) for name, kind, one in tensors if not one.unfit_because]
        if len(ranks) < 2 or not fit:
            return None
        layout = [ranks, *((name, kind, one.layout) for name, kind, one in fit)]
        same = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
        key = f"{same}.{sum(kept.key.startswith(same) for kept in self._kept)}"
        line = {
            "model": model,
            "key": key,
            "class": type(ddp.module).__name__,
            "ranks": ranks,
            "processor": processor_of(device),
            "tensors": [(name, kind) for name, kind, _ in fit],
            "left_out": [(name, one.unfit_because) for name, _, one in tensors if one.unfit_because],
        }
        file = SweepFile(self._folder, model, len(fit))
        with (self._folder / REPLICAS_FILE).open("a", encoding="utf-8") as lines:
            lines.write(json_line(line))
        replica = Replica([(name, one) for name, _, one in fit], device, self._gives_up)
        numbers = tuple(taken_at(name) for name, _, _ in fit)
        is_parameter = tuple(kind != "buffer" for _, kind, _ in fit)
        if not self._kept:
            self._housekeeper.add(self)
        self._kept.append(_Kept(replica, weakref.ref(counted), file, key, ranks, numbers, is_parameter))
        return replica


def _tensors_of(ddp: TorchDDP) -> Sequence[tuple[str, str, torch.Tensor]]:
    """Return name, kind and tensor of what DDP keeps equal on all ranks; buffers only if it does not broadcast them."""
    ignored = set(ddp.parameters_to_ignore)
    found: list[tuple[str, str, torch.Tensor]] = [
        (name, "trained" if parameter.requires_grad else "frozen", parameter)
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored
    ]
    if not ddp.broadcast_buffers:
        found += [(name, "buffer", buffer) for name, buffer in ddp.module.named_buffers() if name not in ignored]
    return found


def processor_of(device: torch.device) -> str:
    """Describe the processor and software; ranks with equal descriptions round equally."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = ""
    with suppress(OSError, StopIteration), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}"

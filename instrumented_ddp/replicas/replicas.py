"""Comparison of this process's replicas with other ranks: what is compared, and the files with fingerprints."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.replicas.fingerprint import describe_layout, divide_into_parts, find_exclusion_reason
from instrumented_ddp.replicas.optimizer_settings import OptimizerSettings
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.replicas.schedule import number_part
from overlapscope.diagnosis.replica_drift import PassSummary, summarize_latest_pass, summarize_pass
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.live_files import FingerprintFile
from overlapscope.trace.schema import REPLICAS_FILE

_log: Final = logging.getLogger(__name__)

_COLLECT_INTERVAL_S: Final = 1.0
_MAX_REPORTED_MODELS: Final = 16
"""Maximum number of models reported to neighbors: the latest."""


class ReductionCounter(Protocol):
    """An object that counts its reduced backwards."""

    @property
    def settled_reductions(self) -> int | None:
        """Return their number so far; None while an update of the parameters is pending."""


@dataclass
class _ComparedModel:
    """State of one compared instance."""

    model: int
    replica: FingerprintedReplica
    counter: weakref.ref[ReductionCounter]
    file: FingerprintFile
    key: str
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    is_parameter: tuple[bool, ...]
    latest: PassSummary | None = None
    agreements: dict[int, tuple[PassSummary, bool]] = field(default_factory=dict)
    """By neighbor, its latest pass that could be compared, and whether it was equal."""


class ReplicaComparison:
    """Replicas of all DDP instances of this process; a ``PeriodicTask``.

    Args:
        folder: folder of the rank's recording.
        scheduler: schedules the writing of finished fingerprints.
        disable_recording: called after an internal error.
    """

    name = "the comparison of replicas"

    def __init__(
        self, folder: Path, scheduler: BackgroundScheduler, disable_recording: Callable[[Exception], None]
    ) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._disable_recording = disable_recording
        self._compared: list[_ComparedModel] = []
        self.settings = OptimizerSettings(folder)
        """Settings of the optimizers, which may explain why replicas differ."""

    def add(self, model: int, ddp: TorchDDP, counter: ReductionCounter) -> FingerprintedReplica | None:
        """Compare a DDP instance with those of the other ranks.

        Args:
            model: its number within the process.
            ddp: the instance.
            counter: counts its reductions; referenced weakly too.

        Returns:
            The replica to notify when a forward begins; None if nothing can be compared.
        """
        try:
            return self._add(model, ddp, counter)
        except (OSError, OverlapScopeError) as error:
            _log.warning("%s: replicas of model %d are not compared: %s", self._folder, model, error)
        except Exception as error:
            self._disable_recording(error)
        return None

    def add_outside(
        self,
        model: int,
        class_name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        counter: ReductionCounter,
    ) -> FingerprintedReplica | None:
        """Compare parameters in no DDP instance with those of the other ranks.

        Args:
            model: number that stands for them.
            class_name: class of the optimizer that updates them.
            parameters: their names, and the parameters.
            counter: counts their updates; referenced weakly.
        """
        listed = [(name, "trained", parameter) for name, parameter in parameters]
        ranks = tuple(range(dist.get_world_size()))
        try:
            return self._add_tensors(model, class_name, ranks, parameters[0][1].device, listed, counter)
        except (OSError, OverlapScopeError) as error:
            _log.warning("%s: parameters outside DDP are not compared: %s", self._folder, error)
        return None

    def on_unreduced_update(self, model: int) -> None:
        """Note that a model is about to be updated with gradients that its instance has not averaged."""
        for compared in self._compared:
            if compared.model == model:
                compared.replica.on_unreduced_update()

    def latest(self) -> dict[str, PassSummary]:
        """Return the latest digests, which neighbors compare with theirs, by key."""
        self.collect()
        return {
            compared.key: compared.latest
            for compared in self._compared[-_MAX_REPORTED_MODELS:]
            if compared.counter() is not None and compared.latest is not None
        }

    def agrees(self, key: str, rank: int, theirs: PassSummary) -> bool | None:
        """Return whether a neighbor's latest pass equals this rank's at that time; None if unknown."""
        compared = next((one for one in self._compared if one.key == key), None)
        if compared is None:
            return None
        known = compared.agreements.get(rank)
        if known is None or known[0] != theirs:
            own = summarize_pass(
                compared.file.passes, compared.numbers, compared.is_parameter, theirs.first, theirs.period
            )
            if own is None or own.count != theirs.count:
                return None
            known = compared.agreements[rank] = theirs, own.digest == theirs.digest
        return known[1]

    def ranks_of(self, key: str) -> tuple[int, ...]:
        """Return the ranks that have a replica of a model."""
        return next((compared.ranks for compared in self._compared if compared.key == key), ())

    def pin(self) -> None:
        """Preserve the current data after replicas were found to differ."""
        for compared in self._compared:
            compared.file.pin()
        self.settings.write()

    def collect(self) -> None:
        """Write the finished passes. Called on the background thread."""
        for compared in self._compared:
            if passes := compared.replica.passes():
                for pass_ in passes:
                    compared.file.add(*pass_)
                compared.latest = summarize_latest_pass(compared.file.latest(), compared.numbers, compared.is_parameter)

    def run(self) -> float:
        """Write the finished passes, and return the seconds until the next call."""
        self.collect()
        return _COLLECT_INTERVAL_S

    def end(self) -> None:
        """Write the remaining passes."""
        self.collect()

    def close(self) -> None:
        """Stop taking fingerprints. Called on the training thread, before the scheduler is closed."""
        for compared in self._compared:
            counter = compared.counter()
            compared.replica.close(None if counter is None else counter.settled_reductions)
        self.settings.write()

    def _add(self, model: int, ddp: TorchDDP, counter: ReductionCounter) -> FingerprintedReplica | None:
        if not dist.is_initialized():
            return None
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
        return self._add_tensors(model, type(ddp.module).__name__, ranks, device, _list_tensors(ddp), counter)

    def _add_tensors(
        self,
        model: int,
        class_name: str,
        ranks: tuple[int, ...],
        device: torch.device,
        listed: Sequence[tuple[str, str, torch.Tensor]],
        counter: ReductionCounter,
    ) -> FingerprintedReplica | None:
        fit, left_out = _choose_tensors(listed, device)
        if len(ranks) < 2 or not fit:
            return None
        tensors = [tensor for _, _, tensor in fit]
        parts = divide_into_parts(tensors)
        part_numbers = [number_part(part) for part in range(len(parts))]
        numbers = tuple(number for part, number in zip(parts, part_numbers, strict=True) for _ in part)
        layout = [ranks, numbers, *((name, kind, describe_layout(tensor)) for name, kind, tensor in fit)]
        same = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
        key = f"{same}.{sum(compared.key.startswith(same) for compared in self._compared)}"
        file = FingerprintFile(self._folder, model, len(fit))
        line = {
            "model": model,
            "key": key,
            "class": class_name,
            "ranks": ranks,
            "processor": describe_processor(device),
            "tensors": [(name, kind) for name, kind, _ in fit],
            "numbers": numbers,
            "left_out": left_out,
        }
        with (self._folder / REPLICAS_FILE).open("a", encoding="utf-8") as lines:
            lines.write(dump_json_line(line))
        replica = FingerprintedReplica(tensors, parts, part_numbers, self._disable_recording)
        is_parameter = tuple(kind != "buffer" for _, kind, _ in fit)
        if not self._compared:
            self._scheduler.add(self)
        self._compared.append(
            _ComparedModel(model, replica, weakref.ref(counter), file, key, ranks, numbers, is_parameter)
        )
        return replica


def _choose_tensors(
    listed: Sequence[tuple[str, str, torch.Tensor]], device: torch.device
) -> tuple[list[tuple[str, str, torch.Tensor]], list[tuple[str, str]]]:
    """Return name, kind and tensor of what is fingerprinted, and name and reason of what is left out."""
    reasons = [find_exclusion_reason(tensor, device) for _, _, tensor in listed]
    left_out = [(name, reason) for (name, _, _), reason in zip(listed, reasons, strict=True) if reason]
    return [one for one, reason in zip(listed, reasons, strict=True) if not reason], left_out


def _list_tensors(ddp: TorchDDP) -> Sequence[tuple[str, str, torch.Tensor]]:
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


def describe_processor(device: torch.device) -> str:
    """Describe the processor and software; ranks with equal descriptions round equally."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = ""
    with suppress(OSError, StopIteration), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}"

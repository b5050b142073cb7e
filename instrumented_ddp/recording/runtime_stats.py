"""When the parts of an iteration began and ended, in the iterations that stock DDP samples for its logging data.

Times are taken in the first ten iterations and then in every hundredth, as stock does (torch/csrc/distributed/c10d/
logger.cpp), but without waiting for the device: on CUDA a time that is not known yet is left at that of the sample
before.
"""

from __future__ import annotations

import time
from typing import Final

import torch

_ALWAYS_SAMPLED_ITERATIONS: Final = 10
_DEFAULT_SAMPLE_RATE: Final = 100
_NS_PER_MS: Final = 1e6


class RuntimeStats:
    """When the parts of an iteration began and ended, in the iterations that are sampled.

    Args:
        device: of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.iterations = 0
        self.sample_rate = _DEFAULT_SAMPLE_RATE
        self.is_sampled = False
        self.unix_ns: dict[str, int] = {}
        self._events: dict[str, torch.cuda.Event] = {}

    def begin_iteration(self) -> None:
        """A forward begins whose gradients are to be reduced."""
        self.iterations += 1
        self.is_sampled = self.collects_now
        self.mark("forward_start")

    @property
    def collects_now(self) -> bool:
        """Whether the present iteration is a sample."""
        return 0 < self.iterations <= _ALWAYS_SAMPLED_ITERATIONS or (
            self.iterations > 0 and self.iterations % self.sample_rate == 0
        )

    def mark(self, moment: str) -> None:
        """Remember when something happened."""
        if not self.is_sampled:
            return
        self.unix_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            event = self._events.get(moment) or torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events[moment] = event

    def duration_ns(self, start: str, end: str) -> int | None:
        """Time between two moments of the newest sample; None if it is not known."""
        if start not in self.unix_ns or end not in self.unix_ns:
            return None
        if self._device.type != "cuda":
            duration_ns = self.unix_ns[end] - self.unix_ns[start]
        elif self._events[start].query() and self._events[end].query():
            duration_ns = round(self._events[start].elapsed_time(self._events[end]) * _NS_PER_MS)
        else:
            return None
        return duration_ns if duration_ns >= 0 else None

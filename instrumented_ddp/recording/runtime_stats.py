"""Times of the parts of an iteration, in the iterations that stock DDP samples for its logging data.

Times are taken in the first ten iterations and then in every hundredth, as in stock DDP
(torch/csrc/distributed/c10d/logger.cpp), but without waiting for the device: on CUDA, a time that is not known yet
keeps the value of the previous sample.
"""

from __future__ import annotations

import time
from typing import Final

import torch

_ALWAYS_SAMPLED_ITERATIONS: Final = 10
_DEFAULT_SAMPLE_RATE: Final = 100
_NS_PER_MS: Final = 1e6


class RuntimeStats:
    """Start and end times of the parts of an iteration, in sampled iterations.

    Args:
        device: device of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.iterations = 0
        self.sample_rate = _DEFAULT_SAMPLE_RATE
        self.is_sampled = False
        self.unix_ns: dict[str, int] = {}
        self._events: dict[str, torch.cuda.Event] = {}

    def begin_iteration(self) -> None:
        """Count a forward whose gradients will be reduced, and mark its start."""
        self.iterations += 1
        self.is_sampled = self.collects_now
        self.mark("forward_start")

    @property
    def collects_now(self) -> bool:
        """Return whether the current iteration is sampled."""
        return 0 < self.iterations <= _ALWAYS_SAMPLED_ITERATIONS or (
            self.iterations > 0 and self.iterations % self.sample_rate == 0
        )

    def mark(self, moment: str) -> None:
        """Store the current time of an event of the iteration."""
        if not self.is_sampled:
            return
        self.unix_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            event = self._events.get(moment) or torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events[moment] = event

    def duration_ns(self, start: str, end: str) -> int | None:
        """Return the time between two events of the latest sample; None if it is not known."""
        if start not in self.unix_ns or end not in self.unix_ns:
            return None
        if self._device.type != "cuda":
            duration_ns = self.unix_ns[end] - self.unix_ns[start]
        elif self._events[start].query() and self._events[end].query():
            duration_ns = round(self._events[start].elapsed_time(self._events[end]) * _NS_PER_MS)
        else:
            return None
        return duration_ns if duration_ns >= 0 else None

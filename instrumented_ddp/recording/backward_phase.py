"""Start and end of each backward: from the first gradient of a forward's output until autograd is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from instrumented_ddp.recording.guard import never_raise, never_raising
from instrumented_ddp.recording.observer import ReductionObserver
from overlapscope.trace.format import Phase


class BackwardTracker:
    """Reports the backwards of one model to an observer.

    Args:
        observer: receives the events.
        on_end: called when autograd has finished a backward, with whether it was under ``no_sync()``.
    """

    def __init__(self, observer: ReductionObserver, on_end: Callable[[bool], None] | None = None) -> None:
        self._observer = observer
        self._on_end = on_end
        self._is_running = False
        self._step = 0
        """Step in which the latest backward began; a caller that catches its exception may still update."""

    @property
    def is_running(self) -> bool:
        """Return whether autograd has begun a backward and has not finished it."""
        return self._is_running

    def disable_recording(self, error: Exception) -> None:
        """Disable recording after an internal error."""
        self._observer.disable_recording(error)

    @never_raise
    def expect(self, output: Any, *, no_sync: bool) -> None:
        """Expect a backward after a forward has ended: it begins with the first gradient of the output.

        Args:
            output: output of the forward, of any structure.
            no_sync: whether its gradients will not be reduced.
        """

        def begin(_: torch.Tensor) -> None:
            self.begin(no_sync=no_sync)

        for tensor in computed(output):
            tensor.register_hook(begin)

    @never_raise
    def begin(self, *, no_sync: bool) -> None:
        """Note that autograd has reached the model; does nothing if that is known."""
        if self._is_running:
            return
        observer = self._observer
        self._is_running, self._step = True, observer.step
        if observer.phase is not Phase.BACKWARD:
            observer.update_call_site()
            observer.enter(Phase.BACKWARD, no_sync=no_sync)

        def end() -> None:
            self._is_running = False
            observer.leave(Phase.BACKWARD)
            if self._on_end is not None:
                self._on_end(no_sync)

        torch.autograd.Variable._execution_engine.queue_callback(never_raising(end, self.disable_recording))

    @never_raise
    def on_forward_start(self) -> None:
        """Report a backward that autograd has not finished: an exception came out of it and was caught."""
        if self._is_running:
            self._is_running = False
            self._observer.on_interrupted_backward(self._step)


def computed(output: Any) -> Iterator[torch.Tensor]:
    """Yield the output's tensors that have a backward; a hook on a parameter would be kept from every step."""
    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf

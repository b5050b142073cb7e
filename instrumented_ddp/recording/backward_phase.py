"""When a backward begins and ends: with the first gradient of a forward's output, and when autograd is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from instrumented_ddp.recording.guard import survived, surviving
from instrumented_ddp.recording.observer import Observer
from overlapscope.trace.format import Phase


class Backwards:
    """Tells an observer of the backwards of one model.

    Args:
        observer: who is told.
        on_end: called when autograd is done with one, with whether that was under ``no_sync()``.
    """

    def __init__(self, observer: Observer, on_end: Callable[[bool], None] | None = None) -> None:
        self._observer = observer
        self._on_end = on_end
        self._is_running = False
        self._step = 0
        """In which the newest began: who catches an exception may update all the same."""

    @property
    def is_running(self) -> bool:
        """Whether autograd has begun with one, and has not said that it is done."""
        return self._is_running

    def gives_up(self, error: Exception) -> None:
        """Something of ours went wrong: the recording ends here."""
        self._observer.gives_up(error)

    @survived
    def expect(self, output: Any, *, no_sync: bool) -> None:
        """A forward has ended: its backward begins with the first gradient of its output.

        Args:
            output: of the forward, whatever it is made of.
            no_sync: its gradients are not to be reduced.
        """

        def begin(_: torch.Tensor) -> None:
            self.begin(no_sync=no_sync)

        for tensor in computed(output):
            tensor.register_hook(begin)

    @survived
    def begin(self, *, no_sync: bool) -> None:
        """Autograd runs, and has come to the model; nothing new if that is known."""
        if self._is_running:
            return
        observer = self._observer
        self._is_running, self._step = True, observer.step
        if observer.phase is not Phase.BACKWARD:
            observer.note_caller()
            observer.enter(Phase.BACKWARD, no_sync=no_sync)

        def end() -> None:
            self._is_running = False
            observer.leave(Phase.BACKWARD)
            if self._on_end is not None:
                self._on_end(no_sync)

        torch.autograd.Variable._execution_engine.queue_callback(surviving(end, self.gives_up))

    @survived
    def forward_begins(self) -> None:
        """If autograd has not said that it is done, an exception came out of the backward, and was caught."""
        if self._is_running:
            self._is_running = False
            self._observer.backward_was_left(self._step)


def computed(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output through which its backward goes; a parameter in it would keep each step's hook."""
    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf

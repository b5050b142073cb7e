"""When a backward begins and ends: with the first gradient of a forward's output, and when autograd is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from instrumented_ddp.recording.guard import surviving
from instrumented_ddp.recording.observer import Observer
from overlapscope.trace.format import Phase


def tell_of_backward(observer: Observer, output: Any, *, no_sync: bool) -> None:
    """Have an observer told of the backward of a forward.

    Args:
        output: of the forward, whatever it is made of.
        no_sync: its gradients are not to be reduced.
    """

    def begin(_: torch.Tensor) -> None:
        if observer.phase is not Phase.BACKWARD:
            observer.note_caller()
            observer.enter(Phase.BACKWARD, no_sync=no_sync)
            torch.autograd.Variable._execution_engine.queue_callback(surviving(end, observer.gives_up))

    def end() -> None:
        observer.leave(Phase.BACKWARD)

    try:
        for tensor in computed(output):
            tensor.register_hook(surviving(begin, observer.gives_up))
    except Exception as error:
        observer.gives_up(error)


def computed(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output through which its backward goes; a parameter in it would keep each step's hook."""
    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf

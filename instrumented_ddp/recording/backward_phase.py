"""When a backward begins and ends: with the first gradient of a forward's output, and when autograd is done."""

from __future__ import annotations

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

    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(surviving(begin, observer.gives_up))

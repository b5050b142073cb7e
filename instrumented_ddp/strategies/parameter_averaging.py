"""Parameter averaging: each rank updates with its local gradients, and then parameters are averaged.

With plain SGD the result is the same as that of averaging gradients, and with momentum too, because both are linear in
the gradients. It differs for other optimizers, such as Adam: each rank's state follows its local gradients (section 2.2
of the DDP paper). And it can't overlap with the backward, nor run under ``join()``. In the recording the averages look
like a user's own all-reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from instrumented_ddp.strategies.strategy import Strategy

STRATEGY = Strategy(name="parameter_averaging", averages_parameters=True)


class ParameterAveraging:
    """Averages parameters after each step of an optimizer that updates any of them, while this object exists.

    Args:
        parameters: parameters of one model.
        group: the ranks that have replicas of it.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._numbers = {id(parameter) for parameter in parameters}
        self._group = group
        self_of = weakref.ref(self)

        def on_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (averaging := self_of()) is not None:
                averaging.on_optimizer_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(on_optimizer_step).remove).atexit = False

    @torch.no_grad()
    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the parameters if an optimizer has updated any of them. Called on all ranks."""
        if not any(id(parameter) in self._numbers for group in optimizer.param_groups for parameter in group["params"]):
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in self._parameters:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter.detach())
        for tensors in by_kind.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat, group=self._group)
            flat /= self._group.size()
            parts = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])

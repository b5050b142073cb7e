"""Sharded version of torch's element-wise optimizers: each rank updates its own shard of the parameters.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1 (and 2, as
gradients are reduced to shards too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from instrumented_ddp.strategies.sharded.shards import ParameterShards
from overlapscope.errors import OverlapScopeError

_NON_ELEMENTWISE: Final = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch's whose update of an element depends on other elements of its parameter."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Optimizer of a model with the strategy ``sharded``. Created on all ranks alike.

    ``step()`` uses up the gradients. It returns when this rank's shards are updated and the others' are in flight:
    forwards wait for them, module by module, and so does ``state_dict()``. Code that reads parameters elsewhere must
    call ``wait()`` first.

    Args:
        model: ``DistributedDataParallel(module, strategy="sharded")``.
        optimizer_class: element-wise optimizer, such as ``torch.optim.AdamW`` or ``torch.optim.SGD``.
        params: parameters or groups of them, as for the optimizer itself; None for all that are trained.
        settings: arguments of the optimizer.

    Raises:
        OverlapScopeError: the model isn't sharded, the optimizer isn't element-wise, or a parameter is another model's.

    Example::

        model = DistributedDataParallel(module, strategy="sharded")
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    """

    def __init__(
        self,
        model: nn.parallel.DistributedDataParallel,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        shards = getattr(model, "shards", None)
        if not isinstance(shards, ParameterShards):
            raise OverlapScopeError(
                "ShardedOptimizer needs a model whose gradients are reduced to shards: "
                "instrumented_ddp.DistributedDataParallel(module, strategy='sharded')"
            )
        if any(one.__name__ in _NON_ELEMENTWISE for one in optimizer_class.__mro__):
            raise OverlapScopeError(
                f"{optimizer_class.__name__} needs whole parameters, and a shard cuts them: use one that treats each "
                "element on its own, such as AdamW or SGD"
            )
        self.shards = shards
        self.group: dist.ProcessGroup = model.process_group
        groups = _groups_of(shards.parameters if params is None else params)
        inner = [{**group, "params": self._main_weights_of(group["params"])} for group in groups]
        self.inner = optimizer_class(inner, **settings)
        """Optimizer of this rank's shards."""
        for group, made in zip(groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in made.items() if name != "params"})
        self._is_made = False
        super().__init__(groups, self.inner.defaults)
        self._is_made = shards.has_optimizer = True

    def _main_weights_of(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        numbers = {parameter: number for number, parameter in enumerate(self.shards.parameters)}
        try:
            wanted = {numbers[parameter] for parameter in parameters}
        except KeyError:
            raise OverlapScopeError("ShardedOptimizer was given a parameter that the model doesn't train") from None
        return [one.main for one in self.shards.owned if one.fragment.parameter in wanted]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add a group after construction.

        Raises:
            OverlapScopeError: the optimizer is constructed already.
        """
        if getattr(self, "_is_made", False):
            raise OverlapScopeError("ShardedOptimizer takes all its groups when it is made")
        super().add_param_group(param_group)

    # -- update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards, and launch their exchange among ranks.

        Args:
            closure: computes the loss and the gradients first.

        Returns:
            The result of ``closure``; None without it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        self.shards.on_optimizer_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of shards, and those that were accumulated under ``no_sync()``."""
        self.shards.drop_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their total norm over all ranks is at most ``max_norm``. Called on all ranks.

        Returns:
            The norm before that, as of ``torch.nn.utils.clip_grad_norm_``.
        """
        gradients = [one.main.grad for one in self.shards.owned if one.main.grad is not None]
        device = self.shards.parameters[0].device
        norm = get_total_norm(gradients, norm_type).to(device, torch.float64)
        is_largest = norm_type == float("inf")
        total = norm if is_largest else norm**norm_type
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=self.group)
        norm = (total if is_largest else total ** (1 / norm_type)).to(torch.float32)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0)) if gradients else None
        return norm

    def wait(self) -> None:
        """Wait for the shards of the other ranks; needed before parameters are read outside of a forward."""
        self.shards.finish()

    # -- unsupported: state of one rank only ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Refuse, as each rank has a part of the state.

        Raises:
            OverlapScopeError: always; it says what to do.
        """
        raise OverlapScopeError(
            "each rank has a part of the state: use instrumented_ddp.strategies.sharded.checkpoint.save"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse, as each rank has a part of the state.

        Raises:
            OverlapScopeError: always; it says what to do.
        """
        raise OverlapScopeError(
            "each rank has a part of the state: use instrumented_ddp.strategies.sharded.checkpoint.load"
        )


def _groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if not all(isinstance(one, dict) for one in given):
        return [{"params": given}]
    return [{**group, "params": [*_as_iterable(group["params"])]} for group in given]


def _as_iterable(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, torch.Tensor) else params

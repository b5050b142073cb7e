"""Deferred optimizer updates (``defer``), run just before the next forward or another reader needs the parameters."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp.reduction.deferral import Deferral
from instrumented_ddp.reduction.reducer import Reducer
from overlapscope.errors import OverlapScopeError


class DeferredUpdatesDDP(TorchDDP):
    """Deferred updates of ``DistributedDataParallel``."""

    _reducer: Reducer
    _deferral: Deferral | None = None

    def defer(self, optimizer: torch.optim.Optimizer) -> None:
        """Defer each update until the next forward needs its parameters, so that communication overlaps that forward.

        ``optimizer.step()`` then only requests an update with the settings of that moment, and drops the gradients.
        Parameters are updated in time for forwards, ``state_dict``, ``load_state_dict`` and ``parameters()`` of this
        wrapper; call ``synchronize`` before reading them, or gradients, in other ways. Results are those of the same
        optimizer without deferral.

        Args:
            optimizer: optimizer of exactly the parameters that are reduced, each updated from its own gradient alone.
                Call this before creating a learning-rate scheduler.

        Raises:
            OverlapScopeError: the optimizer or the wrapper's settings don't support it.
        """
        if why_not := self._find_deferral_obstacle(optimizer):
            raise OverlapScopeError(f"defer(): {why_not}")
        step = type(optimizer).step
        deferral = self._deferral = Deferral(self._reducer, optimizer, getattr(step, "__wrapped__", step), self.module)
        self._reducer.hooks.defers_wait = self._defers_wait
        self._reducer.hooks.before_bucket_reuse = deferral.finish
        optimizer.step = types.MethodType(_make_deferred_step(deferral), optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(_CallbackHook(deferral.finish))
        optimizer.register_load_state_dict_pre_hook(_CallbackHook(deferral.finish))
        for module in self.module.modules():
            module.register_forward_pre_hook(_ModuleCallbackHook(deferral.on_forward_start))
            module.register_state_dict_pre_hook(_CallbackHook(deferral.finish))
            module.register_load_state_dict_pre_hook(_CallbackHook(deferral.finish))

    def synchronize(self) -> None:
        """Complete what ``defer`` has postponed, if anything: gradients become averages, or parameters are updated.

        Raises:
            RuntimeError: gradients were changed before they were averaged; or an error of the backend.
        """
        if self._deferral is not None:
            self._deferral.finish()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters as in torch, updated through the latest step."""
        self.synchronize()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as in torch, without waiting for deferred updates."""
        self.module.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        state: dict[str, Any] = super().__getstate__()
        state.pop("_deferral", None)
        return state

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        run = super()._run_ddp_forward
        if self._deferral is None:
            return run(*inputs, **kwargs)
        with self._deferral.in_forward(no_sync=not self.require_backward_grad_sync):
            return run(*inputs, **kwargs)

    def _defers_wait(self) -> bool:
        assert self._deferral is not None
        if self._join_config.enable:  # a rank that has joined gets the parameters of another one
            return False
        self._deferral.on_backward_end()
        return True

    def _find_deferral_obstacle(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the reason why the optimizer can't be deferred; empty if it can."""
        reducer = self._reducer
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [
            spec.name
            for spec, parameter in zip(reducer.plan.parameters, reducer.parameters, strict=True)
            if id(parameter) not in updated
        ]
        reasons = {
            "an optimizer is deferred already": self._deferral is not None,
            "the strategy sharded overlaps the next forward already": reducer.plan.gathered(0) is not None,
            f"the optimizer does not update {', '.join(missing)}": bool(missing),
            "the optimizer updates parameters that are not reduced": len(updated) > len(reducer.parameters),
            "LBFGS needs all gradients at once": isinstance(optimizer, torch.optim.LBFGS),
            "find_unused_parameters=True and static_graph=True are not supported": reducer.usage is not None,
            "gradient_as_bucket_view=True is not supported": reducer.gradient_as_bucket_view,
            "mixed_precision is not supported": self.mixed_precision is not None,
            "sparse gradients are not supported": any(spec.is_sparse for spec in reducer.plan.parameters),
            "an optimizer runs in the backward already": reducer.hooks.optimizer_runs_in_backward,
        }
        return next((why for why, holds in reasons.items() if holds), "")


def _make_deferred_step(deferral: Deferral) -> Callable[..., None]:
    """Return the ``step`` method of a deferred optimizer, compatible with torch's step hooks."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self: torch.optim.Optimizer, closure: object = None) -> None:  # noqa: ARG001 - it is a method
        if closure is not None:
            raise OverlapScopeError("optimizer.step(closure): a deferred optimizer can't call a closure")
        deferral.step()

    return step


class _CallbackHook:
    """Hook of a module or an optimizer that does nothing once it was copied or unpickled."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._callback = then

    def __call__(self, *_: object) -> None:
        self._callback()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_do_nothing,)


class _ModuleCallbackHook:
    """Hook like ``_CallbackHook`` that passes on its module."""

    def __init__(self, then: Callable[[nn.Module], None]) -> None:
        self._callback = then

    @_disable_dynamo
    def __call__(self, module: nn.Module, _: object) -> None:
        self._callback(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_do_nothing,)


def _do_nothing(*_: object) -> None:
    """Do nothing, in place of a hook that was copied."""

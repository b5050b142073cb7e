"""Deferred optimizer updates: each parameter is updated just before the next forward needs it.

So collectives still in flight when a backward is over are hidden under the next forward. ByteScheduler (Peng et al.,
2019, arXiv 1905.03960) and DeAR (Zhang et al., 2023, arXiv 2302.12445) build on this. Code that reads parameters
elsewhere has to call ``finish`` first; ``DeferredUpdatesDDP`` does that wherever it can be known.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from instrumented_ddp.reduction.bucket import Bucket
from instrumented_ddp.reduction.reducer import Reducer
from instrumented_ddp.reduction.strategy import PendingUpdates
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.schema import Phase


class FirstUseTracker(TorchFunctionMode):
    """Tracks in one forward which modules use parameters of other modules, as attention does with its projections.

    A parameter that was not seen, because a compiled or scripted part uses it, is needed from the beginning.

    Args:
        module: the module whose forward runs inside this context.
        parameters: parameters to look for.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._root = module
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._current_module = module
        self._user_of: dict[int, nn.Module] = {}

    def enter_module(self, module: nn.Module) -> None:
        """Note that the forward of a module begins."""
        self._current_module = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the parameters among the arguments of a call."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and (index := self._index_of.get(id(leaf))) is not None:
                self._user_of.setdefault(index, self._current_module)
        return func(*args, **kwargs)

    def needs(self) -> dict[nn.Module, tuple[int, ...]]:
        """Return the indices of the parameters that the forward of each module needs, by module."""
        needs: dict[nn.Module, set[int]] = {module: set() for module in self._root.modules()}
        for module, numbers in needs.items():
            own = (self._index_of.get(id(parameter)) for parameter in module.parameters(recurse=False))
            numbers.update(index for index in own if index is not None)
        for index in self._index_of.values():
            needs.setdefault(self._user_of.get(index, self._root), set()).add(index)
        return {module: tuple(sorted(numbers)) for module, numbers in needs.items() if numbers}


class _LocalGradient(NamedTuple):
    """The local gradient of a parameter, as the backward has left it."""

    gradient: torch.Tensor | None
    version: int

    @staticmethod
    def of(parameter: nn.Parameter) -> _LocalGradient:
        return _LocalGradient(parameter.grad, -1 if parameter.grad is None else parameter.grad._version)

    def is_unchanged(self, gradient: torch.Tensor | None) -> bool:
        return gradient is self.gradient and (gradient is None or gradient._version == self.version)


class Deferral(PendingUpdates):
    """Waits for the buckets of one model, and updates their parameters as they are needed.

    Args:
        reducer: the reducer, which no longer waits for its buckets itself.
        optimizer: optimizer of all its parameters, and of no others.
        update: the ``step`` of its class.
        module: the module that has these parameters.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: torch.optim.Optimizer,
        update: Callable[[torch.optim.Optimizer], object],
        module: nn.Module,
    ) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._update = update
        self._pending: dict[int, Bucket] = {}
        self._local_gradients: list[_LocalGradient] = []
        self._settings: list[dict[str, Any]] | None = None
        """Settings of the optimizer at the deferred ``step``; None before it."""
        self._module = module
        self._watching: FirstUseTracker | None = None
        self._needs: dict[nn.Module, tuple[int, ...]] | None = None
        self._is_no_sync = self._is_joined = False

    @property
    def are_complete(self) -> bool:
        """Return whether nothing is deferred, so that gradients and parameters are up to date."""
        return not self._pending

    def defers_wait(self) -> bool:
        """Defer all buckets, which were launched, except where a rank that joins gets the parameters of another one."""
        if self._is_joined:
            return False
        self._pending = {bucket.number: bucket for bucket in self._reducer.buckets}
        self._local_gradients = [_LocalGradient.of(parameter) for parameter in self._reducer.parameters]
        self._settings = None
        return True

    def before_bucket_reuse(self) -> None:
        """Finish everything, as the buckets are about to be filled again or replaced."""
        self.finish()

    def step(self) -> None:
        """Update all parameters: at once if their gradients are ready, else when they are.

        Gradients that are not ready yet are dropped when they were used, as by ``zero_grad()``.

        Raises:
            RuntimeError: gradients were changed before they were averaged.
        """
        if self._settings is not None:  # what is pending has been stepped; there are no other gradients
            return
        if len(self._pending) < len(self._reducer.buckets):
            self.finish()
            self._update(self._optimizer)
            return
        self._check_local(range(len(self._local_gradients)))
        self._settings = [_copy_settings(group) for group in self._optimizer.param_groups]
        for parameter in self._reducer.parameters:
            parameter.grad = None

    @contextmanager
    def in_forward(self, *, no_sync: bool, is_joined: bool) -> Iterator[None]:
        """Run a forward inside; the first one is watched for the parameters that each module uses.

        Args:
            no_sync: the gradients of this pass are not to be reduced.
            is_joined: under ``join()``.
        """
        self._is_no_sync, self._is_joined = no_sync, is_joined
        if self._needs is not None or not torch.is_grad_enabled():
            yield
            return
        self.finish()
        with FirstUseTracker(self._module, self._reducer.parameters) as self._watching:
            yield
        self._needs, self._watching = self._watching.needs(), None

    def on_forward_start(self, module: nn.Module) -> None:
        """Finish the deferred updates of a module's parameters, at the start of its forward."""
        if self._watching is not None:
            self._watching.enter_module(module)
        if not self._pending:
            return
        if self._needs is None or not torch.is_grad_enabled():  # an evaluation may take short cuts around modules
            self.finish()
            return
        buckets = {self._reducer.bucket_of[index] for index in self._needs.get(module, ())}
        self._finish([bucket for bucket in self._pending.values() if bucket in buckets])

    def finish(self) -> None:
        """Finish everything: gradients are averages, or parameters are updated if the optimizer has stepped.

        Raises:
            RuntimeError: gradients were changed before they were averaged, or the backend failed.
        """
        self._finish(list(self._pending.values()))

    def _finish(self, buckets: list[Bucket]) -> None:
        if not buckets:
            return
        if self._settings is None:
            self._check_local(index for bucket in buckets for index in bucket.indices)
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        kept = [parameter.grad for parameter in parameters]
        with self._reducer.events.interrupting_phase(no_sync=self._is_no_sync) as enter:
            enter(Phase.FINALIZE)
            for bucket in buckets:
                if self._settings is not None:
                    _drop_gradients(bucket.parameters)
                self._reducer.finish([bucket])
                del self._pending[bucket.number]
            if self._settings is not None:
                enter(Phase.OPTIMIZER)
                self._update_subset(parameters, self._settings)
        is_updated, self._settings = self._settings is not None, self._settings if self._pending else None
        for parameter, gradient in zip(parameters, kept, strict=True):
            if is_updated or gradient is None:  # dropped by the user, who has left out the update
                parameter.grad = gradient

    def _update_subset(self, parameters: list[nn.Parameter], settings: list[dict[str, Any]]) -> None:
        optimizer, wanted = self._optimizer, {id(parameter) for parameter in parameters}
        groups = [
            {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]}
            for group in settings
        ]
        everything, optimizer.param_groups = optimizer.param_groups, [group for group in groups if group["params"]]
        try:
            self._update(optimizer)
        finally:
            optimizer.param_groups = everything

    def _check_local(self, indices: Iterable[int]) -> None:
        for index in indices:
            gradient = self._reducer.parameters[index].grad
            if gradient is not None and not self._local_gradients[index].is_unchanged(gradient):
                name = self._reducer.plan.parameters[index].name
                self._reducer.fail(
                    f"The gradient of {name} was changed after the backward, but it is not averaged yet: its update "
                    "is deferred. Call synchronize() of the DistributedDataParallel before you clip, unscale or "
                    "change gradients."
                )


def _copy_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the settings of a parameter group, as a scheduler may change those that are tensors in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


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
        self._reducer.hooks.updates = deferral
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
        is_joined = self._join_config.enable
        with self._deferral.in_forward(no_sync=not self.require_backward_grad_sync, is_joined=is_joined):
            return run(*inputs, **kwargs)

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

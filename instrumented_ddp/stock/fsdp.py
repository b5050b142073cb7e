"""Observation of every model sharded by torch's ``fully_shard`` (FSDP2), without replacing its behavior.

Only methods are wrapped that torch looks up when it calls them: a module's hooks hold references to the others.
Importing this module imports torch's, see ``after_import``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from instrumented_ddp.bucket_plan import describe_parameters
from instrumented_ddp.collective_log.dispatch import Call
from instrumented_ddp.collective_log.purposes import Launch
from instrumented_ddp.recording.guard import suppress_recorder_errors
from instrumented_ddp.session import Session
from instrumented_ddp.stock.sharded_model import ShardedModelObserver, make_unit_plan
from instrumented_ddp.stock.wrapping import Method, wrap_methods

Unit = tuple[ShardedModelObserver, int]
"""A model and the index of one of its buckets."""


class _CommunicationContext(threading.local):
    unit: Unit | None = None
    """Unit for which this thread communicates."""
    is_awaited = False
    """True if the thread waits for what it launches."""


class StockFSDPObserver:
    """Observer of the sharded models in this process.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suppress_errors = partial(suppress_recorder_errors, session.disable_recording)
        self._models: weakref.WeakKeyDictionary[FSDPState, ShardedModelObserver] = weakref.WeakKeyDictionary()
        self._units: weakref.WeakKeyDictionary[FSDPParamGroup, Unit] = weakref.WeakKeyDictionary()
        self._context = _CommunicationContext()
        self._next_identify_launch = session.collectives.identify_launch
        session.collectives.identify_launch = self._identify_launch

    def observes(self, instance: object) -> bool:  # noqa: ARG002
        """Return whether the process is still recorded."""
        return self._session.is_recording

    # -- models --------------------------------------------------------------------------------------------------

    def lazy_init(self, original: Method, state: FSDPState) -> None:
        """Wrap ``_lazy_init`` to add a model: the state whose module is called first is the root."""
        is_new = state._is_root is None
        original(state)
        if is_new:
            with self._suppress_errors():
                self._add(state)

    def _add(self, root: FSDPState) -> None:
        groups = _groups_below(root)[::-1]
        if not groups:
            return
        module = root._modules[0]
        parameters = [one.sharded_param for group in groups for one in group.fsdp_params]
        specs = describe_parameters(module, parameters, [False] * len(parameters))
        indices = iter(range(len(parameters)))
        plan = make_unit_plan(specs, groups, [tuple(next(indices) for _ in group.fsdp_params) for group in groups])
        settings = {"wrapper": "fully_shard", "groups": str(len(groups))}
        number = self._session.add_model(module, specs, settings)
        recorder = self._session.record(_get_default_group(), root._device)
        if recorder is None:
            return
        recorder.add_model(number, module, parameters, {"strategy": "fully_shard"})
        model = self._models[root] = ShardedModelObserver(number, plan, root._device, recorder)
        self._units.update({group: (model, index) for index, group in enumerate(groups)})

    # -- passes --------------------------------------------------------------------------------------------------

    def root_pre_forward(self, original: Method, state: FSDPState, *args: Any) -> Any:
        """Wrap ``_root_pre_forward``, which is also called for other states, within a pass of the root."""
        was_running = state._state_ctx.iter_forward_root is not None
        moved = original(state, *args)
        model = self._models.get(state)
        if model is not None and not was_running:
            with self._suppress_errors():
                self._begin(model, no_sync=not any(group.reduce_grads for group in _groups_below(state)))
        return moved

    def _begin(self, model: ShardedModelObserver, *, no_sync: bool) -> None:
        model.on_forward_start(no_sync=no_sync)
        if torch.is_grad_enabled():
            self._session.on_training_forward(has_uneven_inputs=False)

    def post_forward(self, original: Method, state: FSDPState, output: Any) -> Any:
        """Wrap ``_register_pre_backward_hook`` to record the end of a forward."""
        model = self._models.get(state)
        if model is not None and state._state_ctx.iter_forward_root is state:
            with self._suppress_errors():
                model.forward_ends(output)
        return original(state, output)

    # -- parameter groups ----------------------------------------------------------------------------------------

    def gather(self, original: Method, group: FSDPParamGroup, async_op: bool = False) -> None:
        """Wrap ``unshard``, which launches and, unless ``async_op``, waits at once on the host."""
        unit = self._units.get(group)
        with self._suppress_errors():
            if unit is not None and unit[0].has_interrupted_backward:  # torch does not call the root's hooks then
                self._begin(unit[0], no_sync=unit[0].is_no_sync)
        with self._communicates_for(group, is_awaited=not async_op):
            original(group, async_op)

    def wait(self, original: Method, group: FSDPParamGroup) -> None:
        """Wrap ``wait_for_unshard``, which waits on the host only for prefetched all-gathers."""
        result = group._all_gather_result
        is_late = result is not None and (result.all_gather_work is not None or group.device.type != "cpu")
        unit = self._units.get(group) if is_late else None
        with self._suppress_errors():
            if unit is not None:
                unit[0].on_wait_start()
        original(group)
        with self._suppress_errors():
            if unit is not None:
                unit[0].on_wait_end(unit[1])

    def reduce(self, original: Method, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        """Wrap ``post_backward``, which launches and, on the host, waits at once."""
        with self._communicates_for(group, is_awaited=True):
            original(group, *args, **kwargs)

    @contextmanager
    def _communicates_for(self, group: FSDPParamGroup, *, is_awaited: bool) -> Iterator[None]:
        unit, at_work = self._units.get(group), self._context
        before = at_work.unit, at_work.is_awaited
        is_awaited = is_awaited and group.device.type == "cpu"  # on a device, streams wait
        at_work.unit, at_work.is_awaited = unit, is_awaited
        try:
            yield
        finally:
            at_work.unit, at_work.is_awaited = before
            with self._suppress_errors():
                if unit is not None and is_awaited:
                    unit[0].on_wait_end(unit[1])

    def _identify_launch(self, call: Call) -> Launch | None:
        unit = self._context.unit
        if unit is None:
            return self._next_identify_launch(call)
        with self._suppress_errors():
            return unit[0].make_launch(unit[1], call, is_awaited=self._context.is_awaited)
        return None


def _groups_below(root: FSDPState) -> list[FSDPParamGroup]:
    """Return the parameter groups in module order; the root has none if all its parameters are in others."""
    return [group for state in root._state_ctx.all_states for group in _groups_of(state)]


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11: one per mesh of its parameters
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


_WRAPPED: Final[dict[type, dict[str, Method]]] = {
    FSDPState: {
        "_lazy_init": StockFSDPObserver.lazy_init,
        "_root_pre_forward": StockFSDPObserver.root_pre_forward,
        "_register_pre_backward_hook": StockFSDPObserver.post_forward,
    },
    FSDPParamGroup: {
        "unshard": StockFSDPObserver.gather,
        "wait_for_unshard": StockFSDPObserver.wait,
        "post_backward": StockFSDPObserver.reduce,
    },
}
"""Methods of torch's classes, and their wrappers."""

_of_this_process: StockFSDPObserver | None = None


def observe_fsdp(session: Session) -> None:
    """Observe all models that are sharded in this process from now on.

    Raises:
        AttributeError: torch's classes are not as expected; nothing was wrapped.
    """
    global _of_this_process
    if _of_this_process is None:
        wrap_methods(_WRAPPED, lambda: _of_this_process)
    _of_this_process = StockFSDPObserver(session)

"""Observation of every model sharded by torch's ``fully_shard`` (FSDP2), without replacing its behavior.

A model's parameter groups are its buckets. The parameters of a group are all-gathered before its forward, once more
before its backward unless they were kept, and their gradients are reduce-scattered after its backward; if the shards
are replicated, they are then all-reduced.

Only methods are wrapped that torch looks up when it calls them: a module's hooks hold references to the others.
Importing this module imports torch's, see ``call_after_import``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from instrumented_ddp.bucket_plan import ObservedPlan, ParameterSpec, Traffic, describe_parameters
from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.roles import Launch
from instrumented_ddp.recording.background import never_raising, suppress_recorder_errors
from instrumented_ddp.recording.events import BackwardTracker, make_private_ready_times
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketCollective, BucketRecords
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from instrumented_ddp.session import Session
from instrumented_ddp.stock.wrapping import Method, wrap_methods
from overlapscope.trace.live_files import READY
from overlapscope.trace.schema import Phase

_NO_GRAPH_TASK: Final = -1
"""Task id that torch returns outside of autograd."""
_RESUMED_PHASES: Final = (Phase.FORWARD, Phase.EVALUATION, Phase.BACKWARD, None)
"""Phases that resume when a wait has ended. There is none when the last unit of a model without own parameters is
gathered for its backward: that of the model begins after it."""


class ShardedModelObserver:
    """Reports the events of a model's parameter groups to the recorder.

    Args:
        number: number of the model in its process.
        plan: plan of its groups.
        device: device on which it computes.
        recorder: recorder of this process.
    """

    def __init__(self, number: int, plan: ObservedPlan, device: torch.device, recorder: Recorder) -> None:
        self.number = number
        self.is_no_sync = False
        """True if the gradients of the running pass are not reduced."""
        self._backwards = BackwardTracker(recorder, self.number, self._on_autograd_done)
        self._recorder = recorder
        self._plan = plan
        self._device = device
        self._records = recorder.activate_plan(number, 0, plan, "construction")
        self._ready_ns = recorder.map_ready_times(number, len(plan.parameters))
        self._no_ready_times = make_private_ready_times(len(plan.parameters))
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._under_way: list[tuple[int, Communicator, BucketCollective]] = []
        self._interrupted: Phase | None = None
        self._is_waiting = False

    # -- passes --------------------------------------------------------------------------------------------------

    @property
    def has_interrupted_backward(self) -> bool:
        """Return whether an exception came out of the latest backward and was caught."""
        return self._backwards.is_running and torch._C._current_graph_task_id() == _NO_GRAPH_TASK

    def on_forward_start(self, *, no_sync: bool) -> None:
        """Record that the root is called."""
        self._backwards.on_forward_start()
        self._recorder.steps.on_forward_call()
        self._recorder.update_call_site()
        self.is_no_sync = no_sync
        gathers = self._records.gathers  # all-gathers may be prefetched; the rest is of a pass that has failed
        self._under_way = [one for one in self._under_way if one[2].records is gathers[one[0]]]
        if torch.is_grad_enabled() and not no_sync:
            self._ready_ns[:] = self._no_ready_times
        self._recorder.steps.enter(self._phase_of_forward, no_sync=no_sync)

    def forward_ends(self, output: Any) -> None:
        """Record that the root is about to return."""
        self._recorder.steps.leave(self._phase_of_forward)
        if torch.is_grad_enabled():
            self._backwards.expect(output, no_sync=self.is_no_sync)

    @property
    def _phase_of_forward(self) -> Phase:
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION

    def _on_autograd_done(self, no_sync: bool) -> None:
        self._recorder.steps.enter(Phase.FINALIZE, no_sync=no_sync)
        # FSDP's own callback, which waits for the gradients, comes after this one: queue another after it.
        is_over = never_raising(partial(self._on_backward_over, no_sync), self._recorder.disable_recording)
        torch.autograd.Variable._execution_engine.queue_callback(is_over)

    def _on_backward_over(self, no_sync: bool) -> None:
        self._finish_collectives(range(len(self._plan.buckets)))
        self._recorder.steps.leave(Phase.FINALIZE)
        if not no_sync:
            self._recorder.on_gradients_reduced(self.number)

    # -- groups --------------------------------------------------------------------------------------------------

    def make_launch(self, number: int, call: Call, *, is_awaited: bool) -> Launch | None:
        """Return the launch of a collective for a group; None if it is not one of its own collectives.

        Args:
            is_awaited: whether the launching code continues only when it has ended, see ``on_wait_end``.
        """
        gathers = self._records.gathers[number]
        if call.op == "all_gather" and gathers is not None:
            records = gathers
        elif call.op == self._plan.reduced(number).op:
            records = self._records.buckets[number]
            self._on_bucket_ready(number, records)
        elif call.op == "all_reduce":  # among the replicas of a shard
            elements = sum(tensor.numel() for tensor in call.tensors)
            records = self._records.buckets[number].for_operation(call.op, elements)
        else:
            return None
        communicator = self._communicators.get(call.group)
        if communicator is None:
            communicator = communicator_of(self._device, call.group, self._recorder)
            self._communicators[call.group] = communicator
        collective = communicator.announce(records)
        self._under_way.append((number, communicator, collective))
        if is_awaited:
            self.on_wait_start()
        launched = partial(communicator.launched, collective)
        return Launch(purpose=records.purpose, launched=launched, is_awaited=is_awaited)

    def _on_bucket_ready(self, number: int, records: BucketRecords) -> None:
        for index in self._plan.buckets[number]:
            self._ready_ns[index] = READY
        if not self._recorder.is_on:
            return
        timer = self._recorder.get_timer(self._device)
        now = timer.mark()
        timer.write(records.ready, self._recorder.steps.step, now, now)

    # -- waiting -------------------------------------------------------------------------------------------------

    def on_wait_start(self) -> None:
        """Enter the waiting phase until ``on_wait_end``, since nothing is computed meanwhile."""
        phase = self._recorder.steps.phase
        if phase in _RESUMED_PHASES:
            self._interrupted, self._is_waiting = phase, True
            self._recorder.steps.enter(Phase.FINALIZE, no_sync=self.is_no_sync)

    def on_wait_end(self, number: int) -> None:
        """Record that a group's collectives have ended and were waited for, and resume the interrupted phase."""
        self._finish_collectives([number])
        if self._is_waiting and self._interrupted is not None:
            self._recorder.steps.enter(self._interrupted, no_sync=self.is_no_sync)
        elif self._is_waiting:
            self._recorder.steps.leave(Phase.FINALIZE)
        self._is_waiting = False

    def _finish_collectives(self, numbers: Sequence[int]) -> None:
        if not self._under_way:
            return
        for number, communicator, collective in self._under_way:
            if number in numbers:
                communicator.waited(collective)
        self._under_way = [one for one in self._under_way if one[0] not in numbers]


def make_unit_plan(
    specs: Sequence[ParameterSpec], groups: Sequence[Any], indices: Sequence[tuple[int, ...]]
) -> ObservedPlan:
    """Return the plan of some parameter groups.

    Args:
        groups: ``FSDPParamGroup`` objects, in the order in which their gradients are expected.
        indices: parameter indices of each group.
    """
    return ObservedPlan(
        parameters=tuple(specs),
        buckets=tuple(indices),
        reduces=tuple(_reduced(group) for group in groups),
        gathers=tuple(_gathered(group) for group in groups),
    )


def _reduced(group: Any) -> Traffic:
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad] or group.fsdp_params
    dtype = group._reduce_dtype or trained[0].orig_dtype
    op = "reduce_scatter" if _count_shards(group) > 1 else "all_reduce"
    return Traffic(op, dtype, _elements(group, trained))


def _gathered(group: Any) -> Traffic | None:
    if _count_shards(group) == 1:
        return None
    first = group.fsdp_params[0]
    return Traffic("all_gather", first.param_dtype or first.orig_dtype, _elements(group, group.fsdp_params))


def _count_shards(group: Any) -> int:
    """Return the number of ranks that share the parameters of a group; 1 if each has them all."""
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _elements(group: Any, parameters: Sequence[Any]) -> int:
    """Return the number of elements of all shards, padding included."""
    return _count_shards(group) * sum(int(one.padded_sharded_param_size.numel()) for one in parameters)


def describe_sharding(root: FSDPState, groups: Sequence[Any]) -> dict[str, Any]:
    """Return what decides when parameters are gathered, as it is at the first forward, for ``run.json``.

    Args:
        groups: ``FSDPParamGroup`` objects by bucket.
    """
    numbers = {id(group): number for number, group in enumerate(groups)}
    state_of = {id(group): state for state in root._state_ctx.all_states for group in _groups_of(state)}
    mesh_info = groups[0].mesh_info

    def number_of(states: Sequence[FSDPState]) -> list[int]:
        return [numbers[id(group)] for state in states for group in _groups_of(state)]

    def describe(group: Any) -> dict[str, Any]:
        state = state_of[id(group)]
        explicit = number_of(state._states_to_backward_prefetch)
        return {
            "module": group._module_fqn or "",
            "is_root": state is root,
            "reshards": group.post_forward_mesh_info is not None,
            "is_async": bool(group.unshard_async_op),
            "forward_prefetch": number_of(state._states_to_forward_prefetch),
            "backward_prefetch": explicit or None,
        }

    return {
        "shard_groups": _ranks_along(mesh_info, "shard_mesh_dim"),
        "replica_groups": _ranks_along(mesh_info, "replicate_mesh_dim"),
        "units": [describe(group) for group in groups],
    }


def _ranks_along(mesh_info: Any, dimension: str) -> list[list[int]]:
    """Return the ranks of each group along a dimension of a mesh; none if it has no such dimension."""
    number = getattr(mesh_info, dimension, None)
    if number is None:
        return []
    ranks = mesh_info.mesh.mesh
    rows: list[list[int]] = ranks.movedim(number, -1).reshape(-1, ranks.shape[number]).tolist()
    return rows


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
        self._suppressing_errors = suppress_recorder_errors(session.disable_recording)
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
            with self._suppressing_errors:
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
        recorder.set_model_info(number, "sharding", describe_sharding(root, groups))
        model = self._models[root] = ShardedModelObserver(number, plan, root._device, recorder)
        self._units.update({group: (model, index) for index, group in enumerate(groups)})

    # -- passes --------------------------------------------------------------------------------------------------

    def root_pre_forward(self, original: Method, state: FSDPState, *args: Any) -> Any:
        """Wrap ``_root_pre_forward``, which is also called for other states, within a pass of the root."""
        was_running = state._state_ctx.iter_forward_root is not None
        moved = original(state, *args)
        model = self._models.get(state)
        if model is not None and not was_running:
            with self._suppressing_errors:
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
            with self._suppressing_errors:
                model.forward_ends(output)
        return original(state, output)

    # -- parameter groups ----------------------------------------------------------------------------------------

    def gather(self, original: Method, group: FSDPParamGroup, async_op: bool = False) -> None:
        """Wrap ``unshard``, which launches and, unless ``async_op``, waits at once on the host."""
        unit = self._units.get(group)
        try:
            if unit is not None and unit[0].has_interrupted_backward:  # torch does not call the root's hooks then
                self._begin(unit[0], no_sync=unit[0].is_no_sync)
        except Exception as error:
            self._session.disable_recording(error)
        self._communicate(unit, partial(original, group, async_op), is_awaited=not async_op and _is_on_host(group))

    def wait(self, original: Method, group: FSDPParamGroup) -> None:
        """Wrap ``wait_for_unshard``, which waits on the host only for prefetched all-gathers."""
        result = group._all_gather_result
        is_late = result is not None and (result.all_gather_work is not None or not _is_on_host(group))
        unit = self._units.get(group) if is_late else None
        if unit is None:
            original(group)
            return
        with self._suppressing_errors:
            unit[0].on_wait_start()
        original(group)
        with self._suppressing_errors:
            unit[0].on_wait_end(unit[1])

    def reduce(self, original: Method, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        """Wrap ``post_backward``, which launches and, on the host, waits at once."""
        launch = partial(original, group, *args, **kwargs)
        self._communicate(self._units.get(group), launch, is_awaited=_is_on_host(group))

    def _communicate(self, unit: Unit | None, launch: Callable[[], None], *, is_awaited: bool) -> None:
        """Launch collectives of a unit, and wait for them if they are awaited."""
        at_work = self._context
        before = at_work.unit, at_work.is_awaited
        at_work.unit, at_work.is_awaited = unit, is_awaited
        try:
            launch()
        finally:
            at_work.unit, at_work.is_awaited = before
            try:
                if unit is not None and is_awaited:
                    unit[0].on_wait_end(unit[1])
            except Exception as error:
                self._session.disable_recording(error)

    def _identify_launch(self, call: Call) -> Launch | None:
        unit = self._context.unit
        if unit is None:
            return self._next_identify_launch(call)
        try:
            return unit[0].make_launch(unit[1], call, is_awaited=self._context.is_awaited)
        except Exception as error:
            self._session.disable_recording(error)
        return None


def _is_on_host(group: FSDPParamGroup) -> bool:
    """Return whether the host waits for a group's collectives; on a device, streams do."""
    return bool(group.device.type == "cpu")


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

"""Observer of one model sharded by torch's ``fully_shard`` (FSDP2). Its parameter groups are its buckets.

The parameters of a group are all-gathered before its forward, once more before its backward unless they were kept, and
their gradients are reduce-scattered after its backward; if the shards are replicated, they are then all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, Traffic
from instrumented_ddp.collective_log.dispatch import Call
from instrumented_ddp.collective_log.purposes import Launch
from instrumented_ddp.recording.backward_phase import BackwardTracker
from instrumented_ddp.recording.bucket_collective import BucketCollective
from instrumented_ddp.recording.guard import never_raising
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.reduction_events import make_private_ready_times
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from overlapscope.trace.board import READY
from overlapscope.trace.format import Phase

_NO_GRAPH_TASK: Final = -1
"""Task id that torch returns outside of autograd."""
_RESUMED_PHASES: Final = (Phase.FORWARD, Phase.EVALUATION, Phase.BACKWARD)
"""Phases that resume when a wait has ended."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan(BucketPlan):
    """Plan of parameter groups, ordered by when their gradients come."""

    reduces: tuple[Traffic, ...]
    gathers: tuple[Traffic | None, ...]

    def reduced(self, number: int) -> Traffic:
        """Return the traffic of a group's gradients."""
        return self.reduces[number]

    def gathered(self, number: int) -> Traffic | None:
        """Return the traffic of a group's parameters."""
        return self.gathers[number]


class ShardedModelObserver:
    """Reports the events of a model's parameter groups to the recorder.

    Args:
        number: number of the model in its process.
        plan: plan of its groups.
        device: device on which it computes.
        recorder: recorder of this process.
    """

    def __init__(self, number: int, plan: UnitPlan, device: torch.device, recorder: Recorder) -> None:
        self.number = number
        self.is_no_sync = False
        """True if the gradients of the running pass are not reduced."""
        self._backwards = BackwardTracker(recorder, self._on_autograd_done)
        self._recorder = recorder
        self._plan = plan
        self._device = device
        self._records = recorder.activate_plan(number, 0, plan, "construction")
        self._board = recorder.board(number, len(plan.parameters))
        self._empty_board = make_private_ready_times(len(plan.parameters))
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._under_way: list[tuple[int, Communicator, BucketCollective]] = []
        self._interrupted: Phase | None = None

    # -- passes --------------------------------------------------------------------------------------------------

    @property
    def has_interrupted_backward(self) -> bool:
        """Return whether an exception came out of the latest backward and was caught."""
        return self._backwards.is_running and torch._C._current_graph_task_id() == _NO_GRAPH_TASK

    def on_forward_start(self, *, no_sync: bool) -> None:
        """Record that the root is called."""
        self._backwards.on_forward_start()
        self._recorder.on_forward_call()
        self._recorder.update_call_site()
        self.is_no_sync = no_sync
        gathers = self._records.gathers  # all-gathers may be prefetched; the rest is of a pass that has failed
        self._under_way = [one for one in self._under_way if one[2].records is gathers[one[0]]]
        if torch.is_grad_enabled() and not no_sync:
            self._board[:] = self._empty_board
        self._recorder.enter(self._phase_of_forward, no_sync=no_sync)

    def forward_ends(self, output: Any) -> None:
        """Record that the root is about to return."""
        self._recorder.leave(self._phase_of_forward)
        if torch.is_grad_enabled():
            self._backwards.expect(output, no_sync=self.is_no_sync)

    @property
    def _phase_of_forward(self) -> Phase:
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION

    def _on_autograd_done(self, no_sync: bool) -> None:
        self._recorder.enter(Phase.FINALIZE, no_sync=no_sync)
        # FSDP's own callback, which waits for the gradients, comes after this one: queue another after it.
        is_over = never_raising(partial(self._on_backward_over, no_sync), self._recorder.disable_recording)
        torch.autograd.Variable._execution_engine.queue_callback(is_over)

    def _on_backward_over(self, no_sync: bool) -> None:
        self._recorder.leave(Phase.FINALIZE)
        self._finish_collectives(range(len(self._plan.buckets)))
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
            self._board[index] = READY
        timer = self._recorder.get_timer(self._device)
        now = timer.mark()
        timer.write(records.ready, self._recorder.step, now, now)

    # -- waiting -------------------------------------------------------------------------------------------------

    def on_wait_start(self) -> None:
        """Enter the waiting phase until ``on_wait_end``, since nothing is computed meanwhile."""
        phase = self._recorder.phase
        if phase in _RESUMED_PHASES:
            self._interrupted = phase
            self._recorder.enter(Phase.FINALIZE, no_sync=self.is_no_sync)

    def on_wait_end(self, number: int) -> None:
        """Record that a group's collectives have ended and were waited for, and resume the interrupted phase."""
        self._finish_collectives([number])
        if self._interrupted is not None:
            self._recorder.enter(self._interrupted, no_sync=self.is_no_sync)
            self._interrupted = None

    def _finish_collectives(self, numbers: Sequence[int]) -> None:
        for number, communicator, collective in self._under_way:
            if number in numbers:
                communicator.waited(collective)
        self._under_way = [one for one in self._under_way if one[0] not in numbers]


def make_unit_plan(
    specs: Sequence[ParameterSpec], groups: Sequence[Any], indices: Sequence[tuple[int, ...]]
) -> UnitPlan:
    """Return the plan of some parameter groups.

    Args:
        groups: ``FSDPParamGroup`` objects, in the order in which their gradients are expected.
        indices: parameter indices of each group.
    """
    return UnitPlan(
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

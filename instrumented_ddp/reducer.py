"""Gradient hooks -> bucket ready -> launch -> finalise: Algorithm 1 of the DDP paper, and the hot path.

(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.3.)

Every parameter has a hook that autograd calls when its gradient is accumulated. The hook counts down its
bucket; at zero the bucket's gradients are copied into one flat buffer. Buckets are launched in the order of
the plan, never in the order of readiness: a ready bucket waits for those before it, because ranks match
collectives by order alone. When the last one has been launched, autograd is asked to call ``finalise`` at the
end of this backward, where the host or the stream waits for what is still on the wire.

Hooks hold recording code only where the readiness of every gradient is recorded, and then store no more than the
time: the records are written when the bucket is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from instrumented_ddp.buckets import BucketPlan
from instrumented_ddp.completion import Collective
from instrumented_ddp.lane import Lane
from instrumented_ddp.recorder import Recorder
from instrumented_ddp.records import BucketRecords, PlanRecords
from overlapscope.trace.format import Phase


class Bucket:
    """One flat buffer, the parameters whose gradients it holds, and how far it has got in this backward."""

    __slots__ = ("buffer", "collective", "indices", "is_ready", "parameters", "pending", "records", "views")

    def __init__(
        self, indices: tuple[int, ...], parameters: list[torch.nn.Parameter], records: BucketRecords | None
    ) -> None:
        self.indices = indices
        self.parameters = parameters
        self.records = records
        first = parameters[0]
        self.buffer = torch.empty(
            sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device
        )
        self.views = _views_like(self.buffer, parameters)
        self.pending = len(parameters)
        self.is_ready = False
        self.collective: Collective | None = None

    def reset(self) -> None:
        """Expect all gradients again."""
        self.pending = len(self.parameters)
        self.is_ready = False
        self.collective = None


class Reducer:
    """Averages the gradients of one module over a process group while autograd computes them.

    Args:
        names: of the parameters, for messages.
        parameters: that require a gradient, in the module's order, each once.
        plan: the first bucket plan; ``adopt`` replaces it.
        lane: where collectives run.
        world_size: what sums are divided by.
        gradient_as_bucket_view: ``parameter.grad`` is a view of the bucket instead of a copy.
        recorder: told of everything that happens, if there is one.
        plan_records: the plan's packed records; goes with ``recorder``.
        board: where hooks store when gradients are ready, if that is recorded and there is one.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        lane: Lane,
        *,
        world_size: int,
        gradient_as_bucket_view: bool,
        recorder: Recorder | None,
        plan_records: PlanRecords | None,
        board: memoryview[int] | None,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._lane = lane
        self._world_size = world_size
        self._gradient_as_bucket_view = gradient_as_bucket_view
        self._recorder = recorder
        self._board = board
        self._expects_gradients = False
        self._is_ready = [False] * len(parameters)
        self._gradient_records: list[bytes] = []  # refilled in place: hooks hold on to it
        self.gradient_order: list[int] | None = []
        """Parameters in the order of their first gradients; None once it has been used."""
        self.adopt(plan, plan_records)
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, parameter in enumerate(parameters)
        ]

    def adopt(self, plan: BucketPlan, plan_records: PlanRecords | None) -> None:
        """Take a bucket plan from here on. Not during a backward."""
        self.plan = plan
        self._gradient_records[:] = plan_records.gradient_ready if plan_records else []
        self._buckets = [
            Bucket(
                indices,
                [self._parameters[index] for index in indices],
                plan_records.buckets[number] if plan_records else None,
            )
            for number, indices in enumerate(plan.buckets)
        ]
        self._bucket_of = {
            index: bucket for indices, bucket in zip(plan.buckets, self._buckets, strict=True) for index in indices
        }
        self._next_bucket = 0
        self._has_begun = False

    def prepare_for_backward(self) -> None:
        """Expect one gradient of every parameter. Called at the end of each forward whose backward is to be reduced.

        Raises:
            RuntimeError: the backward before left parameters without a gradient, and ranks waiting.
        """
        if self._has_begun:
            self._complain_of_missing_gradients()
        for bucket in self._buckets:
            bucket.reset()
        self._is_ready = [False] * len(self._parameters)
        self._next_bucket = 0
        self._expects_gradients = True
        if self.gradient_order is not None:
            self.gradient_order.clear()

    def remove_hooks(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        recorder, board = self._recorder, self._board
        if recorder is None or recorder.detail == "buckets":

            def hook(_: torch.Tensor) -> None:
                if self._expects_gradients:
                    self._mark_parameter_as_ready(index)

            return hook

        mark, write, records = recorder.timeline.mark, recorder.timeline.write, self._gradient_records

        def recording_hook(_: torch.Tensor) -> None:
            now = mark()
            if not self._expects_gradients:
                write(records[index], recorder.step, now, now)
                return
            if board is None:
                write(records[index], recorder.step, now, now)
            else:
                board[index] = now
            self._mark_parameter_as_ready(index)

        return recording_hook

    def _mark_parameter_as_ready(self, index: int) -> None:
        if self._is_ready[index]:
            raise RuntimeError(
                f"Expected to mark a variable ready only once: {self._names[index]} was marked ready twice in one "
                "backward. Its gradient is computed by two backward passes in one, as by re-entrant checkpointing, "
                "or by a second backward through the same forward."
            )
        self._is_ready[index] = True
        self._has_begun = True
        if self.gradient_order is not None:
            self.gradient_order.append(index)
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        if bucket.pending == 0:
            self._mark_bucket_as_ready(bucket)

    def _mark_bucket_as_ready(self, bucket: Bucket) -> None:
        recorder, records = self._recorder, bucket.records
        if recorder is None or records is None:
            self._copy_in(bucket)
        else:
            if recorder.phase is not Phase.BACKWARD:  # no output of the module was seen to get a gradient
                recorder.note_caller()
                recorder.enter(Phase.BACKWARD)
            timeline = recorder.timeline
            ready = timeline.mark()
            self._copy_in(bucket)
            timeline.write(records.ready, recorder.step, ready, ready)
            timeline.write(records.copy_in, recorder.step, ready, timeline.mark())
        bucket.is_ready = True
        self._launch_ready_buckets()
        if recorder is not None and self._board is not None:  # after the launch, which must not wait for them
            for index in bucket.indices:
                recorder.log.append(
                    self._gradient_records[index], recorder.step, self._board[index], self._board[index]
                )

    def _launch_ready_buckets(self) -> None:
        """Launch what is ready and has no predecessor that is not."""
        buckets = self._buckets
        while self._next_bucket < len(buckets) and buckets[self._next_bucket].is_ready:
            bucket = buckets[self._next_bucket]
            bucket.collective = self._lane.all_reduce(bucket.buffer, bucket.records)
            self._next_bucket += 1
            if self._next_bucket == len(buckets):
                torch.autograd.Variable._execution_engine.queue_callback(self._finalise)

    def _copy_in(self, bucket: Bucket) -> None:
        """Gather a bucket's gradients, divided by the world size: one fused copy, one multiplication.

        Multiplying copies by 1/N and dividing views by N is what stock DDP does, to the bit.
        """
        strays = [
            (parameter, view)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if parameter.grad is not view
        ]
        with torch.no_grad():
            if strays:
                torch._foreach_copy_([view for _, view in strays], _gradients(parameter for parameter, _ in strays))
            if len(strays) == len(bucket.views):
                bucket.buffer.mul_(1.0 / self._world_size)
            else:
                bucket.buffer.div_(self._world_size)
        if self._gradient_as_bucket_view:
            for parameter, view in strays:
                parameter.grad = view

    def _finalise(self) -> None:
        """Wait for every bucket in order and hand the averages to the parameters."""
        recorder = self._recorder
        if recorder is not None:
            recorder.enter(Phase.FINALISE)
        try:
            for bucket in self._buckets:
                assert bucket.collective is not None
                self._lane.wait(bucket.collective)
                if not self._gradient_as_bucket_view:
                    self._copy_out(bucket)
        except RuntimeError:
            if recorder is not None:
                recorder.incident()
            raise
        self._expects_gradients = False
        self._has_begun = False
        if recorder is not None:
            recorder.leave(Phase.FINALISE)
            recorder.gradients_are_reduced()

    def _copy_out(self, bucket: Bucket) -> None:
        recorder = self._recorder
        start = recorder.timeline.mark() if recorder is not None else None
        with torch.no_grad():
            torch._foreach_copy_(_gradients(bucket.parameters), bucket.views)
        if recorder is not None and bucket.records is not None:
            timeline = recorder.timeline
            timeline.write(bucket.records.copy_out, recorder.step, start, timeline.mark())

    def _complain_of_missing_gradients(self) -> None:
        missing = [name for name, ready in zip(self._names, self._is_ready, strict=True) if not ready]
        if self._recorder is not None:
            self._recorder.incident()
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your module has parameters that were not used in producing loss. Parameters which did "
            f"not receive grad for rank {torch.distributed.get_rank()}: {', '.join(missing) or 'none'}."
        )


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _views_like(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """One view of the buffer a parameter, with the memory layout that its gradient has (channels last, say)."""
    views, offset = [], 0
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(buffer.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views

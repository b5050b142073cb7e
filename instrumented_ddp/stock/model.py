"""Observer of one instance of torch's own ``DistributedDataParallel``, whose C++ reducer reports no events.

What it launches is recognized by size and order: buckets come in the order of the plan, and each is launched the moment
its last gradient has arrived, which hooks on the parameters see first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec
from instrumented_ddp.collective_log.purposes import Launch
from instrumented_ddp.recording.backward_phase import BackwardTracker
from instrumented_ddp.recording.bucket_collective import BucketCollective
from instrumented_ddp.recording.guard import never_raising
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, make_bitmap_records
from instrumented_ddp.recording.reduction_events import make_private_ready_times
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from overlapscope.trace.board import READY
from overlapscope.trace.format import Phase


class StockModelObserver:
    """Reports the events of a DDP instance to the recorder.

    Args:
        ddp: the instance, with its reducer. It is not kept alive.
        number: number of the instance in its process.
        parameters: parameters of the reducer, in its order.
        specs: specs of those parameters.
        recorder: recorder of this process.
    """

    def __init__(
        self,
        ddp: TorchDDP,
        number: int,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        recorder: Recorder,
    ) -> None:
        self.number = number
        self._recorder = recorder
        self._specs = tuple(specs)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._launched: list[tuple[Communicator, BucketCollective]] = []
        self._communicators = {p.device: communicator_of(p.device, ddp.process_group, recorder) for p in parameters}
        self._board = recorder.board(number, len(parameters))
        self._empty_board = make_private_ready_times(len(parameters))
        flags = recorder.get_timer(parameters[0].device).flags
        self._bitmap = make_bitmap_records(flags, number, len(parameters), "int32")
        self._bitmap_device = parameters[0].device
        self._plans = 0
        self._records: PlanRecords | None = None
        self._plan = BucketPlan(self._specs, ())
        self._elements: list[int] = []
        self._gradient_records: list[bytes] = []  # refilled in place: hooks hold a reference
        self._next_bucket = 0
        self._may_skip_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))  # torch 2.8
        self._has_rebuilt_buckets = False
        self.reductions = 0
        """Number of backwards that were reduced, including those shadowed by a rank that has joined."""
        self.is_reduced = False
        """True while buckets are expected: from the end of a forward until all are launched."""
        self.backwards = BackwardTracker(recorder, self._on_autograd_done)
        self._read_plan(ddp, "construction")
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index, parameter.device))
            for index, parameter in enumerate(parameters)
        ]

    def detach(self) -> None:
        """Remove the hooks once the instance is gone; its parameters may live on."""
        for hook in self._hooks:
            hook.remove()

    # -- plans ---------------------------------------------------------------------------------------------------

    def _read_plan(self, ddp: TorchDDP, reason: str) -> None:
        """Query the reducer's buckets, in launch order.

        Raises:
            RuntimeError: the reducer returns a copy, for which there is no memory on the device.
        """
        buckets = tuple(
            tuple(self._index_of[id(parameter)] for parameter in bucket.parameters())
            for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        )
        self._plan = BucketPlan(self._specs, buckets)
        self._records = self._recorder.activate_plan(self.number, self._plans, self._plan, reason)
        self._gradient_records[:] = self._records.gradient_ready
        self._elements = [sum(self._specs[index].elements for index in bucket) for bucket in buckets]
        self._plans += 1

    def check_for_rebuild(self, ddp: TorchDDP) -> None:
        """Read the plan again if the reducer has rebuilt its buckets in the observed gradient order."""
        if not self._has_rebuilt_buckets and ddp._has_rebuilt_buckets:
            self._has_rebuilt_buckets = True
            self._read_plan(ddp, "rebuild")

    # -- passes --------------------------------------------------------------------------------------------------

    def expect_gradients(self) -> None:
        """Expect gradients after a forward whose backward will be reduced."""
        self._board[:] = self._empty_board
        self.expect_buckets()

    def expect_buckets(self) -> None:
        """Expect buckets from the first one, in a backward or in a joined rank's shadow of one."""
        self._next_bucket = 0
        self._launched.clear()  # of a pass that has failed
        self.is_reduced = True

    def _on_autograd_done(self, no_sync: bool) -> None:
        if no_sync:
            return
        self._recorder.enter(Phase.FINALIZE)
        # The reducer's own callback, which waits for the buckets, comes after this one: queue another after it.
        is_over = never_raising(self._on_backward_over, self._recorder.disable_recording)
        torch.autograd.Variable._execution_engine.queue_callback(is_over)

    def _on_backward_over(self) -> None:
        self._recorder.leave(Phase.FINALIZE)
        for communicator, collective in self._launched:  # the reducer has waited for them
            communicator.waited(collective)
        self._launched.clear()
        if self._next_bucket < len(self._elements) and not self._may_skip_buckets:
            return  # gradients are missing: the reducer still waits for them, and will raise at the next forward
        self.is_reduced = False
        self.reductions += 1
        for index in range(len(self._board)):
            self._board[index] = READY
        self._recorder.on_gradients_reduced(self.number)

    def _gradient_hook(self, index: int, device: torch.device) -> Callable[[torch.Tensor], None]:
        board, recorder = self._board, self._recorder

        def hook(_: torch.Tensor) -> None:
            try:  # in place, and not ``never_raising``: once per parameter and step, another call has a noticeable cost
                board[index] = READY
                if not self.is_reduced:
                    recorder.on_unreduced_gradient(self.number)
            except Exception as error:
                recorder.disable_recording(error)

        if recorder.detail == "buckets":
            return hook
        timer, records = recorder.get_timer(device), self._gradient_records

        def recording_hook(gradient: torch.Tensor) -> None:
            now = timer.mark()
            if records:
                timer.write(records[index], recorder.step, now, now)
            hook(gradient)

        return never_raising(recording_hook, recorder.disable_recording)

    # -- what the reducer launches -------------------------------------------------------------------------------

    def find_bucket(self, elements: int) -> tuple[bool, int] | None:
        """Return which bucket an all-reduce of this many elements would be, if it were this model's.

        Returns:
            Whether all its gradients have arrived, and its negative number: of several models, the greatest pair wins.
            None if it can't be a bucket. For example, with buckets of 8, 4 and 8 elements of which the first was
            launched, 8 elements give ``(True, -2)`` once the gradients of bucket 2 have arrived.
        """
        for number in range(self._next_bucket, len(self._elements)):  # buckets without a used parameter may be skipped
            if self._elements[number] == elements:
                return all(self._board[index] for index in self._plan.buckets[number]), -number
        return None

    def is_bitmap(self, tensor: torch.Tensor) -> bool:
        """Return whether this can be the bitmap of used parameters."""
        return tensor.dtype == torch.int32 and tensor.numel() == len(self._specs)

    def on_bucket_launch(self, number: int, *, has_joined: bool) -> Launch:
        """Record that the reducer is about to launch a bucket."""
        assert self._records is not None
        if not has_joined:
            self._on_bucket_ready(number)
        self._next_bucket = number + 1
        return self._launch(self._records.buckets[number], self._device_of(number))

    def on_bitmap_launch(self) -> Launch:
        """Record that the reducer is about to launch the bitmap of used parameters."""
        return self._launch(self._bitmap, self._bitmap_device)

    def run_hook(self, hook: Callable[[], Any], number: int) -> Any:
        """Call a communication hook of the user for one bucket."""
        if self._records is None or number >= len(self._records.buckets):
            return hook()
        if self.is_reduced:
            never_raising(self._on_bucket_ready, self._recorder.disable_recording)(number)
        self._next_bucket = number + 1
        communicator = self._communicators[self._device_of(number)]
        collective = communicator.run_hook(hook, self._records.buckets[number])
        self._launched.append((communicator, collective))
        return collective.work

    def _on_bucket_ready(self, number: int) -> None:
        assert self._records is not None
        self.backwards.begin(no_sync=False)  # unless a gradient of the module's output has begun it
        for index in self._plan.buckets[number]:  # also those without a gradient in this pass
            self._board[index] = READY
        timer = self._recorder.get_timer(self._device_of(number))
        now = timer.mark()
        timer.write(self._records.buckets[number].ready, self._recorder.step, now, now)

    def _launch(self, records: BucketRecords, device: torch.device) -> Launch:
        communicator = self._communicators[device]
        collective = communicator.announce(records)
        self._launched.append((communicator, collective))
        return Launch(purpose=records.purpose, launched=partial(communicator.launched, collective))

    def _device_of(self, number: int) -> torch.device:
        return self._specs[self._plan.buckets[number][0]].device

"""One instance of torch's own ``DistributedDataParallel``, whose reducer in C++ tells nobody what it does.

What it launches is recognised by its size and by its turn: buckets come in the order of the plan, and one is launched
the moment its last gradient has come, which hooks on the parameters see first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec
from instrumented_ddp.collective_log.purposes import Launch
from instrumented_ddp.recording.backward_phase import Backwards
from instrumented_ddp.recording.bucket_collective import Collective
from instrumented_ddp.recording.guard import surviving
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, all_reduce_records
from instrumented_ddp.recording.reduction_events import private_board
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from overlapscope.trace.board import HAS_COME
from overlapscope.trace.format import Phase


class StockModel:
    """Tells the recorder what a DDP instance does.

    Args:
        ddp: the instance, with its reducer. It is not held on to.
        number: of the instance in its process.
        parameters: that the reducer was given, in its order.
        specs: of those parameters.
        recorder: of this process.
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
        self._launched: list[tuple[Communicator, Collective]] = []
        self._communicators = {p.device: communicator_of(p.device, ddp.process_group, recorder) for p in parameters}
        self._board = recorder.board(number, len(parameters))
        self._empty_board = private_board(len(parameters))
        flags = recorder.timer_on(parameters[0].device).flags
        self._bitmap = all_reduce_records(flags, number, len(parameters), "int32")
        self._bitmap_device = parameters[0].device
        self._plans = 0
        self._records: PlanRecords | None = None
        self._plan = BucketPlan(self._specs, ())
        self._elements: list[int] = []
        self._gradient_records: list[bytes] = []  # refilled in place: hooks hold on to it
        self._next_bucket = 0
        self._may_skip_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))  # torch 2.8
        self._has_rebuilt_buckets = False
        self.reductions = 0
        """Backwards that were reduced, also those of a rank that has joined."""
        self.is_reduced = False
        """Whether buckets are to be expected: from the end of a forward until they are all on the wire."""
        self.backwards = Backwards(recorder, self._autograd_is_done)
        self._read_plan(ddp, "construction")
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index, parameter.device))
            for index, parameter in enumerate(parameters)
        ]

    def detach(self) -> None:
        """The instance is gone; its parameters may live on."""
        for hook in self._hooks:
            hook.remove()

    # -- plans ---------------------------------------------------------------------------------------------------

    def _read_plan(self, ddp: TorchDDP, reason: str) -> None:
        """Ask the reducer for its buckets, in the order in which it launches them.

        Raises:
            RuntimeError: it hands out a copy, for which there is no memory on the device.
        """
        buckets = tuple(
            tuple(self._index_of[id(parameter)] for parameter in bucket.parameters())
            for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        )
        self._plan = BucketPlan(self._specs, buckets)
        self._records = self._recorder.plan_takes_effect(self.number, self._plans, self._plan, reason)
        self._gradient_records[:] = self._records.gradient_ready
        self._elements = [sum(self._specs[index].elements for index in bucket) for bucket in buckets]
        self._plans += 1

    def look_for_rebuild(self, ddp: TorchDDP) -> None:
        """The reducer may have followed the order of the gradients a moment ago."""
        if not self._has_rebuilt_buckets and ddp._has_rebuilt_buckets:
            self._has_rebuilt_buckets = True
            self._read_plan(ddp, "rebuild")

    # -- passes --------------------------------------------------------------------------------------------------

    def expect_gradients(self) -> None:
        """A forward has ended whose backward is to be reduced."""
        self._board[:] = self._empty_board
        self.expect_buckets()

    def expect_buckets(self) -> None:
        """The reducer begins with the first one, in a backward or as the shadow of one."""
        self._next_bucket = 0
        self._launched.clear()  # of a pass that has failed
        self.is_reduced = True

    def _autograd_is_done(self, no_sync: bool) -> None:
        if no_sync:
            return
        self._recorder.enter(Phase.FINALISE)
        # The reducer's own callback, which waits for the buckets, is behind this one: go behind that in turn.
        is_over = surviving(self._backward_is_over, self._recorder.gives_up)
        torch.autograd.Variable._execution_engine.queue_callback(is_over)

    def _backward_is_over(self) -> None:
        self._recorder.leave(Phase.FINALISE)
        for communicator, collective in self._launched:  # the reducer has waited for them
            communicator.waited(collective)
        self._launched.clear()
        if self._next_bucket < len(self._elements) and not self._may_skip_buckets:
            return  # gradients have not come: the reducer still waits for them, and will say so at the next forward
        self.is_reduced = False
        self.reductions += 1
        for index in range(len(self._board)):
            self._board[index] = HAS_COME
        self._recorder.gradients_are_reduced(self.number)

    def _gradient_hook(self, index: int, device: torch.device) -> Callable[[torch.Tensor], None]:
        board, recorder = self._board, self._recorder

        def hook(_: torch.Tensor) -> None:
            try:  # in place, and not ``surviving``: once a parameter and step, another call is felt
                board[index] = HAS_COME
                if not self.is_reduced:
                    recorder.gradient_is_not_reduced(self.number)
            except Exception as error:
                recorder.gives_up(error)

        if recorder.detail == "buckets":
            return hook
        timer, records = recorder.timer_on(device), self._gradient_records

        def recording_hook(gradient: torch.Tensor) -> None:
            now = timer.mark()
            if records:
                timer.write(records[index], recorder.step, now, now)
            hook(gradient)

        return surviving(recording_hook, recorder.gives_up)

    # -- what the reducer launches -------------------------------------------------------------------------------

    def bucket_with(self, elements: int) -> tuple[bool, int] | None:
        """Which bucket an all-reduce of so many elements would be, if it were this model's.

        Returns:
            Whether all its gradients have come, and minus its number: of several models, the one with the greatest
            is meant. None: it can't be one.
        """
        for number in range(self._next_bucket, len(self._elements)):  # buckets without a used parameter may be skipped
            if self._elements[number] == elements:
                return all(self._board[index] for index in self._plan.buckets[number]), -number
        return None

    def is_bitmap(self, tensor: torch.Tensor) -> bool:
        """Whether this can be the bitmap of used parameters."""
        return tensor.dtype == torch.int32 and tensor.numel() == len(self._specs)

    def bucket_is_launched(self, number: int, *, has_joined: bool) -> Launch:
        """The reducer is about to launch a bucket."""
        assert self._records is not None
        if not has_joined:
            self._bucket_is_ready(number)
        self._next_bucket = number + 1
        return self._launch(self._records.buckets[number], self._device_of(number))

    def bitmap_is_launched(self) -> Launch:
        """The reducer is about to launch the bitmap of used parameters."""
        return self._launch(self._bitmap, self._bitmap_device)

    def run_hook(self, hook: Callable[[], Any], number: int) -> Any:
        """Call a communication hook of the user's for one bucket."""
        if self._records is None or number >= len(self._records.buckets):
            return hook()
        if self.is_reduced:
            surviving(self._bucket_is_ready, self._recorder.gives_up)(number)
        self._next_bucket = number + 1
        communicator = self._communicators[self._device_of(number)]
        collective = communicator.run_hook(hook, self._records.buckets[number])
        self._launched.append((communicator, collective))
        return collective.work

    def _bucket_is_ready(self, number: int) -> None:
        assert self._records is not None
        self.backwards.begin(no_sync=False)  # unless an output of the module was seen to get a gradient
        for index in self._plan.buckets[number]:  # also those that have no part in this pass
            self._board[index] = HAS_COME
        timer = self._recorder.timer_on(self._device_of(number))
        now = timer.mark()
        timer.write(self._records.buckets[number].ready, self._recorder.step, now, now)

    def _launch(self, records: BucketRecords, device: torch.device) -> Launch:
        communicator = self._communicators[device]
        collective = communicator.announce(records)
        self._launched.append((communicator, collective))
        return Launch(purpose=records.purpose, launched=partial(communicator.launched, collective))

    def _device_of(self, number: int) -> torch.device:
        return self._specs[self._plan.buckets[number][0]].device

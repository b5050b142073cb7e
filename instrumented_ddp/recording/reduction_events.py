"""Events of the reduction of one model, and their default listener for a job that is not recorded."""

from __future__ import annotations

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.backward_phase import BackwardTracker
from instrumented_ddp.recording.observer import ReductionObserver
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from overlapscope.trace.board import READY


def make_private_ready_times(parameters: int) -> memoryview[int]:
    """Return a board like that of ``trace.board``, in the memory of this process alone."""
    return memoryview(bytearray(8 * parameters)).cast("q")


class ReductionEvents:
    """Listener of one reducer, from a gradient that is ready to gradients that are final.

    This class keeps only what stock DDP keeps: the times in ``_get_ddp_logging_data()``. Methods are called on the hot
    path, in about the order in which they are defined here.

    Args:
        stats: runtime statistics of the model.
        parameters: number of its parameters.
    """

    needs_gradient_events = False
    """True if ``gradient_ready`` should be called."""
    observer: ReductionObserver | None = None
    """Observer whose timers mark the events, if any."""
    backwards: BackwardTracker | None = None
    """Tracker of when autograd runs, if it is reported."""

    def __init__(self, stats: RuntimeStats, parameters: int) -> None:
        self.stats = stats
        self.board = make_private_ready_times(parameters)
        """Stamps by parameter, read by the reducer: 0 until the gradient has arrived in this pass, then ``stamp``."""
        self.stamp = READY
        """Stamp for the gradient that arrives now: its time, or only the fact that it has arrived."""

    def on_plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """Note that a plan is active from now on."""

    def records_of(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """Return the records of a bucket's all-reduce."""
        return None

    def get_gather_records(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """Return the records of the all-gather of its parameters."""
        return None

    @property
    def bitmap_records(self) -> BucketRecords | None:
        """Return the records of the all-reduce of the bitmap of used parameters."""
        return None

    def on_gradients_expected(self) -> None:
        """Note that a forward has ended whose backward will be reduced."""
        self.stats.mark("backward_compute_start")

    def gradient_ready(self, index: int, *, is_expected: bool) -> None:
        """Note that a gradient was accumulated; if it is not expected, it is not reduced in this pass."""

    def on_unexpected_gradient(self) -> None:
        """Note that a gradient has arrived that no reduction waits for."""

    def on_bucket_ready(self, device: torch.device) -> None:
        """Note that the last gradient of a bucket has arrived."""

    def on_copy_in_end(self, bucket: int, device: torch.device) -> None:
        """Note that the gradients of a bucket that were not yet in its buffer have been copied to it."""

    def on_first_launch(self) -> None:
        """Note that the first bucket of a pass is about to be launched."""
        self.stats.mark("backward_comm_start")

    def on_gradients_launched(self, indices: tuple[int, ...]) -> None:
        """Note that everything that could be launched when a bucket was ready has been launched.

        Args:
            indices: indices of the bucket's parameters.
        """

    def on_backward_over(self) -> None:
        """Note that everything has been launched and autograd has finished; only averages are waited for."""
        self.stats.mark("backward_compute_end")

    def on_copy_out_start(self, device: torch.device) -> None:
        """Note that a bucket's average is available and is about to be copied to the parameters' gradients."""

    def on_copy_out_end(self, bucket: int, device: torch.device) -> None:
        """Note that the average was copied to the parameters' gradients."""

    def on_finalized(self) -> None:
        """Note that the gradients of a pass are final."""
        self.stats.mark("backward_comm_end")

    def failed(self) -> None:
        """Note that an error occurred and is about to be raised in the training."""

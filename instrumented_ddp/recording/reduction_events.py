"""What a reducer tells of the reduction of one model, and the listener of a job that nobody records."""

from __future__ import annotations

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.backward_phase import Backwards
from instrumented_ddp.recording.observer import Observer
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from overlapscope.trace.board import HAS_COME


def private_board(parameters: int) -> memoryview[int]:
    """A board as ``trace.board`` has it, in the memory of this process alone."""
    return memoryview(bytearray(8 * parameters)).cast("q")


class ReductionEvents:
    """Listens to one reducer, from the gradient that is ready to the gradients that are final.

    This one keeps what stock DDP keeps, ``_get_ddp_logging_data()``'s times, and nothing else. Methods are called on
    the hot path, in about the order in which they are defined here.

    Args:
        stats: of the model.
        parameters: how many it has.
    """

    wants_gradients = False
    """Whether ``gradient_ready`` is to be called."""
    observer: Observer | None = None
    """Where times are marked, if they are."""
    backwards: Backwards | None = None
    """Know when autograd runs, if anybody is told."""

    def __init__(self, stats: RuntimeStats, parameters: int) -> None:
        self.stats = stats
        self.board = private_board(parameters)
        """By parameter: 0 until its gradient has come in this pass, then ``stamp``. The reducer's own account."""
        self.stamp = HAS_COME
        """What is put there for the gradient that comes now: when, or just that it has."""

    def plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """A plan is in force from here on."""

    def records_of(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """What is written of a bucket's all-reduce."""
        return None

    def gather_records_of(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """What is written of the all-gather of its parameters."""
        return None

    @property
    def bitmap_records(self) -> BucketRecords | None:
        """What is written of the all-reduce of the bitmap of used parameters."""
        return None

    def gradients_expected(self) -> None:
        """A forward has ended whose backward is to be reduced."""
        self.stats.mark("backward_compute_start")

    def gradient_ready(self, index: int, *, is_expected: bool) -> None:
        """A gradient was accumulated; if it is not expected, it is not reduced in this pass."""

    def gradient_not_reduced(self) -> None:
        """A gradient has come that no reduction waits for."""

    def bucket_ready(self, device: torch.device) -> None:
        """The last gradient of a bucket has come."""

    def copied_in(self, bucket: int, device: torch.device) -> None:
        """Its gradients are in the buffer, those of them that were not before."""

    def launches_first(self) -> None:
        """The first bucket of a pass is about to be launched."""
        self.stats.mark("backward_comm_start")

    def gradients_launched(self, indices: tuple[int, ...]) -> None:
        """What was ready to be launched when a bucket was ready has been launched.

        Args:
            indices: of the bucket's parameters.
        """

    def backward_over(self) -> None:
        """Everything has been launched, and autograd has nothing more to do: averages are waited for."""
        self.stats.mark("backward_compute_end")

    def copying_out(self, device: torch.device) -> None:
        """The average of a bucket is there, and is about to be handed to the parameters."""

    def copied_out(self, bucket: int, device: torch.device) -> None:
        """The average was handed to the parameters."""

    def finalised(self) -> None:
        """The gradients of a pass are final."""
        self.stats.mark("backward_comm_end")

    def failed(self) -> None:
        """Something went wrong, and the training is about to be told."""

"""Gradients that are not finite: in which step, bucket and parameters of this rank, before others have them too.

After the reduction a NaN of one rank is everybody's, and after the update it is in the weights, so that every later
gradient of every rank is NaN. So each bucket is looked at before its collective, but only at some elements, because one
pass over all of them would cost more than the rest of the recording:

- one of each gradient, in each step another one. A loss that is NaN makes all gradients NaN, and a NaN in the middle of
  a model all gradients of the layers before it;
- the diagonals of matrices, as far as a share of the step's time allows, else in turns. In the layer where it comes
  from, a NaN fills a row or a column, and a diagonal that begins anew at the edge crosses all of them.

What is seen by neither is seen a step later, when it has gone through the weights; these say which parameters it was
in.

Where even one element of each gradient is too dear, some passes are not looked at (``CostAccount``). A NaN in the
weights stays, so a later pass finds it, and the steps before it that were skipped are noted. The first passes are all
looked at, and so is each one from one that was not finite until one that is.

Whether it did harm is a second question. A gradient scaler, or the user's loop, may leave out the update. So weights
are looked at when the next forward begins, and only if there was something wrong.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec
from instrumented_ddp.native import FiniteProbe
from instrumented_ddp.native.finite import WHOLE
from instrumented_ddp.recording.cost_account import CostAccount
from overlapscope.diagnosis.evidence import NonFiniteGradients

_MAX_COST_SHARE: Final = 0.00025
"""Maximum share of the steps' time that looks at the buckets of all models take, without the clocks
that time them, which cost about as much."""
_LONGEST_PASS_NS: Final = 1_000_000_000
"""A longer pass counts as one of that time: evaluations and pauses pay for nothing."""
_MORE_BELOW: Final = 0.5
"""Share of the allowed cost below which the next look is at more of the diagonals."""
_FIRST_PASSES: Final = 16
"""Number of passes that are looked at in any case; what they cost too much is paid later."""
_REMEMBERED_STEPS: Final = 32
_MAX_EPISODES: Final = 16
"""Number of episodes that are described at once. Of later ones only those that got into the weights are, because a
gradient scaler may overflow for ever."""
_MAX_USED: Final = 8
"""Maximum number of those."""
_MAX_NAMES: Final = 8

_KINDS: Final[Mapping[torch.dtype, int]] = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
}
"""Kinds of elements, as in ``FiniteProbe``."""


class _HostBucket:
    """A bucket on the host, read where it lies. Its buffer is not kept alive.

    Args:
        parameters: its parameters, in order.
    """

    def __init__(self, parameters: Sequence[ParameterSpec]) -> None:
        self.starts = [0, *accumulate(parameter.elements for parameter in parameters)]
        self._gradients = [
            (start, one.shape[0] if one.shape else 1, one.elements // one.shape[0] if one.shape else 1)
            for start, one in zip(self.starts, parameters, strict=False)
            if one.elements
        ]
        self._place: tuple[int, int, torch.dtype] | None = None
        self._probe: FiniteProbe | None = None

    def is_finite(self, buffer: torch.Tensor, turn: int, share: int) -> bool:
        """Return whether the elements that have their turn are finite; True if the buffer can't be read.

        Args:
            buffer: a tensor with memory.
            turn: number of the pass.
            share: as in ``FiniteProbe``.
        """
        place = address, _, _ = buffer.data_ptr(), buffer.nbytes, buffer.dtype
        if place != self._place:
            self._place = place
            kind = _KINDS.get(buffer.dtype)
            is_readable = buffer.device.type == "cpu" and buffer.numel() == self.starts[-1] and buffer.is_contiguous()
            self._probe = FiniteProbe(kind, self._gradients) if kind is not None and is_readable else None
        return self._probe is None or self._probe.is_finite(address, turn, share)


class GradientCheck:
    """Check of one model's gradients, before each bucket is reduced.

    Args:
        model: number of the model in the recording.
        parameters: its parameters, as in its plans. They are not kept alive.
        write: called with all that was found, when there is something new.
    """

    def __init__(
        self,
        model: int,
        parameters: Sequence[torch.nn.Parameter],
        write: Callable[[int, Sequence[NonFiniteGradients]], None],
    ) -> None:
        self._model = model
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._write = write
        self._names: list[str] = []
        self._buckets: list[_HostBucket] = []
        self._plan: BucketPlan | None = None
        self._account = CostAccount(_MAX_COST_SHARE)
        self._passes = self._next_look = self._looks = 0
        """Number of this pass, of the next one that is looked at, and of looks so far."""
        self._share = 0
        """How much of the diagonals is looked at in a pass, as in ``FiniteProbe``."""
        self._cost_ns = 0
        self._settled_ns, self._settled_pass = time.perf_counter_ns(), 0
        self._unseen_since: int | None = None
        """First step of which a pass was skipped since the latest look."""
        self._finite_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._batch: Callable[[], torch.Tensor | None] = _no_batch
        self._episodes: list[NonFiniteGradients] = []
        self._now: NonFiniteGradients | None = None
        """The episode that is not over; None while gradients are finite."""
        self._is_described = False
        self._seen_step = -1
        """Latest step in which a gradient was not finite."""
        self._forwards_to_skip = self._skipped = 0

    def adopt(self, plan: BucketPlan) -> None:
        """Expect the buckets of a plan."""
        self._plan = plan
        self._names = [parameter.name for parameter in plan.parameters]
        self._buckets = [_HostBucket([plan.parameters[index] for index in one]) for one in plan.buckets]

    def share_budget(self, models: int) -> None:
        """Share what looks may cost with other models.

        Args:
            models: number of all models.
        """
        self._account.max_share = _MAX_COST_SHARE / models

    def on_forward_start(self, inputs: Sequence[Any], more: Mapping[str, Any]) -> None:
        """Note the batch of a forward in training; if gradients were not finite, look at the weights.

        Args:
            inputs: positional arguments of the forward.
            more: its other arguments.
        """
        self._batch = _no_batch
        for value in (*inputs, *more.values()):
            if type(value) is torch.Tensor and value.is_floating_point():
                self._batch = weakref.ref(value)
                break
        if self._now is not None:
            self._look_at_weights()

    def on_launch(self, number: int, buffer: torch.Tensor, step: int) -> None:
        """Look at a bucket that is about to be reduced.

        Args:
            number: number of the bucket in the plan.
            buffer: its gradients, of this rank alone.
            step: optimizer step.
        """
        if self._passes != self._next_look or type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:
            return
        begin_ns = time.thread_time_ns()
        is_finite = self._buckets[number].is_finite(buffer, self._looks, self._share)
        self._cost_ns += time.thread_time_ns() - begin_ns
        if not is_finite:
            self._on_non_finite(number, buffer, step)

    def on_reduced(self, step: int) -> None:
        """Note that all gradients of a pass are averages."""
        is_skipped = self._passes != self._next_look
        self._passes += 1
        if is_skipped:
            if self._unseen_since is None:
                self._unseen_since = step
            return
        if self._now is not None and self._seen_step != step:
            if self._is_described:
                self._change(last_step=self._seen_step)
                self._write(self._model, self._episodes)
            self._now = None
        if self._now is None:
            self._finite_steps.append(step)
        self._unseen_since = None
        self._choose_next_look()

    def _choose_next_look(self) -> None:
        """Choose the next pass to look at, and how much of it, from what this look has cost."""
        now_ns, passes = time.perf_counter_ns(), self._passes - self._settled_pass
        passes_ns = min(now_ns - self._settled_ns, passes * _LONGEST_PASS_NS)
        self._account.settle(self._cost_ns, 1, passes_ns, passes_ns / passes)
        period = self._account.period
        if period == 1 and self._cost_ns < _MORE_BELOW * self._account.max_share * passes_ns:
            self._share = min(self._share + self._share // 4 + 1, WHOLE)
        else:
            self._share //= 2
        self._settled_ns, self._settled_pass, self._cost_ns = now_ns, self._passes, 0
        self._looks += 1
        is_each_due = self._now is not None or self._passes < _FIRST_PASSES
        self._next_look = self._passes if is_each_due else -(-self._passes // period) * period

    def close(self) -> None:
        """Look at the weights a last time, if gradients were not finite."""
        if self._now is not None:
            self._forwards_to_skip = self._skipped
            self._look_at_weights()

    def _on_non_finite(self, number: int, buffer: torch.Tensor, step: int) -> None:
        is_new = self._now is None
        self._seen_step = step
        if is_new:
            self._now = NonFiniteGradients(
                model=self._model,
                step=step,
                bucket=number,
                unseen_since_step=self._unseen_since,
                finite_steps=tuple(self._finite_steps),
            )
            self._is_described = len(self._episodes) < _MAX_EPISODES or self._was_used_unseen()
            self._forwards_to_skip = self._skipped = 0
            if self._is_described:
                self._episodes.append(self._now)
                self._describe(number, buffer)
        elif self._is_described and self._now is not None and self._now.step == step:
            self._add_parameters(number, buffer)

    def _was_used_unseen(self) -> bool:
        """Return whether the weights have not been finite since a step that was skipped. Looks pay for it later."""
        if self._unseen_since is None or len(self._episodes) >= _MAX_EPISODES + _MAX_USED:
            return False
        begin_ns = time.thread_time_ns()
        found = self._find_weights()
        self._cost_ns += time.thread_time_ns() - begin_ns
        return bool(found)

    def _describe(self, number: int, buffer: torch.Tensor) -> None:
        batch = self._batch()
        if batch is not None and batch.device.type == "cpu":
            self._change(is_batch_finite=bool(torch.isfinite(batch).all()))
        self._change(weights_before=self._find_weights())
        self._add_parameters(number, buffer)

    def _add_parameters(self, number: int, buffer: torch.Tensor) -> None:
        now = self._now
        assert now is not None
        found, has_nan = self._find_parameters(number, buffer)
        self._change(
            parameters=(*now.parameters, *found)[:_MAX_NAMES],
            tensors=now.tensors + len(found),
            has_nan=now.has_nan or has_nan,
        )
        self._write(self._model, self._episodes)

    def _change(self, **changes: Any) -> None:
        assert self._now is not None
        self._now = self._episodes[-1] = replace(self._now, **changes)

    def _find_parameters(self, number: int, buffer: torch.Tensor) -> tuple[list[str], bool]:
        """Return the names of parameters whose gradients are not finite, and whether one of these is NaN."""
        assert self._plan is not None
        starts, found, has_nan = self._buckets[number].starts, [], False
        with torch.no_grad():
            for at, index in enumerate(self._plan.buckets[number]):
                gradient = buffer[starts[at] : starts[at + 1]]
                if not torch.isfinite(gradient).all():
                    found.append(self._names[index])
                    has_nan = has_nan or bool(torch.isnan(gradient).any())
        return found, has_nan

    def _find_weights(self) -> tuple[str, ...]:
        """Return the names of parameters that are not finite themselves."""
        found = []
        with torch.no_grad():
            for name, reference in zip(self._names, self._parameters, strict=True):
                weight = reference()
                if weight is not None and weight.device.type == "cpu" and not torch.isfinite(weight).all():
                    found.append(name)
                    if len(found) == _MAX_NAMES:
                        break
        return tuple(found)

    def _look_at_weights(self) -> None:
        """Find out whether an update has used the gradients: at once, and ever more rarely while it has not."""
        now = self._now
        if now is None or now.is_used or (not self._is_described and self._seen_step == now.step):
            return
        self._skipped += 1
        if self._skipped <= self._forwards_to_skip:
            return
        self._forwards_to_skip, self._skipped = 2 * self._forwards_to_skip + 1, 0
        found = self._find_weights()
        if not found:
            return
        if not self._is_described and len(self._episodes) < _MAX_EPISODES + _MAX_USED:
            self._is_described = True
            self._episodes.append(now)
        if self._is_described:
            self._change(weights_after=found)
            self._write(self._model, self._episodes)


def _no_batch() -> torch.Tensor | None:
    return None

"""The parameters of an optimizer whose gradients the user's own collectives reduce, and their buckets."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from instrumented_ddp.bucket_plan import ObservedPlan, ParameterSpec
from instrumented_ddp.collectives.gradient_memory import find_in_memory
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketRecords, PlanRecords
from instrumented_ddp.stock.own_buckets import UserReduction, assign_gradients


class ReducedByUser:
    """The parameters of one optimizer, whose gradients the user's own collectives reduce.

    Args:
        parameters: parameters with a gradient. They are not kept alive.
        names: their names.
        class_name: class of the module that holds them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], class_name: str) -> None:
        self.number = 0
        """Number of the model in its process."""
        self.class_name = class_name
        self.device = parameters[0].device
        self.plan: ObservedPlan | None = None
        self.next_bucket = 0
        """Bucket that is expected next."""
        self.has_other_buckets = False
        """True if an update came before all buckets were launched: its plan is found anew."""
        self._names = list(names)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._is_updated_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._first_parameters: list[weakref.ref[torch.Tensor]] = []
        """First parameter of each bucket."""
        self._are_in_place: list[bool] = []
        """For each bucket, whether its gradients are reduced where they are, and not in a copy."""
        self._epochs = 0
        self._records: PlanRecords | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that still exist."""
        return [one for reference in self._parameters if (one := reference()) is not None]

    def adopt(self, reductions: Sequence[UserReduction], recorder: Recorder | None) -> bool:
        """Find out which reductions are its buckets, and return whether they are most of its gradients."""
        held = [
            (name, one)
            for name, reference in zip(self._names, self._parameters, strict=True)
            if (one := reference()) is not None and has_dense_gradient(one)
        ]
        found = assign_gradients(reductions, [one.grad for _, one in held])  # type: ignore[misc]
        if not found:
            return False
        specs = tuple(_describe(name, one) for name, one in held)
        plan = ObservedPlan(
            parameters=specs,
            buckets=tuple(run for _, run in found),
            reduces=tuple(reductions[index].traffic for index, _ in found),
        )
        if self.plan is None or (plan.hash, plan.reduces) != (self.plan.hash, self.plan.reduces):
            self.plan, self._records = plan, None
        self._first_parameters = [weakref.ref(held[run[0]][1]) for _, run in found]
        self._are_in_place = [self._works_on(number, reductions[index]) for number, (index, _) in enumerate(found)]
        self.next_bucket, self.has_other_buckets = 0, False
        if recorder is not None:
            self.activate(recorder)
        return True

    def activate(self, recorder: Recorder) -> None:
        """Write its plan, if that is new."""
        if self._records is None and self.plan is not None:
            reason = "rebuild" if self._epochs else "construction"
            self._records = recorder.activate_plan(self.number, self._epochs, self.plan, reason)
            self._epochs += 1

    def find_bucket(self, reduction: UserReduction) -> int | None:
        """Return the next bucket that a collective can be; None if it is none of its own."""
        if self.plan is None or self.has_other_buckets:
            return None
        reduces = self.plan.reduces
        for number in (*range(self.next_bucket, len(reduces)), *range(self.next_bucket if self.is_reduced else 0)):
            if reduces[number] == reduction.traffic and self._may_be(number, reduction):
                return number
        return None

    def _may_be(self, number: int, reduction: UserReduction) -> bool:
        """Return whether a collective can be a bucket by the memory that it works on, or the bucket is a copy."""
        if self._are_in_place[number]:
            return self._works_on(number, reduction)
        return self._first_parameters[number]() is not None

    def is_in_place(self, number: int) -> bool:
        """Return whether a bucket's gradients are reduced where they are, and not in a copy."""
        return self._are_in_place[number]

    def _works_on(self, number: int, reduction: UserReduction) -> bool:
        """Return whether a collective works on the memory of a bucket's first gradient."""
        parameter = self._first_parameters[number]()
        if parameter is None or not has_dense_gradient(parameter):
            return False
        return bool(find_in_memory(enumerate(reduction.memory), [parameter.grad]))

    def launch(self, number: int) -> BucketRecords:
        """Return the records of a bucket that is about to be launched."""
        assert self._records is not None
        self.next_bucket = number + 1
        return self._records.buckets[number]

    @property
    def is_reduced(self) -> bool:
        """Return whether all buckets were launched since the last update."""
        return self.plan is not None and self.next_bucket == len(self.plan.buckets)

    def on_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to update: if buckets are missing, the loop has others from now on."""
        is_own = self._is_updated_by.get(optimizer)
        if is_own is None:
            own = set(map(id, self.parameters))
            groups = getattr(optimizer, "param_groups", ())  # a user's class may lack it
            is_own = any(id(parameter) in own for group in groups for parameter in group["params"])
            self._is_updated_by[optimizer] = is_own
        if not is_own:
            return
        if self.plan is not None and 0 < self.next_bucket < len(self.plan.buckets):
            self.has_other_buckets = True
        self.next_bucket = 0


def has_dense_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a gradient that is no sparse and no distributed tensor."""
    gradient = parameter.grad
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _describe(name: str, parameter: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        device=parameter.device,
        elements=parameter.numel(),
    )

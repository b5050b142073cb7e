"""The memory of a model whose optimizer is sharded, and what becomes of its buckets.

Parameters and gradients lie in contiguous buffers, see ``layout.py``. A backward leaves each rank with the average of
its own shard of each bucket, which the optimizer takes from there; ``parameter.grad`` is None afterwards, because no
rank has the average of a whole gradient. Half-precision parameters have gradients and *main weights* in single
precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp.before_forward import BeforeForward
from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.bucket_collective import Collective
from instrumented_ddp.recording.observer import Observer
from instrumented_ddp.reduction.bucket import Bucket, as_real, views_like
from instrumented_ddp.reduction.reducer import Reducer
from instrumented_ddp.replicas.replica import Replica
from instrumented_ddp.sharded.layout import Fragment, Layout, gradient_dtype
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import Phase


@dataclass(frozen=True, eq=False, kw_only=True)
class Owned:
    """A fragment of this rank's."""

    fragment: Fragment
    name: str
    """Of its parameter."""
    main: torch.Tensor
    """(elements,) what the optimizer updates, and where it finds the gradient; single precision at least."""
    weight: torch.Tensor
    """(elements,) its place in the parameter; of the same memory as ``main`` unless the parameter is less precise."""


class Removable(Protocol):
    """A hook, or several."""

    def remove(self) -> None:
        """Leave the module alone."""


class Shards:
    """Of one model, for its ``ShardedOptimizer``.

    Args:
        module: whose parameters move into buffers, where they have to stay.
        parameters: of the layout, by number.
        plan: their buckets.
        group: the ranks among whom buckets are divided.
        pads_to: a bucket's size is a multiple of this.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        plan: BucketPlan,
        group: dist.ProcessGroup,
        pads_to: int,
    ) -> None:
        self.module, self.parameters = module, parameters
        layout = self.layout = Layout(plan.parameters, plan.buckets, group.size(), pads_to)
        self._is_no_sync = False
        self._gathering: dict[int, Collective] = {}
        """By bucket, what is under way."""
        self._reducer: Reducer | None = None
        self.has_optimizer = False
        """Whether anybody uses the gradients."""
        self._weights: list[torch.Tensor] = [torch.empty(0)] * len(layout.buckets)
        self._gradients = list(self._weights)
        self._places: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            self._move_into_buffers()
            self.owned = [self._owned(fragment) for fragment in layout.fragments(group.rank())]
        self._owned_of = [[one for one in self.owned if one.fragment.bucket == n] for n in range(len(layout.buckets))]
        bucket_of = {parameters[index]: number for number, bucket in enumerate(layout.buckets) for index in bucket}
        self._hooks: list[Removable] = [
            BeforeForward(module, bucket_of, self.wait),
            module.register_state_dict_pre_hook(self._before_state_dict),
            module.register_load_state_dict_pre_hook(self._before_state_dict),
            module.register_load_state_dict_post_hook(self._after_loading),
        ]

    def _move_into_buffers(self) -> None:
        layout, device = self.layout, self.parameters[0].device
        for buffer in layout.buffers:
            sizes = [layout.elements(number) for number in buffer]
            dtype = layout.dtype(buffer[0])
            weights = torch.zeros(sum(sizes), dtype=dtype, device=device)
            gradients = torch.zeros(sum(sizes), dtype=gradient_dtype(dtype), device=device)
            for number, weight, gradient in zip(buffer, weights.split(sizes), gradients.split(sizes), strict=True):
                self._weights[number], self._gradients[number] = weight, gradient
                parameters = [self.parameters[index] for index in layout.buckets[number]]
                views = views_like(weight, parameters, layout.starts(number))
                for index, parameter, view in zip(layout.buckets[number], parameters, views, strict=True):
                    view.copy_(parameter)
                    parameter.data = self._places[index] = view

    def _owned(self, fragment: Fragment) -> Owned:
        bucket = self._weights[fragment.bucket]
        weight = bucket[fragment.place : fragment.place + fragment.end - fragment.begin]
        dtype = gradient_dtype(weight.dtype)
        main = weight.detach() if dtype is weight.dtype else weight.to(dtype)
        name = self.layout.parameters[fragment.parameter].name
        return Owned(fragment=fragment, name=name, main=main.requires_grad_(), weight=weight)

    # -- gradients -----------------------------------------------------------------------------------------------

    def make_bucket(self, number: int, indices: tuple[int, ...], *args: Any, **settings: Any) -> Bucket:
        """A bucket in these buffers, for the reducer."""
        assert self.layout.buckets[number] == indices
        return ShardedBucket(
            self._owned_of[number],
            number,
            indices,
            *args,
            **settings | {"gradients_are_views": False},
            storage=self._gradients[number],
            starts=self.layout.starts(number),
        )

    def drop_gradients(self) -> None:
        """They have been used, or are not wanted."""
        for one in self.owned:
            one.main.grad = None

    # -- parameters ----------------------------------------------------------------------------------------------

    def updated(self) -> None:
        """The optimizer has updated this rank's shards: have the others get them. Called on all ranks."""
        with torch.no_grad():
            for one in self.owned:
                if one.main.dtype is not one.weight.dtype:
                    one.weight.copy_(one.main)
        self.drop_gradients()
        self._gather()

    def _gather(self) -> None:
        reducer = self._reducer
        assert reducer is not None
        for number in reversed(range(len(self.layout.buckets))):  # the forward begins with what comes last in backward
            self.wait(number)
            weights = as_real(self._weights[number])
            self._gathering[number] = reducer.averaging.gather(reducer.buckets[number], weights)

    def wait(self, number: int) -> None:
        """Wait until the parameters of a bucket are there.

        Raises:
            RuntimeError: what the backend says if a rank is gone.
        """
        collective = self._gathering.get(number)
        if collective is None:
            return
        reducer = self._reducer
        assert reducer is not None
        with self._waiting(reducer.events.observer):
            reducer.averaging.wait(reducer.buckets[number], collective)
        del self._gathering[number]  # not if that has failed: nobody goes on with half of an update

    @contextmanager
    def _waiting(self, observer: Observer | None) -> Iterator[None]:
        """Of a forward that is a phase. Elsewhere, as for a checkpoint, the watchdogs alone have to know."""
        phase = None if observer is None else observer.phase
        if observer is not None and phase in (Phase.FORWARD, Phase.EVALUATION):
            observer.enter(Phase.FINALISE, no_sync=self._is_no_sync)
            yield
            observer.enter(phase, no_sync=self._is_no_sync)
        elif observer is not None and observer.collectives is not None:
            with observer.collectives.position.waits():
                yield
        else:
            yield

    def have_arrived(self) -> bool:
        """Whether all parameters are there."""
        return all(collective.is_over for collective in self._gathering.values())

    def wait_for_all(self) -> None:
        """Wait until all parameters are there. Whoever reads them outside of a forward calls this first."""
        for number in list(self._gathering):
            self.wait(number)

    def load_main_weights(self) -> None:
        """The parameters have been set by somebody else than the optimizer."""
        with torch.no_grad():
            for one in self.owned:
                if one.main.dtype is not one.weight.dtype:
                    one.main.copy_(one.weight)

    def _before_state_dict(self, *_: object) -> None:
        self.wait_for_all()

    def _after_loading(self, *_: object) -> None:
        self.load_main_weights()

    # -- the wrapper ---------------------------------------------------------------------------------------------

    def reduce_with(self, reducer: Reducer, wrapper: nn.Module, replica: Replica | None) -> None:
        """A reducer has the buckets, as long as its wrapper is there.

        Args:
            replica: takes fingerprints, of parameters that have arrived.
        """
        self._reducer = reducer
        weakref.finalize(wrapper, self.close).atexit = False
        if replica is not None:
            replica.is_at_rest, replica.come_to_rest = self.have_arrived, self.wait_for_all

    def close(self) -> None:
        """The wrapper is gone: leave the module as it is, and alone. May be called twice."""
        self.wait_for_all()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forward_begins(self, *, no_sync: bool, is_joined: bool) -> None:
        """The wrapper is called.

        Args:
            no_sync: the gradients of this pass are not to be reduced.
            is_joined: under ``join()``.

        Raises:
            OverlapScopeError: the optimizer that would use the gradients is missing, or parameters have left the
                buffers, or ``join()``.
        """
        self._is_no_sync = no_sync
        if is_joined:
            raise OverlapScopeError(
                "a sharded optimizer can't train under join(): every rank has to update its shards in every step"
            )
        if not self.has_optimizer and any(one.main.grad is not None for one in self.owned):
            raise OverlapScopeError(
                "gradients were reduced to shards, and no optimizer uses them: make it with ShardedOptimizer(model, "
                "torch.optim.AdamW, lr=...)"
            )
        for index, place in self._places.items():
            if self.parameters[index].data_ptr() != place.data_ptr():
                raise OverlapScopeError(
                    f"parameter {self.layout.parameters[index].name} has been moved out of the buffer that ranks "
                    "exchange: call .to(), .half() and the like before the module is wrapped"
                )


class ShardedBucket(Bucket):
    """One that hands the averages of a shard to the optimizer.

    Args:
        owned: fragments of this rank's in it.
        args: as of ``Bucket``.
        settings: likewise.
    """

    __slots__ = ("_owned",)

    def __init__(self, owned: Sequence[Owned], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._owned = owned

    def copy_in_large(self, index: int, divisor: int | None) -> None:
        """Copy one gradient in, and free its memory."""
        super().copy_in_large(index, divisor)
        self._large[index][0].grad = None

    def copy_in_small(self, divisor: int | None) -> None:
        """Copy in all that are not large, and free their memory."""
        super().copy_in_small(divisor)
        for parameter, _ in self._small:
            parameter.grad = None

    def copy_out(self, result: torch.Tensor, is_used_anywhere: Callable[[int], bool] | None) -> None:
        """Add the averages of this rank's shard to what its optimizer has."""
        flat = torch.view_as_complex(result.view(-1, 2)) if self._storage.is_complex() else result
        for one in self._owned:
            fragment = one.fragment
            if is_used_anywhere is not None and not is_used_anywhere(fragment.parameter):
                continue
            average = flat[fragment.place : fragment.place + fragment.end - fragment.begin]
            if one.main.grad is None:
                one.main.grad = average.detach().clone()
            else:
                one.main.grad += average.detach()

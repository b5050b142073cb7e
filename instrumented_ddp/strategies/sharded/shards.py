"""Memory of a model whose optimizer is sharded, and the exchange of its gradient and parameter shards.

Parameters and gradients lie in contiguous buffers, see ``layout.py``. A backward leaves each rank with the average of
its own shard of each bucket, which the optimizer takes from there; ``parameter.grad`` is None afterwards, because no
rank has the average of a whole gradient. Half-precision parameters have gradients and *main weights* in single
precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.records import BucketCollective
from instrumented_ddp.reduction.bucket import Bucket, as_real, views_like
from instrumented_ddp.reduction.reducer import Reducer
from instrumented_ddp.reduction.strategy import PendingUpdates
from instrumented_ddp.strategies.sharded.layout import Fragment, Layout, gradient_dtype
from overlapscope.errors import OverlapScopeError


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnedFragment:
    """A fragment of a parameter that this rank owns."""

    fragment: Fragment
    name: str
    """Name of the parameter."""
    main: torch.Tensor
    """(elements,) weights that the optimizer updates, with their gradient; at least in single precision."""
    weight: torch.Tensor
    """(elements,) view of the parameter; shares memory with ``main`` unless the parameter is less precise."""


class Removable(Protocol):
    """A removable hook, or several."""

    def remove(self) -> None:
        """Remove the hook from the module."""


class ParameterShards(PendingUpdates):
    """The shards of one model, for its ``ShardedOptimizer``.

    Args:
        module: module whose parameters move into buffers, where they have to stay.
        parameters: parameters of the layout, by index.
        plan: their buckets.
        group: the ranks among which buckets are divided.
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
        self._gathering: dict[int, BucketCollective] = {}
        """All-gathers in flight, by bucket."""
        self._reducer: Reducer | None = None
        self.has_optimizer = False
        """True if an optimizer uses the gradients."""
        self._weights: list[torch.Tensor] = [torch.empty(0)] * len(layout.buckets)
        self._gradients = list(self._weights)
        self._weight_views: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            self._move_into_buffers()
            self.owned = [self._owned(fragment) for fragment in layout.fragments(group.rank())]
        self._owned_of = [[one for one in self.owned if one.fragment.bucket == n] for n in range(len(layout.buckets))]
        bucket_of = {parameters[index]: number for number, bucket in enumerate(layout.buckets) for index in bucket}
        self._hooks: list[Removable] = [
            PreForwardWait(module, bucket_of, self.wait),
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
                    parameter.data = self._weight_views[index] = view

    def _owned(self, fragment: Fragment) -> OwnedFragment:
        bucket = self._weights[fragment.bucket]
        weight = bucket[fragment.location : fragment.location + fragment.end - fragment.begin]
        dtype = gradient_dtype(weight.dtype)
        main = weight.detach() if dtype is weight.dtype else weight.to(dtype)
        name = self.layout.parameters[fragment.parameter].name
        return OwnedFragment(fragment=fragment, name=name, main=main.requires_grad_(), weight=weight)

    # -- gradients -----------------------------------------------------------------------------------------------

    def make_bucket(self, number: int, indices: tuple[int, ...], *args: Any, **settings: Any) -> Bucket:
        """Return a bucket in these buffers, for the reducer."""
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
        """Drop the gradients, which have been used or are not wanted."""
        for one in self.owned:
            one.main.grad = None

    # -- parameters ----------------------------------------------------------------------------------------------

    def on_optimizer_step(self) -> None:
        """Launch the exchange of parameters after the optimizer has updated this rank's shards. Called on all ranks."""
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
        """Wait until the parameters of a bucket have arrived.

        Raises:
            RuntimeError: the backend's error, if a rank is gone.
        """
        collective = self._gathering.get(number)
        if collective is None:
            return
        reducer = self._reducer
        assert reducer is not None
        with reducer.events.waiting_for_parameters(no_sync=self._is_no_sync):
            reducer.averaging.wait(reducer.buckets[number], collective)
        del self._gathering[number]  # not if the wait has failed: nobody must continue with half of an update

    @property
    def are_complete(self) -> bool:
        """Return whether all parameters have arrived."""
        return all(collective.is_over for collective in self._gathering.values())

    def finish(self) -> None:
        """Wait until all parameters have arrived. Must be called before they are read outside of a forward."""
        for number in list(self._gathering):
            self.wait(number)

    def load_main_weights(self) -> None:
        """Update the main weights after the parameters were set by other code than the optimizer."""
        with torch.no_grad():
            for one in self.owned:
                if one.main.dtype is not one.weight.dtype:
                    one.main.copy_(one.weight)

    def _before_state_dict(self, *_: object) -> None:
        self.finish()

    def _after_loading(self, *_: object) -> None:
        self.load_main_weights()

    # -- the wrapper ---------------------------------------------------------------------------------------------

    def reduce_with(self, reducer: Reducer, wrapper: nn.Module) -> None:
        """Attach the reducer that has the buckets, for as long as its wrapper exists."""
        self._reducer = reducer
        weakref.finalize(wrapper, self.close).atexit = False

    def close(self) -> None:
        """Remove all hooks from the module, when the wrapper is gone. May be called twice."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_forward_start(self, *, no_sync: bool, is_joined: bool) -> None:
        """Check, when the wrapper is called, that the model can be trained.

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
        for index, location in self._weight_views.items():
            if self.parameters[index].data_ptr() != location.data_ptr():
                raise OverlapScopeError(
                    f"parameter {self.layout.parameters[index].name} has been moved out of the buffer that ranks "
                    "exchange: call .to(), .half() and the like before the module is wrapped"
                )


class PreForwardWait:
    """Pre-hooks on each module's forward that wait for the in-flight parameters the module uses.

    Communication thus overlaps with the forward of the preceding modules.

    Some modules' own forward is never called although their parameters are used (such as ``out_proj`` in
    ``nn.MultiheadAttention``, whose weight the parent module reads); their parameters are waited for before the root's
    forward.

    Args:
        module: the root.
        parts: number of the part that each parameter belongs to.
        wait: called with a part's number before a forward uses it, perhaps several times; blocks until the part is
            available.
    """

    def __init__(self, module: nn.Module, parts: Mapping[nn.Parameter, int], wait: Callable[[int], None]) -> None:
        self._wait = wait
        self._uncalled_modules: dict[nn.Module, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        for one in module.modules():
            used = dict.fromkeys(parts[parameter] for parameter in one.parameters(recurse=False) if parameter in parts)
            if used:
                self._uncalled_modules[one] = tuple(used)
                self._handles.append(one.register_forward_pre_hook(partial(self._before, tuple(used)), prepend=True))
        self._handles.append(module.register_forward_pre_hook(self._before_all, prepend=True))

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @_disable_dynamo
    def _before(self, parts: tuple[int, ...], module: nn.Module, _: tuple[torch.Tensor, ...]) -> None:
        self._uncalled_modules.pop(module, None)
        for part in parts:
            self._wait(part)

    @_disable_dynamo
    def _before_all(self, *_: object) -> None:
        for parts in self._uncalled_modules.values():
            for part in parts:
                self._wait(part)


class ShardedBucket(Bucket):
    """A bucket that hands the averages of a shard to the optimizer.

    Args:
        owned: fragments of this rank in the bucket.
        args: arguments of ``Bucket``.
        settings: keyword arguments of ``Bucket``.
    """

    __slots__ = ("_owned",)

    def __init__(self, owned: Sequence[OwnedFragment], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._owned = owned

    def copy_in_large(self, index: int, divisor: int | None) -> None:
        """Copy one gradient in, and free its memory."""
        super().copy_in_large(index, divisor)
        self._large[index][0].grad = None

    def copy_in_small(self, divisor: int | None) -> None:
        """Copy in all gradients that are not large, and free their memory."""
        super().copy_in_small(divisor)
        for parameter, _ in self._small:
            parameter.grad = None

    def copy_out(self, result: torch.Tensor, is_used_anywhere: Callable[[int], bool] | None) -> None:
        """Add the averages of this rank's shard to the optimizer's gradients."""
        flat = torch.view_as_complex(result.view(-1, 2)) if self._storage.is_complex() else result
        for one in self._owned:
            fragment = one.fragment
            if is_used_anywhere is not None and not is_used_anywhere(fragment.parameter):
                continue
            average = flat[fragment.location : fragment.location + fragment.end - fragment.begin]
            if one.main.grad is None:
                one.main.grad = average.detach().clone()
            else:
                one.main.grad += average.detach()

"""A bucket of gradients: a flat buffer, a view of it for each gradient, and its progress in this backward.

Copying follows what stock DDP does to the bit: copies are multiplied by 1/N on their way in, gradients that already
are views are divided by N in place (``mark_variable_ready_dense`` in torch/csrc/distributed/c10d/reducer.cpp).
A large gradient is copied as soon as it is ready, on a CPU while it is in the caches; small ones wait until the bucket
is ready and are copied together, because a call from Python costs more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch

from instrumented_ddp.recording.records import BucketCollective

_LARGE_ON_HOST_BYTES: Final = 32 * 1024
_LARGE_ON_DEVICE_BYTES: Final = 4 * 1024**2
"""Size in bytes from which reading a gradient from memory again costs more than a call from Python, on the host and
on a device. There a kernel takes 2 to 3 us, in which 4 MB are read and written; the call takes the host 5 to 10."""


class Bucket:
    """A flat buffer for some gradients, filled in a backward and copied out at its end.

    Args:
        number: index of the bucket in the plan.
        indices: indices of its parameters.
        dtype: dtype of the buffer if it is not that of the parameters.
        is_sparse: it holds the sparse gradient of its one parameter; the gradient itself is its buffer.
        gradients_are_views: ``parameter.grad`` is a view of the buffer. Existing gradients are copied in.
        is_divided_as_a_whole: torch's ``batched_grad_copy``: copies are divided by N as well, with the whole buffer.
        storage: a flat tensor to use; None to allocate one.
        starts: offsets of its parameters in the storage, in elements; None if they are contiguous.
    """

    __slots__ = (
        "_gradients_are_views",
        "_is_divided_as_a_whole",
        "_large",
        "_shares",
        "_small",
        "_starts",
        "_storage",
        "buffer",
        "collective",
        "device",
        "indices",
        "is_ready",
        "is_sparse",
        "number",
        "parameters",
        "views",
    )

    def __init__(
        self,
        number: int,
        indices: tuple[int, ...],
        parameters: Sequence[torch.nn.Parameter],
        *,
        dtype: torch.dtype | None,
        is_sparse: bool,
        gradients_are_views: bool,
        is_divided_as_a_whole: bool,
        storage: torch.Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        self.number = number
        self.indices = indices
        self.parameters = parameters
        self.is_sparse = is_sparse
        self._gradients_are_views = gradients_are_views
        self._is_divided_as_a_whole = is_divided_as_a_whole
        self._shares: dict[int, torch.Tensor] = {}
        first = parameters[0]
        self.device = first.device
        if storage is None:
            elements = 0 if is_sparse else sum(parameter.numel() for parameter in parameters)
            storage = torch.empty(elements, dtype=dtype or first.dtype, device=first.device)
        self._storage, self._starts = storage, starts
        self._make_views()
        if gradients_are_views and not is_sparse:
            self._move_gradients_in()
        self.reset()

    def _make_views(self) -> None:
        self.buffer = as_real(self._storage)
        """Buffer that is sent; complex numbers are sent as pairs of real ones."""
        self.views = [] if self.is_sparse else views_like(self._storage, self.parameters, self._starts)
        slots = list(zip(self.indices, self.parameters, self.views, strict=not self.is_sparse))
        large_bytes = _LARGE_ON_HOST_BYTES if self.device.type == "cpu" else _LARGE_ON_DEVICE_BYTES
        self._large = {
            index: (parameter, view)
            for index, parameter, view in slots
            if view.nbytes >= large_bytes and not self._is_divided_as_a_whole
        }
        self._small = [(parameter, view) for index, parameter, view in slots if index not in self._large]

    def _move_gradients_in(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                with torch.no_grad():
                    view.copy_(parameter.grad)
                parameter.grad = view

    def prefault(self) -> None:
        """Fault in the memory now, so that the first backward with it is as fast as later ones."""
        if not self._gradients_are_views or all(parameter.grad is None for parameter in self.parameters):
            self._storage.zero_()

    def reset(self) -> None:
        """Expect all gradients again."""
        self.is_ready = False
        self.collective: BucketCollective | None = None
        if self._storage.requires_grad:  # a backward with create_graph=True has left its graph here
            self._storage = self._storage.detach()
            self._make_views()

    def is_large(self, index: int) -> bool:
        """Return whether a parameter's gradient is to be copied in as soon as it is ready."""
        return index in self._large

    def copy_in_large(self, index: int, divisor: int | None) -> None:
        """Copy one gradient in, divided by ``divisor``. None leaves the division to a communication hook."""
        parameter, view = self._large[index]
        gradient = parameter.grad
        if gradient is None:  # not used on this rank, but perhaps on another
            view.zero_()
        elif gradient is view:
            if divisor is not None:
                view.div_(divisor)
        else:
            if divisor is None:
                view.copy_(gradient)
            elif torch.is_grad_enabled() and gradient.requires_grad:  # create_graph=True: copies keep their graph
                view.copy_(gradient * self._share(divisor))
            else:
                torch.mul(gradient, self._share(divisor), out=view)
            if self._gradients_are_views:
                parameter.grad = view

    def copy_in_small(self, divisor: int | None) -> None:
        """Copy in all gradients that are not large.

        Raises:
            RuntimeError: a sparse gradient is missing or dense.
        """
        if self.is_sparse:
            self._take_sparse_gradient(divisor)
            return
        outside_gradients: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        view_gradients: list[torch.Tensor] = []
        for parameter, view in self._small:
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is view:
                view_gradients.append(view)
            else:
                outside_gradients.append(gradient)
                targets.append(view)
        is_divided = self._copy_and_divide(targets, outside_gradients, divisor)
        if view_gradients and divisor is not None and not is_divided:
            self._divide(view_gradients, divisor)
        if self._gradients_are_views and outside_gradients:
            for parameter, view in self._small:
                if parameter.grad is not None:
                    parameter.grad = view

    def _copy_and_divide(self, targets: list[torch.Tensor], gradients: list[torch.Tensor], divisor: int | None) -> bool:
        """Copy gradients in, divided, and return whether that has divided the whole buffer."""
        if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
            for target, gradient in zip(targets, gradients, strict=True):
                target.copy_(gradient if divisor is None else gradient * self._share(divisor))
            return False
        _copy(targets, gradients)
        if divisor is None:
            return False
        if self._is_divided_as_a_whole:
            self._storage.div_(divisor)
            return True
        self._scale(targets, self._share(divisor))
        return False

    def _share(self, divisor: int) -> torch.Tensor:
        """Return 1/N as a cached tensor, because a Python number is converted to one in every call."""
        share = self._shares.get(divisor)
        if share is None:
            # Where the buffer is less precise than float32, torch multiplies by float32 all the same.
            dtype = torch.float64 if self._storage.dtype in (torch.float64, torch.complex128) else torch.float32
            share = self._shares[divisor] = torch.tensor(1.0 / divisor, dtype=dtype)
        return share

    def _scale(self, views: list[torch.Tensor], factor: torch.Tensor) -> None:
        if len(views) == len(self.views):
            self._storage.mul_(factor)
        elif views:
            torch._foreach_mul_(views, factor)

    def _divide(self, views: list[torch.Tensor], divisor: int) -> None:
        if len(views) == len(self.views):
            self._storage.div_(divisor)
        elif views:
            torch._foreach_div_(views, divisor)

    def _take_sparse_gradient(self, divisor: int | None) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            raise RuntimeError("Expected sparse gradient to be defined.")
        if not gradient.is_sparse:
            raise RuntimeError("Expected variable to have sparse gradient.")
        self.buffer = gradient
        if divisor is not None:
            gradient.div_(divisor)

    def copy_out(self, result: torch.Tensor, is_used_anywhere: Callable[[int], bool] | None) -> None:
        """Copy the averages to the parameters' gradients.

        Args:
            result: the buffer, or the tensor that a communication hook has returned instead.
            is_used_anywhere: returns whether a parameter was used in any rank's loss; the gradient of an unused one is
                left unchanged. None if all were used.

        Raises:
            RuntimeError: somebody replaced a gradient that should be a view of the buffer.
        """
        if self.is_sparse:
            if result is not self.buffer:
                self.buffer.copy_(result)
            return
        views = self.views
        if result is not self.buffer:
            flat = _as_dtype(result, self._storage)
            views = [flat.as_strided(view.size(), view.stride(), view.storage_offset()) for view in self.views]
        if self._gradients_are_views:
            if views is not self.views:
                with torch.no_grad():
                    _copy(self.views, views)
            self._point_gradients_at_views(is_used_anywhere)
            return
        gradients: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        for index, parameter, view in zip(self.indices, self.parameters, views, strict=True):
            if is_used_anywhere is not None and not is_used_anywhere(index):
                continue
            if parameter.grad is None:
                parameter.grad = view.detach().clone()
            else:
                gradients.append(parameter.grad)
                averages.append(view)
        if self._storage.requires_grad:  # create_graph=True again: the fused copy has no derivative
            for gradient, average in zip(gradients, averages, strict=True):
                gradient.copy_(average)
        else:
            _copy(gradients, averages)

    def _point_gradients_at_views(self, is_used_anywhere: Callable[[int], bool] | None) -> None:
        for index, parameter, view in zip(self.indices, self.parameters, self.views, strict=True):
            if parameter.grad is view or (is_used_anywhere is not None and not is_used_anywhere(index)):
                continue
            if parameter.grad is not None and not _share_memory(parameter.grad, view):
                raise RuntimeError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view with "
                    "gradient_as_bucket_view=True. This may happen (for example) if multiple allreduce hooks were "
                    "registered onto the same parameter. If you hit this error, please file an issue with a minimal "
                    "repro."
                )
            parameter.grad = view


def _copy(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, tensors)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs of real ones; other tensors as they are."""
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _as_dtype(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex() and not flat.is_complex():
        return torch.view_as_complex(flat.view(-1, 2))
    return flat


def views_like(
    flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter], starts: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return one view of a flat buffer per parameter, with the memory layout of its gradient (channels last, say).

    Contiguous parameters of 6, 4 and 2 elements have the views [0, 6), [6, 10) and [10, 12).

    Args:
        starts: offsets of the parameters, in elements; None if they are contiguous.
    """
    if starts is None:
        starts = [0, *accumulate(parameter.numel() for parameter in parameters[:-1])]
    return [
        flat.as_strided(parameter.shape, strides_of(parameter), flat.storage_offset() + start)
        for parameter, start in zip(parameters, starts, strict=True)
    ]


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient, which is dense in memory."""
    return torch.empty_like(parameter, device="meta").stride()

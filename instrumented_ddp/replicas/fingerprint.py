"""Fingerprints of tensors: integers that depend on every bit, and are equal on all devices for equal bits.

All of it is integer arithmetic modulo 2**64, so the order of additions, the number of threads and the device don't
matter. Each word of a tensor is multiplied by an odd weight of its place, and the products are summed, so that two
changes that cancel each other would have to do so with weights that are unrelated.

Tensors are taken in *parts* of some neighbors, because what costs is the calls, not the bytes. The small tensors of a
part are copied one behind the other, multiplied and summed from the left: the fingerprint of each is the sum at its end
less the sum at its beginning. A large one is summed in columns where it lies, and the column sums of all large ones are
multiplied and summed together. So a part takes about ``4 + 2 + number of large tensors`` kernels.

For example, with small tensors ``a b`` and ``c``, the sums at the ends are ``w[0] a + w[1] b`` and
``w[0] a + w[1] b + w[2] c``. With 2 columns, the words ``a b c d e`` of a large one give
``w[0] (a + c) + w[1] (b + d) + w[-1] e``.

Nothing waits for a device. Temporary memory is at most 1.5 MB, and 8 KB for each large tensor of a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Final

import torch
from torch._utils import _flatten_dense_tensors

_COLUMNS: Final = 1024
_WORD_BYTES: Final = 8
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size, for small tensors, which need not consist of whole words of eight bytes."""
_MAX_SMALL_ELEMENTS: Final = 8192
_MAX_ODD_ELEMENTS: Final = 65_536
"""Maximum number of elements of a tensor that does not consist of whole words, and of all small tensors of a part."""
_MAX_PART_TENSORS: Final = 32
_MAX_PART_BYTES: Final = {"cpu": 4 * 1024**2, "cuda": 32 * 1024**2}
"""By type of device: what is read in about a half and a hundredth of a millisecond. A larger tensor is a part alone."""
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Classes whose data is known to be what they hold."""


class TensorPart:
    """Neighboring tensors whose fingerprints are taken together. References them weakly.

    Args:
        tensors: tensors that ``find_exclusion_reason`` does not exclude.
        indices: their numbers within the model.
        results: where the fingerprints go, of ``torch.int64``, in ``order``, on the tensors' device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int], results: torch.Tensor) -> None:
        large = [at for at, tensor in enumerate(tensors) if not _is_small(tensor)]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for at, tensor in enumerate(tensors):
            if _is_small(tensor):
                by_dtype.setdefault(tensor.dtype, []).append(at)
        self.order: list[int] = []
        """Numbers of the tensors in the order of the results."""
        self.is_running_sum: list[bool] = []
        """Whether a result includes the one before it, which is to be subtracted."""
        self._takers: list[tuple[int, int, Callable[[], bool]]] = []
        for batch in by_dtype.values():
            taker = _SmallTensors([tensors[at] for at in batch], results[len(self.order) :][: len(batch)])
            self._add(taker.take, [indices[at] for at in batch], is_running_sum=True)
        if large:
            self._columns = _LargeTensors([tensors[at] for at in large], results[len(self.order) :])
            for row, at in enumerate(large):
                self._add(self._columns.takers[row], [indices[at]], is_running_sum=False)
        self._finish: Callable[[], None] | None = self._columns.finish if large else None
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _add(self, take: Callable[[], bool], indices: list[int], *, is_running_sum: bool) -> None:
        begin = len(self.order)
        self.order += indices
        self.is_running_sum += [is_running_sum and at > 0 for at in range(len(indices))]
        self._takers.append((begin, len(self.order), take))

    def take(self) -> bytes:
        """Compute the fingerprints into the results, on the current stream.

        Returns:
            For each in ``order`` 1 if it is there; 0 if its tensor no longer exists, or not with the same layout.
        """
        is_taken = bytearray(len(self.order))
        for begin, end, take in self._takers:
            if take():
                is_taken[begin:end] = b"\x01" * (end - begin)
        if self._finish is not None:
            self._finish()
        return bytes(is_taken)


class _SmallTensors:
    """Small tensors of one dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor], results: torch.Tensor) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._layouts = [(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors]
        self._word = _WORDS[tensors[0].element_size()]
        ends = list(accumulate(tensor.numel() for tensor in tensors))
        self._weights = _weights(results.device)[: ends[-1]]
        self._last = torch.tensor([end - 1 for end in ends], device=results.device)
        self._results = results

    def take(self) -> bool:
        tensors = [reference() for reference in self._tensors]
        now = [None if tensor is None else (tensor.dtype, tensor.device, tensor.shape) for tensor in tensors]
        if now != self._layouts:  # for example under DDP's mixed precision
            return False
        words = _flatten_dense_tensors(tensors).view(self._word)
        torch.index_select((words * self._weights).cumsum_(0), 0, self._last, out=self._results)
        return True


class _LargeTensors:
    """Tensors of many whole words."""

    def __init__(self, tensors: Sequence[torch.Tensor], results: torch.Tensor) -> None:
        self._columns: torch.Tensor | None = None
        self._shape = (len(tensors), _COLUMNS)
        self._weights = _weights(results.device)
        self._results = results
        self._tails: list[tuple[int, torch.Tensor]] = []
        self.takers = [self._make_taker(tensor, row) for row, tensor in enumerate(tensors)]
        """Functions that sum the columns of a tensor, and return whether it is as it was."""

    def _make_taker(self, tensor: torch.Tensor, row: int) -> Callable[[], bool]:
        reference, device, elements = weakref.ref(tensor), tensor.device, tensor.numel()
        layout = (tensor.dtype, tensor.shape, tensor.stride())
        words = elements * tensor.element_size() // _WORD_BYTES
        rows, rest = divmod(words, _COLUMNS)

        def take() -> bool:
            now = reference()
            if now is None or now.device != device:
                return False
            data = now.detach()
            if (data.dtype, data.shape, data.stride()) != layout:
                return False
            flat = data.as_strided((elements,), (1,))
            if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
                return False
            if self._columns is None:
                self._columns = torch.empty(self._shape, dtype=torch.int64, device=device)
            whole = flat.view(torch.int64)
            torch.sum(whole.as_strided((rows, _COLUMNS), (_COLUMNS, 1)), 0, out=self._columns[row])
            if rest:
                self._tails.append((row, (whole[rows * _COLUMNS :] * self._weights[-rest:]).sum()))
            return True

        return take

    def finish(self) -> None:
        """Sum the columns of those that were taken."""
        if self._columns is None:
            return
        torch.sum(self._columns.mul_(self._weights[:_COLUMNS]), 1, out=self._results)
        for row, tail in self._tails:
            self._results[row].add_(tail)
        self._columns = None
        self._tails.clear()


def find_exclusion_reason(tensor: torch.Tensor, device: torch.device) -> str:
    """Return why a tensor has no fingerprint, if results are on this device; empty if it has one."""
    if type(tensor) not in _PLAIN or type(tensor.data) not in _PLAIN:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "not dense"
    if tensor.device != device or device.type not in _MAX_PART_BYTES:
        return f"on {tensor.device}"
    if tensor.is_complex():
        return "complex"
    if not tensor.numel():
        return "empty"
    if not _is_contiguous_in_any_order(tensor):
        return "not dense"
    if not _has_whole_words(tensor) and tensor.numel() > _MAX_ODD_ELEMENTS:
        return f"of {tensor.numel():,} elements"
    return ""


def describe_layout(tensor: torch.Tensor) -> str:
    """Describe the memory layout; equal bits have equal fingerprints if this is equal for all tensors of a model."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def divide_into_parts(tensors: Sequence[torch.Tensor]) -> list[range]:
    """Divide tensors into parts, in the same way on all ranks that have the same tensors.

    Returns:
        The numbers of the tensors of each part.
    """
    starts: list[int] = []
    part_bytes = part_small = 0
    for number, tensor in enumerate(tensors):
        tensor_bytes = tensor.numel() * tensor.element_size()
        small = tensor.numel() if _is_small(tensor) else 0
        if (
            not starts
            or number - starts[-1] >= _MAX_PART_TENSORS
            or part_bytes + tensor_bytes > _MAX_PART_BYTES[tensor.device.type]
            or part_small + small > _MAX_ODD_ELEMENTS
        ):
            starts.append(number)
            part_bytes = part_small = 0
        part_bytes, part_small = part_bytes + tensor_bytes, part_small + small
    return [range(begin, end) for begin, end in zip(starts, [*starts[1:], len(tensors)], strict=True)]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _MAX_SMALL_ELEMENTS or not _has_whole_words(tensor)


def _has_whole_words(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() % _WORD_BYTES == 0


def _is_contiguous_in_any_order(tensor: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers that are unrelated to each other."""
    return (torch.arange(_MAX_ODD_ELEMENTS, dtype=torch.int64, device=device) + 1) * -7046029254386353131 | 1

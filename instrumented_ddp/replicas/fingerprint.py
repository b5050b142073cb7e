"""Fingerprint of one tensor: an integer that depends on every bit of it, and is equal on all devices for equal bits.

All of it is integer arithmetic modulo 2**64, so the order of additions, the number of threads and the device don't
matter. Words of eight bytes are summed in columns, and the column sums with odd weights, so that two changes that
cancel each other would have to do so in every column. Nothing waits for a device, and no temporary as large as the
tensor is allocated.

For example, with 2 columns the words ``a b c d e`` give ``w[0] * (a + c) + w[1] * (b + d) + w[-1] * e``.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Final

import torch

_COLUMNS: Final = 1024
_WORD_BYTES: Final = 8
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size, for tensors that do not consist of whole words."""
_MAX_ODD_ELEMENTS: Final = 65_536
"""Maximum number of elements of such a tensor: each is widened, which takes memory."""
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Classes whose data is known to be what they hold."""


class Fingerprint:
    """Repeatedly computable fingerprint of one tensor, which it references weakly.

    Args:
        tensor: a parameter or buffer.
        device: device of the results; a tensor on another device has no fingerprint.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._tensor = weakref.ref(tensor)
        self._device = device
        self.exclusion_reason = _find_exclusion_reason(tensor, device)
        """Reason why it has no fingerprint; empty if it has one."""
        self.layout = "" if self.exclusion_reason else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        """Memory layout; equal bits have equal fingerprints if this is equal."""
        self._layout_key = () if self.exclusion_reason else (tensor.dtype, tensor.shape, tensor.stride())
        self._elements = 0 if self.exclusion_reason else tensor.numel()
        self.bytes = 0 if self.exclusion_reason else tensor.numel() * tensor.element_size()
        self._has_whole_words = self.bytes % _WORD_BYTES == 0

    def take(self, result: torch.Tensor) -> bool:
        """Compute the fingerprint into an element of ``torch.int64``, on the current stream.

        Returns:
            Whether the tensor still exists and its layout is unchanged.
        """
        tensor = self._tensor()
        if tensor is None or tensor.device != self._device:
            return False
        data = tensor.detach()
        if (data.dtype, data.shape, data.stride()) != self._layout_key:  # for example under DDP's mixed precision
            return False
        flat = data.as_strided((self._elements,), (1,))
        if not self._has_whole_words or flat.storage_offset() * flat.element_size() % _WORD_BYTES:
            if self._elements > _MAX_ODD_ELEMENTS:
                return False
            words = flat.view(_WORDS[flat.element_size()])
        else:
            words = flat.view(torch.int64)
        weights, count = _weights(self._device), words.numel()
        if count <= _MAX_ODD_ELEMENTS:
            torch.sum(words * weights[:count], 0, out=result)
            return True
        rows = count // _COLUMNS
        columns = words.as_strided((rows, _COLUMNS), (_COLUMNS, 1)).sum(0)
        torch.sum(columns.mul_(weights[:_COLUMNS]), 0, out=result)
        if rest := count - rows * _COLUMNS:
            result.add_((words[rows * _COLUMNS :] * weights[-rest:]).sum())
        return True


def _find_exclusion_reason(tensor: torch.Tensor, device: torch.device) -> str:
    if type(tensor) not in _PLAIN or type(tensor.data) not in _PLAIN:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "not dense"
    if tensor.device != device or device.type not in ("cpu", "cuda"):
        return f"on {tensor.device}"
    if tensor.is_complex():
        return "complex"
    if not tensor.numel():
        return "empty"
    if not _is_contiguous_in_any_order(tensor):
        return "not dense"
    whole = tensor.numel() * tensor.element_size() % _WORD_BYTES == 0
    if not whole and tensor.numel() > _MAX_ODD_ELEMENTS:
        return f"of {tensor.numel():,} elements"
    return ""


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

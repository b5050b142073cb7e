"""Which gradients lie in tensors that are reduced: those that a loop reduces where they are, and not in a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Memory(NamedTuple):
    """Where a dense tensor is: its storage, which is not kept alive, and its first byte there and the one behind it.

    An address would not do: the allocator gives that of a tensor which is gone to the next of its size.
    """

    storage: StorageWeakRef
    begin: int
    end: int


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return where a dense tensor is."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return Memory(StorageWeakRef(tensor.untyped_storage()), begin, begin + tensor.numel() * tensor.element_size())


def find_in_memory(
    memory: Iterable[tuple[int, Memory]], gradients: Iterable[torch.Tensor | None]
) -> dict[int, list[int]]:
    """Return which gradients lie in tensors.

    Args:
        memory: tensors, each with the number of what reduces it.
        gradients: gradients, of which those that are sparse are passed over.

    Returns:
        For each gradient that was found, by its index, the numbers of all that reduces it.
    """
    by_storage: dict[int, list[tuple[int, Memory]]] = {}
    for number, one in memory:
        by_storage.setdefault(one.storage.cdata, []).append((number, one))
    found: dict[int, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is None or gradient.layout is not torch.strided:
            continue
        begin = gradient.storage_offset() * gradient.element_size()
        end = begin + gradient.numel() * gradient.element_size()
        around = by_storage.get(gradient.untyped_storage()._cdata, ())
        if numbers := [number for number, one in around if one.begin <= begin and end <= one.end]:
            found[index] = numbers
    return found

"""Hashes of some batches, which tell whether ranks are given the same data, as without a ``DistributedSampler``.

The first tensor of a batch is looked at where a data loader returns it, or else where it is given to the model, if that
is on the host: what is on a device would have to be waited for. A few hundred of its elements are hashed, of the first
batches and then of every 32nd. A batch counts when a training forward follows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

_FIRST: Final = 4
_PERIOD: Final = 32
_LATEST: Final = 12
"""Number of hashes kept beside the first ones."""
_MAX_ELEMENTS: Final = 512
_MAX_DEPTH: Final = 4


class BatchHashes:
    """Hashes of the batches of this rank."""

    def __init__(self) -> None:
        self._batches = 0
        self._fetched: str | None = None
        """Hash of the latest batch of a data loader, which no training forward has used so far."""
        self._has_loader = False
        self._first: list[tuple[int, str]] = []
        self._latest: deque[tuple[int, str]] = deque(maxlen=_LATEST)

    @property
    def _is_due(self) -> bool:
        return self._batches < _FIRST or self._batches % _PERIOD == 0

    def on_fetched(self, batch: Any) -> None:
        """Look at a batch that a data loader has returned on the training thread."""
        self._has_loader = True
        self._fetched = _hash(batch) if self._is_due else ""

    def on_forward_start(self) -> None:
        """Count the batch of a data loader that a training forward uses."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._add(fetched)

    def on_inputs(self, inputs: Iterable[Any]) -> None:
        """Look at what a model is given, where there is no data loader."""
        if not self._has_loader:
            self._add(_hash(list(inputs)) if self._is_due else "")

    def _add(self, value: str) -> None:
        if value:
            (self._first if self._batches < _FIRST else self._latest).append((self._batches, value))
        self._batches += 1

    def latest(self) -> tuple[tuple[int, str], ...]:
        """Return the numbers of the batches that were looked at, and their hashes. Called on another thread."""
        return (*self._first, *self._latest)


def _hash(batch: Any) -> str:
    """Return the hash of the first tensor of a batch; empty without one on the host."""
    tensor = _find_tensor(batch, _MAX_DEPTH)
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return ""
    with torch.no_grad():
        stride = -(-tensor.numel() // _MAX_ELEMENTS)
        some = tensor.detach().reshape(-1)[::stride].contiguous()
        content = some.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(repr(tuple(tensor.shape)).encode() + content, digest_size=8).hexdigest()


def _find_tensor(value: Any, depth: int) -> torch.Tensor | None:
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    found = (_find_tensor(item, depth - 1) for item in items if depth)
    return next((one for one in found if one is not None), None)

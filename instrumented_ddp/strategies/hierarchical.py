"""Hierarchical all-reduce: rings within each host, then between hosts.

Each rank of a host sums one part of the buffer for the host, sums it with the ranks of other hosts that have the
same part, and sends it to its neighbors, as Horovod's hierarchical all-reduce does. So only ``1 / ranks per host`` of
the buffer is sent between hosts by each rank.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable

import torch

from instrumented_ddp.strategies import ring
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


class Hierarchical:
    """Hierarchical all-reduce, which finds out which ranks share a host at the first bucket.

    Args:
        host: returns the name of the host of this process.
    """

    def __init__(self, host: Callable[[], str] = socket.gethostname) -> None:
        self._host = host
        self._by_host: list[list[int]] | None = None

    def __call__(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Sum a flat buffer over the ranks of a wire, in place; by one ring if hosts' rank counts differ."""
        if self._by_host is None:
            self._by_host = self._group_by_host(wire, buffer.device)
        if len({len(ranks) for ranks in self._by_host}) > 1:
            ring.all_reduce(buffer, wire)
            return
        of_host = next(ranks for ranks in self._by_host if wire.rank in ranks)
        inside = wire.among(of_host, "in the host")
        between = wire.among([ranks[inside.rank] for ranks in self._by_host], "between hosts")
        parts = buffer.tensor_split(inside.size)
        ring.reduce_scatter(parts, inside)
        ring.all_reduce(parts[inside.rank], between)
        ring.all_gather(parts, inside)

    def _group_by_host(self, wire: Wire, device: torch.device) -> list[list[int]]:
        """Return the ranks of each host, in the same order on all ranks."""
        digest = hashlib.sha256(self._host().encode()).digest()
        parts = torch.zeros(wire.size, dtype=torch.int64, device=device).split(1)
        parts[wire.rank].fill_(int.from_bytes(digest[:7], "little"))
        ring.all_gather(parts, wire.among(range(wire.size), "of host names"))
        ranks: dict[int, list[int]] = {}
        for rank, part in enumerate(parts):
            ranks.setdefault(int(part.item()), []).append(rank)
        return list(ranks.values())


def strategy() -> Strategy:
    """Return a new strategy for one model: it remembers which ranks share a host."""
    return Strategy(name="hierarchical", all_reduce=Hierarchical())

"""Parameter servers: some of the ranks each sum a part of the buffer for all, and send back the sum.

With as many servers as ranks each sends ``2 (N - 1) / N`` buffers; with one, its link carries ``N - 1`` in each
direction. BytePS's ``docs/rationale.md`` compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


@dataclass(frozen=True)
class ParameterServers:
    """All-reduce in which the first ``count`` ranks serve, and train as well; None for all ranks."""

    count: int | None = None

    def __call__(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Sum a flat buffer over the ranks of a wire, in place."""
        servers = range(min(self.count or wire.size, wire.size))
        parts = buffer.tensor_split(len(servers))
        workers = [rank for rank in range(wire.size) if rank != wire.rank]
        own = parts[wire.rank] if wire.rank in servers else buffer[:0]
        pushed = [torch.empty_like(own) for _ in workers]
        of_others = [(parts[server], server) for server in servers if server != wire.rank]
        with wire.phase("to the servers", rounds=1):
            wire.exchange(sends=of_others, receives=list(zip(pushed, workers, strict=True)))
        for part in pushed:
            own += part
        with wire.phase("from the servers", rounds=1):
            wire.exchange(sends=[(own, worker) for worker in workers], receives=of_others)


STRATEGY = Strategy(name="parameter_server", all_reduce=ParameterServers())

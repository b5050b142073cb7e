"""Parameter servers: some of the ranks each sum a part of the buffer for all, and send back the sum.

With as many servers as ranks each sends ``2 (N - 1) / N`` buffers; with one, its link carries ``N - 1`` in each
direction. BytePS's ``docs/rationale.md`` compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.errors import OverlapScopeError

_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_END: Final = -1


class DedicatedServers:
    """Division of a job's ranks into workers and servers. Created on all of them, after ``init_process_group``.

    A worker sends each bucket once, in parts to ``k`` servers, and receives the sum; with N workers a server sends
    ``N / k`` of it. So it pays where servers have links of their own (Li et al., "Scaling distributed machine learning
    with the parameter server", 2014)::

        job = DedicatedServers(servers=1)  # on all ranks, of which the last ones serve
        if job.serves:
            job.serve()  # until the workers have ended
        else:
            model = DistributedDataParallel(model, process_group=job.workers, strategy=job.strategy)
            ...
            job.end()

    Args:
        servers: number of ranks that serve, the last ones.
        timeout: timeout of sends and receives; None for the backend's default.

    Raises:
        OverlapScopeError: no rank would be left to work, or to serve.
    """

    def __init__(self, servers: int = 1, timeout: timedelta | None = None) -> None:
        size = dist.get_world_size()
        if not 0 < servers < size:
            raise OverlapScopeError(f"{servers} of {size} ranks can't serve: at least one serves, and one works")
        self._workers, self._servers = range(size - servers), range(size - servers, size)
        self._all = dist.new_group(timeout=timeout)  # where nobody else sends anything
        self.workers = dist.new_group(list(self._workers), timeout=timeout)
        """The process group of the workers, for ``DistributedDataParallel``; of no use to servers."""
        self.serves = dist.get_rank() in self._servers
        """True if this rank is a server."""
        self.strategy = Strategy(name="dedicated_servers", all_reduce=self._push_and_pull)
        """The strategy for the workers."""

    def serve(self) -> None:
        """Sum what workers send, until all of them have ended.

        Raises:
            RuntimeError: a worker is gone, has timed out, or sends another bucket than the others.
        """
        with collective_context(CollectiveRole(role="segment")):
            self._serve(self._wire())

    def _serve(self, wire: Wire) -> None:
        headers = [torch.zeros(2, dtype=torch.int64) for _ in self._workers]
        while True:
            _exchange(wire, "a worker", receives=list(zip(headers, self._workers, strict=True)))
            elements, dtype = headers[0].tolist()
            if any(header.tolist() != [elements, dtype] for header in headers):
                described = ", ".join(f"worker {rank}: {header.tolist()}" for rank, header in enumerate(headers))
                raise RuntimeError(f"workers send different buckets (elements, kind of number): {described}")
            if elements == _END:
                return
            received = [torch.empty(elements, dtype=_DTYPES[dtype]) for _ in self._workers]
            _exchange(wire, "a worker", receives=list(zip(received, self._workers, strict=True)))
            total = received[0]
            for arrived in received[1:]:
                total += arrived
            _exchange(wire, "a worker", sends=[(total, worker) for worker in self._workers])

    def end(self) -> None:
        """Declare that this worker has no more gradients, and none in flight: servers end with the last worker."""
        if not self.serves:
            with collective_context(CollectiveRole(role="segment")):
                self._announce(self._wire(), [_END] * len(self._servers), 0)

    def _wire(self) -> Wire:
        """Return a wire for messages outside the sum of a bucket."""
        return Wire(self._all, range(self._all.size()), BucketSumRecorder(self.strategy.name, None, None))

    def _push_and_pull(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Replace a flat buffer by its sum over the workers."""
        if buffer.dtype not in _DTYPES:
            raise RuntimeError(f"dedicated servers don't add up {buffer.dtype}")
        wire = wire.over(self._all)
        parts = list(zip(buffer.tensor_split(len(self._servers)), self._servers, strict=True))
        self._announce(wire, [part.numel() for part, _ in parts], _DTYPES.index(buffer.dtype))
        with wire.phase("push", rounds=1):
            _exchange(wire, "a server", sends=parts)
        with wire.phase("pull", rounds=1):
            _exchange(wire, "a server", receives=parts)

    def _announce(self, wire: Wire, elements: list[int], dtype: int) -> None:
        """Announce the size and dtype of the next message to each server."""
        headers = [torch.tensor([number, dtype]) for number in elements]
        _exchange(wire, "a server", sends=list(zip(headers, self._servers, strict=True)))


def _exchange(
    wire: Wire,
    peer_kind: str,
    sends: list[tuple[torch.Tensor, int]] | None = None,
    receives: list[tuple[torch.Tensor, int]] | None = None,
) -> None:
    try:
        wire.exchange(sends=sends or (), receives=receives or ())
    except RuntimeError as error:
        ranks = ", ".join(str(rank) for _, rank in (sends or receives or ()))
        raise RuntimeError(f"{peer_kind} is gone or did not come in time (of ranks {ranks}): {error}") from error


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

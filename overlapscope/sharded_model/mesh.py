"""Times over another mesh: parameters sharded over fewer ranks, each shard with more replicas, or the other way round.

A ring of n ranks needs n - 1 rounds, in which (n - 1) / n of the bytes leave each rank, to gather or to scatter, and
twice as much to all-reduce. So the line of one number of ranks gives that of another, if all links are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from overlapscope.sharded_model.times import Float64Array, Line, PartTimes, ShardedTimes


def list_shard_counts(times: ShardedTimes) -> Iterator[int]:
    """Generate the numbers of ranks that parameters can be sharded over, other than the present one."""
    ranks, now = times.start_ns.shape[1], len(times.shard_groups[0])
    yield from (count for count in range(2, ranks + 1) if ranks % count == 0 and count != now)


def with_shards(times: ShardedTimes, shards: int) -> ShardedTimes:
    """Return the times with parameters sharded over some ranks, neighbors by number, and replicated over the others."""
    ranks, now = times.start_ns.shape[1], len(times.shard_groups[0])
    replicas = ranks // shards
    ring = times.reduces.line.times(1 / (now - 1), now / (now - 1))
    sizes = {part: bytes_ // shards for part, bytes_ in times.reduces.bytes.items()}
    reduce_line = ring.times(2 * (replicas - 1), 2 * (replicas - 1) / replicas)
    replica_reduces = PartTimes(transfer_ns={}, overhead_ns={}, line=reduce_line, bytes=sizes)
    return replace(
        times,
        gathers={during: _over_ranks(each, now, shards) for during, each in times.gathers.items()},
        reduces=_over_ranks(times.reduces, now, shards),
        replica_reduces=replica_reduces if replicas > 1 else None,
        shard_groups=tuple(tuple(range(first, first + shards)) for first in range(0, ranks, shards)),
        replica_groups=tuple(tuple(range(first, ranks, shards)) for first in range(shards)),
    )


def _over_ranks(times: PartTimes, now: int, ranks: int) -> PartTimes:
    line = times.line.times((ranks - 1) / (now - 1), (ranks - 1) / ranks * now / (now - 1))
    transfer_ns = {part: each * _ratio(line, times.line, times.bytes[part]) for part, each in times.transfer_ns.items()}
    return replace(times, line=line, transfer_ns=transfer_ns)


def _ratio(line: Line, before: Line, bytes_: int) -> Float64Array | float:
    return line.time_ns(bytes_) / before.time_ns(bytes_) if before.time_ns(bytes_) else 1.0

"""Table of TCP connection samples, with the rank at the other end of each connection.

===== =========================================================================================================
links rank, time_ns, local, peer, peer_rank (-1: unknown), bytes_acked, bytes_received, busy_us,
      rwnd_limited_us, delivery_bytes_per_s, rtt_us, min_rtt_us, retransmits
===== =========================================================================================================

Counters start with the connection; the delivery rate is the last one that the kernel has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import pandas as pd

UNKNOWN_RANK: Final = -1
_ENDPOINTS: Final = ["local", "peer"]
_COUNTERS: Final = [
    "bytes_acked",
    "bytes_received",
    "busy_us",
    "rwnd_limited_us",
    "delivery_bytes_per_s",
    "rtt_us",
    "min_rtt_us",
    "retransmits",
]

LinkRow = tuple[Any, ...]


def parse_link_sample(sample: Any) -> list[LinkRow]:
    """Convert a line of ``links.jsonl`` to one row per connection."""
    return [
        (
            int(sample["time_ns"]),
            *(connection[name] for name in _ENDPOINTS),
            *(int(connection[name]) for name in _COUNTERS),
        )
        for connection in sample["connections"]
    ]


def build_link_samples(rows: Mapping[int, list[LinkRow]]) -> pd.DataFrame:
    """Return the samples of some ranks as a table, in the time of each rank's host.

    Args:
        rows: rows by rank.
    """
    samples = pd.DataFrame(list(chain.from_iterable(rows.values())), columns=["time_ns", *_ENDPOINTS, *_COUNTERS])
    samples = samples.astype(dict.fromkeys(["time_ns", *_COUNTERS], "int64") | dict.fromkeys(_ENDPOINTS, "str"))
    samples.insert(0, "rank", np.repeat(np.array([*rows], dtype=np.int64), [len(own) for own in rows.values()]))
    return samples


def add_peer_ranks(samples: pd.DataFrame) -> pd.DataFrame:
    """Add the rank at the other end: the one that has the same connection with its endpoints swapped.

    It is unknown where addresses are translated on the way, or if two hosts each have a connection between the same
    addresses and ports.
    """
    ends = samples[["rank", *_ENDPOINTS]].drop_duplicates()
    ends = ends.drop_duplicates(_ENDPOINTS, keep=False)
    others = ends.rename(columns={"rank": "peer_rank", "local": "peer", "peer": "local"})
    found = samples.merge(others, how="left", on=_ENDPOINTS)
    found.insert(4, "peer_rank", found.pop("peer_rank").fillna(UNKNOWN_RANK).astype("int64"))
    return found

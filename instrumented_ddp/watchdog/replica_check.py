"""Whether this rank's replicas are the neighbours': by the fingerprints that were taken at the same time on both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from instrumented_ddp.replicas.replicas import Replicas
from instrumented_ddp.watchdog.messages import Beat

_LASTS_S: Final = 1.5
"""A rank that goes another way in the order of collectives is found by then, which explains why replicas differ."""


class ReplicaCheck:
    """Of one rank, and each model until it was judged.

    Args:
        replicas: of this process.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._differ_since: dict[tuple[int, str], tuple[float, int]] = {}
        """Since when on the clock, and from which number of reductions on, by rank and key."""
        self._judged: set[str] = set()
        """Keys of models that were found to differ."""

    def found(self, beats: Mapping[int, Beat]) -> bool:
        """Look at what the neighbours have said: whether one of them has had other parameters for a while."""
        now_s = time.monotonic()
        for rank, beat in beats.items():
            for key, theirs in beat.replicas.items():
                is_of_both = key not in self._judged and rank in self._replicas.ranks_of(key)
                agrees = self._replicas.agrees(key, theirs) if is_of_both else None
                if agrees:
                    self._differ_since.pop((rank, key), None)
                elif agrees is False:
                    since_s, since = self._differ_since.setdefault((rank, key), (now_s, theirs.first))
                    longest = max(other.replicas[key].period for other in beats.values() if key in other.replicas)
                    if now_s - since_s >= _LASTS_S and theirs.first >= since + longest:  # all have taken it by now
                        return True
        return False

    def is_judged(self) -> None:
        """All ranks say what they have: it is kept, and what differs now is looked for no more."""
        self._judged.update(key for _, key in self._differ_since)
        self._differ_since.clear()
        self._replicas.pin()

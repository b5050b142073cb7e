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
    """Of one rank, until a difference was found.

    Args:
        replicas: of this process.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._differ_since_s: dict[tuple[int, str], float] = {}
        self._is_over = False

    def found(self, beats: Mapping[int, Beat]) -> bool:
        """Look at what the neighbours have said: whether one of them has had other parameters for a while."""
        if self._is_over:
            return False
        now_s = time.monotonic()
        for rank, beat in beats.items():
            for key, theirs in beat.replicas.items():
                agrees = self._replicas.agrees(key, theirs) if rank in self._replicas.ranks_of(key) else None
                if agrees:
                    self._differ_since_s.pop((rank, key), None)
                elif agrees is False and now_s - self._differ_since_s.setdefault((rank, key), now_s) >= _LASTS_S:
                    return True
        return False

    def is_judged(self) -> None:
        """All ranks say what they have: it is kept, and looked for no more."""
        self._is_over = True
        self._replicas.pin()

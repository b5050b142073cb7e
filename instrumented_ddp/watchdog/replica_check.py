"""Comparison of this rank's model replicas with the neighbors', by fingerprints taken at the same time on both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog.messages import Heartbeat

_MIN_DURATION_S: Final = 1.5
"""Time in seconds that replicas must differ: by then diverged collectives are found, which would be the reason."""


class ReplicaCheck:
    """Comparison of one rank's replicas, each until it was investigated.

    Args:
        replicas: replicas of this process.
    """

    def __init__(self, replicas: ReplicaComparison) -> None:
        self._replicas = replicas
        self._differ_since: dict[tuple[int, str], tuple[float, int]] = {}
        """Time and number of reductions since which replicas differ, by rank and key."""
        self._judged: set[str] = set()
        """Keys of models that were found to differ."""

    def found(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether a neighbor has had other parameters for a while, according to its heartbeats."""
        now_s = time.monotonic()
        for rank, heartbeat in heartbeats.items():
            for key, theirs in heartbeat.replicas.items():
                is_of_both = key not in self._judged and rank in self._replicas.ranks_of(key)
                agrees = self._replicas.agrees(key, theirs) if is_of_both else None
                if agrees:
                    self._differ_since.pop((rank, key), None)
                elif agrees is False:
                    since_s, since = self._differ_since.setdefault((rank, key), (now_s, theirs.first))
                    longest = max(other.replicas[key].period for other in heartbeats.values() if key in other.replicas)
                    if (
                        now_s - since_s >= _MIN_DURATION_S and theirs.first >= since + longest
                    ):  # all have taken it by now
                        return True
        return False

    def on_investigation(self) -> None:
        """Keep the fingerprints for the investigation, and stop comparing the models that differ now."""
        self._judged.update(key for _, key in self._differ_since)
        self._differ_since.clear()
        self._replicas.pin()

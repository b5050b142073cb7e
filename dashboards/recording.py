"""The recording that the app shows: read once for all pages, and again when its files have changed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from overlapscope.analysis.lanes import Timeline, timeline_of
from overlapscope.trace import cache
from overlapscope.trace.reader import Trace, find_rank_folders, read_trace


class Snapshot:
    """A recording as it was when it was read."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def timeline(self) -> Timeline:
        """Its lanes, arranged when a page first needs them."""
        return timeline_of(self.trace)


class Recording:
    """A folder of traces. A run may still be writing to it: every page that is opened shows the newest.

    Args:
        folder: what ``overlapscope record -o`` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None
        self._fingerprint = ""

    def newest(self) -> Snapshot:
        """What the folder holds now.

        Raises:
            OverlapScopeError: nothing that could be shown.
        """
        fingerprint = cache.fingerprint(find_rank_folders(self.folder))
        if self._snapshot is None or fingerprint != self._fingerprint:
            self._snapshot = Snapshot(read_trace(self.folder))
            self._fingerprint = fingerprint
        return self._snapshot

"""Writer of tracks in Chrome's Trace Event Format (JSON): for chrome://tracing, Perfetto, Speedscope and scripts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import IO, Any

from overlapscope.exports.tracks import CounterTrack, Track

_FlowPoint = tuple[int, int, int]
"""An end point of a flow arrow: (time in ns, rank, thread id of the track)."""


class ChromeFile:
    """Chrome trace with a process for each rank and a thread for each track; times are in µs of the common clock.

    Args:
        file: file opened in binary mode.
        recording: name of the recording.
    """

    def __init__(self, file: IO[bytes], recording: str) -> None:
        self._file = file
        self._flow_points: defaultdict[str, list[_FlowPoint]] = defaultdict(list)
        about = json.dumps({"recording": recording, "clock": "CLOCK_MONOTONIC of rank 0's host"})
        self._file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": ['.encode())
        self._separator = "\n"

    def add_rank(self, rank: int, host: str, device: str, tracks: Iterable[Track | CounterTrack]) -> int:
        """Write the tracks of a rank.

        Returns:
            The number of slices written.
        """
        self._name("process", rank, f"rank {rank} ({host}, {device})", rank)
        slices = 0
        for thread, track in enumerate(tracks, start=1):
            if isinstance(track, CounterTrack):
                self._add_samples(rank, track)
            else:
                self._name("thread", rank, track.name, thread, tid=thread)
                slices += self._add_slices(rank, thread, track)
        return slices

    def close(self) -> None:
        """Write the flow arrows, which may connect any ranks, and the end of the file."""
        for number, (name, stops) in enumerate(self._flow_points.items()):
            for position, (time_ns, rank, thread) in enumerate(sorted(stops) if len(stops) > 1 else ()):
                phase = "s" if position == 0 else "f" if position == len(stops) - 1 else "t"
                arrow = {"ph": phase, "bp": "e", "id": number, "cat": "flow", "name": name.partition(" ")[0]}
                self._add({**arrow, "pid": rank, "tid": thread, "ts": time_ns / 1e3})
        self._file.write(b"\n]}\n")

    def _add_slices(self, rank: int, thread: int, track: Track) -> int:
        for one in track:
            kind: dict[str, Any] = {"ph": "X", "dur": (one.end_ns - one.start_ns) / 1e3}
            if track.is_instants:
                kind = {"ph": "i", "s": "t"}
            of_track = {"pid": rank, "tid": thread, "cat": track.name}
            self._add({**kind, **of_track, "name": one.name, "ts": one.start_ns / 1e3, "args": one.facts})
            for link in one.links:
                self._flow_points[link].append((one.start_ns, rank, thread))
        return len(track.slices)

    def _add_samples(self, rank: int, counter: CounterTrack) -> None:
        for time_ns, value in counter.samples.itertuples(index=False):
            self._add({"ph": "C", "pid": rank, "name": counter.name, "ts": time_ns / 1e3, "args": {"ms": value}})

    def _name(self, what: str, rank: int, name: str, position: int, **of: int) -> None:
        self._add({"ph": "M", "pid": rank, **of, "name": f"{what}_name", "args": {"name": name}})
        self._add({"ph": "M", "pid": rank, **of, "name": f"{what}_sort_index", "args": {"sort_index": position}})

    def _add(self, event: Mapping[str, Any]) -> None:
        self._file.write(f"{self._separator}{json.dumps(event)}".encode())
        self._separator = ",\n"

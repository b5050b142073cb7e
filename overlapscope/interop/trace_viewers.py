"""Writers of tracks for trace viewers: Chrome's Trace Event Format (JSON), and Perfetto's native format (protobuf)."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import IO, Any, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.interop.tracks import CounterTrack, Track

_FlowPoint = tuple[int, int, int]
"""An end point of a flow arrow: (time in ns, rank, thread id of the track)."""


class ChromeFile:
    """Chrome trace, for chrome://tracing, Perfetto, Speedscope and scripts.

    It has a process for each rank and a thread for each track; times are in µs of the common clock.

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


_SEQUENCE: Final = 1
"""Packet sequence id; all packets are of one sequence."""


def require_perfetto() -> None:
    """Raise an error that says what to install if the package ``perfetto`` is missing, before anything is read."""
    if find_spec("perfetto") is None:
        raise OverlapScopeError(
            "this format needs the package perfetto: pip install 'overlapscope[perfetto]', or --format chrome"
        )


class PerfettoFile:
    """Perfetto trace with a tree of tracks: hosts, in each its ranks, in each its tracks.

    In a JSON trace, Perfetto misdraws slices that begin at the same time (perfetto #423), and it is several times as
    large. The packets are ``TrackDescriptor`` and ``TrackEvent``, as in
    perfetto.dev/docs/reference/synthetic-track-event.

    Args:
        file: file opened in binary mode.
        recording: name of the recording, which keeps its tracks distinct when files are merged.
    """

    def __init__(self, file: IO[bytes], recording: str) -> None:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._builder = StreamingTraceProtoBuilder(file)
        self._recording = recording
        self._described: set[str] = set()

    def add_rank(self, rank: int, host: str, device: str, tracks: Iterable[Track | CounterTrack]) -> int:
        """Write the tracks of a rank.

        Returns:
            The number of slices written.
        """
        of_host, of_rank = f"host {host}", f"host {host}/rank {rank}"
        self._write_descriptor(of_host, of_host)
        self._write_descriptor(of_rank, f"rank {rank} ({device})", parent=of_host, sibling_index=rank)
        slices = 0
        for sibling_index, track in enumerate(tracks):
            path = f"{of_rank}/{track.name}"
            if isinstance(track, CounterTrack):
                self._write_descriptor(path, track.name, parent=of_rank, sibling_index=sibling_index, unit="ms a step")
                self._add_samples(path, track)
            else:
                path += f"/{track.row}"
                self._write_descriptor(path, track.name, parent=of_rank, sibling_index=sibling_index)
                slices += self._add_slices(path, track)
        return slices

    def close(self) -> None:
        """Finish the file; nothing is left to be written."""

    def _write_descriptor(
        self, path: str, name: str, *, parent: str = "", sibling_index: int = 0, unit: str = ""
    ) -> None:
        if path in self._described:
            return
        packet = self._packet()
        if not self._described:
            packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        self._described.add(path)
        track = packet.track_descriptor
        track.uuid, track.name, track.sibling_order_rank = self._unique_id(path), name, sibling_index
        track.child_ordering = track.EXPLICIT
        if parent:
            track.parent_uuid = self._unique_id(parent)
        if unit:
            track.counter.unit_name = unit
        self._builder.write_packet(packet)

    def _add_slices(self, path: str, track: Track) -> int:
        number = self._unique_id(path)
        for one in track:
            packet = self._packet(one.start_ns)
            event = packet.track_event
            event.track_uuid, event.name = number, one.name
            event.type = event.TYPE_INSTANT if track.is_instants else event.TYPE_SLICE_BEGIN
            for name, value in one.facts.items():
                annotation = event.debug_annotations.add()
                annotation.name = name
                setattr(annotation, _annotation_field(value), value)
            event.flow_ids.extend(map(self._unique_id, one.links))
            self._builder.write_packet(packet)
            if not track.is_instants:
                packet = self._packet(one.end_ns)
                packet.track_event.track_uuid, packet.track_event.type = number, event.TYPE_SLICE_END
                self._builder.write_packet(packet)
        return len(track.slices)

    def _add_samples(self, path: str, counter: CounterTrack) -> None:
        for time_ns, value in counter.samples.itertuples(index=False):
            packet = self._packet(int(time_ns))
            event = packet.track_event
            event.track_uuid, event.type, event.double_counter_value = self._unique_id(path), event.TYPE_COUNTER, value
            self._builder.write_packet(packet)

    def _packet(self, time_ns: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time_ns is not None:
            packet.timestamp = time_ns
        return packet

    def _unique_id(self, name: str) -> int:
        """Hash the path of a track or the name of an arrow to a unique 64-bit id."""
        return int.from_bytes(hashlib.blake2b(f"{self._recording}\0{name}".encode(), digest_size=8).digest())


def _annotation_field(value: object) -> str:
    """Return the field of ``DebugAnnotation`` for a value of this type."""
    kinds = {bool: "bool_value", int: "int_value", float: "double_value"}
    return kinds.get(type(value), "string_value")

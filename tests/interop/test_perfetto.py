"""Perfetto's files, read back with Perfetto's own schema by the rules of its trace processor."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from overlapscope.analysis import Analysis
from overlapscope.interop.trace_viewers import PerfettoFile
from overlapscope.interop.tracks import Track, Tracks
from overlapscope.trace.recording import Trace, read_trace
from tests.synthetic import write_straggling_recording


@dataclass
class Drawn:
    """What the viewer makes of a file: by the path of a track its slices, and of counters their samples."""

    slices: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    arrows: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By number of a flow, the tracks that it leads through."""


def drawn(data: bytes) -> Drawn:
    """Read packets in the order of their times; an end closes what was begun last on its track."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Packets

    packets = Packets.FromString(data).packet
    assert packets[0].sequence_flags & packets[0].SEQ_INCREMENTAL_STATE_CLEARED
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}
    described = {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in described
            assert not track.parent_uuid or track.parent_uuid in described
            above = described.get(track.parent_uuid, "")
            described[track.uuid] = f"{above}/{track.name}" if above else track.name
    found, begun = Drawn(), defaultdict(list)
    events = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event = packet.track_event
        path = f"{described[event.track_uuid]}"
        for flow in event.flow_ids:
            found.arrows[flow].append(path)
        known = {one.name: getattr(one, one.WhichOneof("value")) for one in event.debug_annotations}
        if event.type == event.TYPE_COUNTER:
            found.samples[path].append((packet.timestamp, event.double_counter_value))
        elif event.type == event.TYPE_INSTANT:
            found.slices[path].append((packet.timestamp, packet.timestamp, event.name, known))
        elif event.type == event.TYPE_SLICE_BEGIN:
            assert not begun[event.track_uuid], "slices of a track overlap"
            begun[event.track_uuid].append((packet.timestamp, event.name, known))
        else:
            start_ns, name, facts = begun[event.track_uuid].pop()
            found.slices[path].append((start_ns, packet.timestamp, name, facts))
    assert not any(begun.values())
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("perfetto")
    late = {2: 3000}
    return read_trace(
        write_straggling_recording(folder, late_us=lambda rank, _: late.get(rank, 0), steps=4, ranks_per_host=2)
    )


def exported(trace: Trace) -> bytes:
    file, tracks = io.BytesIO(), Tracks(Analysis(trace))
    written = PerfettoFile(file, "run")
    for rank, host in zip(trace.ranks["rank"], trace.ranks["host"], strict=True):
        written.add_rank(rank, host, "cpu", tracks.tracks_of_rank(rank))
    written.close()
    return file.getvalue()


def test_what_is_drawn_is_what_the_tracks_are(trace: Trace) -> None:
    found = drawn(exported(trace))
    tracks = Tracks(Analysis(trace))
    for rank, host in ((0, "node0"), (3, "node1")):
        for one in tracks.tracks_of_rank(rank):
            path = f"host {host}/rank {rank} (cpu)/{one.name}"
            if isinstance(one, Track):
                expected = [(each.start_ns, each.end_ns, each.name, each.facts) for each in one]
                assert [each for each in expected if each not in found.slices[path]] == []
            else:
                assert found.samples[path] == list(one.samples.itertuples(index=False, name=None))


def test_an_arrow_leads_through_all_ranks_of_a_collective(trace: Trace) -> None:
    arrows = drawn(exported(trace)).arrows
    ranks = [sorted(path.split("/")[1] for path in paths) for paths in arrows.values()]
    everywhere = [f"rank {rank} (cpu)" for rank in range(4)]
    assert ranks.count(everywhere) == 4 * 3  # steps and buckets


def test_files_of_two_recordings_have_no_track_in_common(trace: Trace) -> None:
    file, other = io.BytesIO(), io.BytesIO()
    for where, name in ((file, "run"), (other, "another")):
        PerfettoFile(where, name).add_rank(0, "node0", "cpu", Tracks(Analysis(trace)).tracks_of_rank(0))
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as Packets

    one, two = (
        {packet.track_descriptor.uuid for packet in Packets.FromString(each.getvalue()).packet} - {0}
        for each in (file, other)
    )
    assert not one & two

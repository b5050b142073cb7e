"""Chrome's JSON, by the rules of the Trace Event Format."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from overlapscope.analysis import Analysis
from overlapscope.interop.trace_viewers import ChromeFile
from overlapscope.interop.tracks import Track, Tracks
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording


def events_of(folder: Path) -> list[dict[str, Any]]:
    file, tracks = io.BytesIO(), Tracks(Analysis(read_trace(folder)))
    written = ChromeFile(file, "run")
    for rank in range(2):
        written.add_rank(rank, "node0", "cpu", tracks.tracks_of_rank(rank))
    written.close()
    return json.loads(file.getvalue())["traceEvents"]


def test_slices_are_those_of_the_tracks_and_none_overlap(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "traces")
    events = events_of(folder)
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
    }
    assert names[0, None] == "rank 0 (node0, cpu)"
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            by_track[event["pid"], event["tid"]].append(event)
    tracks = [one for rank in range(2) for one in Tracks(Analysis(read_trace(folder))).tracks_of_rank(rank)]
    for (place, found), one in zip(by_track.items(), [one for one in tracks if isinstance(one, Track)], strict=True):
        assert names[place] == one.name
        spans = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in found]
        assert spans == [(each.start_ns / 1e3, each.end_ns / 1e3) for each in one]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert [event["args"] for event in found] == [each.facts for each in one]


def test_each_arrow_begins_ends_and_lies_on_a_slice(tmp_path: Path) -> None:
    events = events_of(write_recording(tmp_path / "traces"))
    begins = {(event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] == "X"}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            assert (event["pid"], event["tid"], event["ts"]) in begins
            arrows[event["id"]].append(event["ph"])
    assert len(arrows) == 5 * 3 * 3  # steps, buckets, and the way on each rank and the one between them
    assert all(stops[0] == "s" and stops[-1] == "f" and set(stops[1:-1]) <= {"t"} for stops in arrows.values())

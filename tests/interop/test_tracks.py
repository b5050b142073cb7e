"""Tracks: all that was recorded is on them once, and nothing on one of them overlaps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings

from overlapscope.analysis import Analysis
from overlapscope.interop.tracks import CounterTrack, Track, Tracks
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import orderly_recordings, wild_recordings
from tests.segments import write_ring_recording
from tests.synthetic import write_recording, write_straggling_recording

US = 1000


def tracks_of(trace: Trace, rank: int = 0, steps: slice = slice(None)) -> list[Track]:
    return only_tracks(Tracks(Analysis(trace), steps), rank)


def only_tracks(tracks: Tracks, rank: int) -> list[Track]:
    return [track for track in tracks.tracks_of_rank(rank) if isinstance(track, Track)]


def track(tracks: list[Track], name: str) -> Track:
    (found,) = [track for track in tracks if track.name == name]
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write_ring_recording(tmp_path_factory.mktemp("tracks")))


@given(wild_recordings() | orderly_recordings())
@settings(max_examples=15)
def test_slices_of_a_track_do_not_overlap_and_each_row_is_on_one_of_them(trace: Trace) -> None:
    on_tracks: dict[str, int] = {}
    tracks = Tracks(Analysis(trace))
    for rank in trace.ranks["rank"]:
        for one in only_tracks(tracks, rank):
            slices = list(one)
            assert all(before.end_ns <= after.start_ns for before, after in pairwise(slices))
            assert all(each.start_ns <= each.end_ns for each in slices)
            on_tracks[one.name] = on_tracks.get(one.name, 0) + len(slices)
    waits = int(trace.collectives["ready_ns"].notna().sum())
    rows = {
        "steps": len(trace.steps),
        "phases": len(trace.phases),
        "buckets": waits + len(trace.copies),
        "communication": len(trace.collectives),
        "garbage collection": len(trace.pauses),
        "own collectives": len(trace.user_collectives),
    }
    assert on_tracks == {name: count for name, count in rows.items() if count}


def test_a_slice_has_what_is_known_of_it(trace: Trace) -> None:
    first = next(iter(track(tracks_of(trace), "communication")))
    assert (first.name, first.start_ns, first.end_ns) == (
        "all_reduce of bucket 0",
        1_000_000_000 + 4000 * US,
        1_000_000_000 + 4800 * US,
    )
    assert first.facts["parameters"] == "head.weight"
    assert first.facts["call_site"] == "train.py:42 (main)"
    assert first.facts["bytes"] == 1024 * 1024
    assert first.facts["wait_ns"] == 0
    assert first.facts["transfer_ns"] == 800 * US
    rounds = [one.name for one in track(tracks_of(trace), "rounds")][:2]
    assert rounds == ["reduce-scatter of bucket 0, round 1 of 1", "all-gather of bucket 0, round 1 of 1"]


def test_what_belongs_together_shares_a_link(trace: Trace) -> None:
    ranks = [tracks_of(trace, rank) for rank in (0, 1)]
    (tracks_of_rank, other) = (next(iter(track(tracks, "communication"))) for tracks in ranks)
    way, together = tracks_of_rank.links
    assert (set(tracks_of_rank.links) & set(other.links)) == {together}
    stations = [one.name for found in ranks[0] for one in found if way in one.links]
    assert sorted(stations) == [
        "all_reduce of bucket 0",
        "bucket 0 is copied in",
        "bucket 0 is copied out",
        "bucket 0 waits for its launch",
    ]


def test_counters_are_those_of_the_breakdown(trace: Trace) -> None:
    counters = {
        one.name: one.samples for one in Tracks(Analysis(trace)).tracks_of_rank(1) if isinstance(one, CounterTrack)
    }
    assert counters["exposed communication"]["value"].tolist() == [1.3] * 3
    assert counters["hidden communication"]["value"].tolist() == [2.4] * 3


def test_it_does_not_matter_whether_the_other_steps_were_read(tmp_path: Path) -> None:
    folder = write_straggling_recording(tmp_path / "traces", late_us=lambda rank, step: 100 * (rank + step % 3))
    whole, some = read_trace(folder), read_trace(folder, steps=(10, 14), neighbors=3)
    assert len(some.steps) < len(whole.steps)
    for rank in range(4):
        of_whole, of_some = (
            list(Tracks(Analysis(trace), slice(10, 14)).tracks_of_rank(rank)) for trace in (whole, some)
        )
        for among_all, one in zip(of_whole, of_some, strict=True):
            if isinstance(among_all, Track):
                assert isinstance(one, Track)
                assert (one.name, one.row) == (among_all.name, among_all.row)
                # What goes together has other numbers, which nobody sees.
                assert [each[:-1] for each in one] == [each[:-1] for each in among_all]
            else:
                assert isinstance(one, CounterTrack)
                pd.testing.assert_frame_equal(
                    one.samples.reset_index(drop=True), among_all.samples.reset_index(drop=True)
                )


def test_of_some_steps_only_what_goes_on_in_them_is_there(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path / "traces", steps=6))
    begin_ns, end_ns = 1_000_000_000 + 20_000 * US, 1_000_000_000 + 40_000 * US
    tracks = tracks_of(trace, steps=slice(2, 4))
    assert [one.facts["step"] for one in track(tracks, "steps")] == [2, 3]
    assert len(track(tracks, "communication").slices) == 6
    assert all(one.end_ns > begin_ns and one.start_ns < end_ns for found in tracks for one in found)
    assert tracks_of(trace, steps=slice(6, None)) == []


def test_a_collective_that_never_ended_says_so_and_reaches_to_the_end(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path / "traces", steps=2))
    collectives = trace.collectives.copy()
    collectives.loc[collectives.index[-1], ["start_ns", "end_ns"]] = None
    cut = Trace(**{**vars(trace), "collectives": collectives})
    last = list(track(tracks_of(cut, 1), "communication"))[-1]
    assert last.name == "all_reduce of bucket 2, not completed"
    assert last.end_ns == int(trace.steps["end_ns"].max())
    assert "wait_ns" not in last.facts

"""Rounds of all-reduces: from what a rank has written of them to a table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import SEGMENTS_FILE, rank_folder
from overlapscope.trace.tables import SEGMENT_COLUMNS
from tests.segments import BYTES, ROUNDS, write_ring_recording
from tests.synthetic import US, write_recording


def test_a_round_is_a_row_with_what_it_was_and_when(tmp_path: Path) -> None:
    trace = read_trace(write_ring_recording(tmp_path, steps=2))
    assert trace.problems == ()
    assert list(trace.segments.columns) == list(SEGMENT_COLUMNS)
    of_one = trace.segments.query("rank == 1 and step == 1")
    assert of_one["phase"].tolist() == ["reduce-scatter", "all-gather"]
    assert ((of_one["start_ns"] - 1_010_000_000) // US).tolist() == [start_us for _, start_us, _ in ROUNDS]
    assert ((of_one["end_ns"] - 1_010_000_000) // US).tolist() == [end_us for _, _, end_us in ROUNDS]
    for column, value in (
        ("bucket", 0),
        ("rounds", 1),
        ("sent_to", "0"),
        ("received_from", "0"),
        ("sent_bytes", BYTES),
    ):
        assert of_one[column].tolist() == [value, value]


def test_tables_that_were_kept_hold_the_same_rounds(tmp_path: Path) -> None:
    write_ring_recording(tmp_path)
    made, kept = read_trace(tmp_path).segments, read_trace(tmp_path).segments
    pd.testing.assert_frame_equal(made, kept)


def test_a_round_whose_line_is_damaged_is_of_no_bucket_and_the_damage_is_said(tmp_path: Path) -> None:
    path = rank_folder(write_ring_recording(tmp_path), 0) / SEGMENTS_FILE
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first.replace("reduce", "rebuke") + second)
    trace = read_trace(tmp_path)
    assert [str(problem) for problem in trace.errors] == [f"{path}: line 1 is damaged and skipped"]
    of_rank = trace.segments.query("rank == 0 and step == 0")
    assert of_rank["bucket"].tolist() == [-1, 0]
    assert of_rank["phase"].tolist() == ["", "all-gather"]


def test_a_job_without_rounds_has_an_empty_table(tmp_path: Path) -> None:
    segments = read_trace(write_recording(tmp_path)).segments
    assert segments.empty
    assert list(segments.columns) == list(SEGMENT_COLUMNS)

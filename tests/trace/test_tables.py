"""Records to tables: events of steps, rounds of all-reduces, samples of TCP connections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from overlapscope.trace.event_log import EventLogWriter, read_log
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import (
    HEADER_BYTES,
    LINKS_FILE,
    NO_INDEX,
    RECORD_BYTES,
    SEGMENTS_FILE,
    Flag,
    Kind,
    Phase,
    pack_body,
    rank_folder,
)
from overlapscope.trace.tables import SEGMENT_COLUMNS, drop_steps_cut_by_ring
from tests.segments import BYTES, ROUNDS, write_ring_recording
from tests.synthetic import BUCKET_ELEMENTS, US, add_link_sample, make_rank, write_recording, write_step

RECORDS_PER_STEP = 29


def record(folder: Path, *records: tuple[bytes, int, int, int]) -> Trace:
    log = make_rank(folder, 0, world_size=1)
    for fields in records:
        log.append(*fields)
    log.close()
    return read_trace(folder)


def test_a_collective_has_its_launch_its_readiness_and_its_completion(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path, ranks=1, steps=1))
    begin_ns = 1_000_000_000
    found = trace.collectives[["bucket", "op", "dtype", "elements", "bytes", "call_site"]].to_numpy().tolist()
    assert found == [[b, "all_reduce", "float32", n, 4 * n, 1] for b, n in enumerate(BUCKET_ELEMENTS)]
    times_us = (trace.collectives[["ready_ns", "launch_ns", "start_ns", "end_ns"]] - begin_ns) // US
    assert times_us.to_numpy().tolist() == [
        [3950, 4000, 4000, 4800],
        [4950, 5000, 5000, 6500],
        [6850, 6900, 6900, 8300],
    ]
    assert trace.collectives["start_is_bound"].tolist() == [True] * 3


def test_a_launch_without_completion_has_no_end_and_is_not_lost(tmp_path: Path) -> None:
    launch = pack_body(Kind.LAUNCH, op="all_reduce", index=4)
    done = pack_body(Kind.COLLECTIVE, op="all_reduce", index=4)
    trace = record(tmp_path, (launch, 0, 10, 10), (done, 0, 10, 30), (launch, 1, 50, 50))
    assert trace.collectives["launch_ns"].tolist() == [10, 50]
    assert trace.collectives["end_ns"].tolist() == [30, pd.NA]
    assert trace.collectives["start_is_bound"].tolist() == [False, False]
    assert trace.collectives["ready_ns"].isna().all()


def test_a_bucket_that_is_reduced_twice_in_a_step_keeps_its_turns_apart(tmp_path: Path) -> None:
    launch = pack_body(Kind.LAUNCH, op="all_reduce", index=0)
    done = pack_body(Kind.COLLECTIVE, op="all_reduce", index=0)
    ready = pack_body(Kind.BUCKET_READY, index=0)
    trace = record(
        tmp_path,
        (ready, 0, 8, 8), (launch, 0, 10, 10), (ready, 0, 18, 18), (launch, 0, 20, 20),
        (done, 0, 10, 15), (done, 0, 20, 26),
    )  # fmt: skip
    columns = ["ready_ns", "launch_ns", "end_ns"]
    assert trace.collectives[columns].to_numpy().tolist() == [[8, 10, 15], [18, 20, 26]]


def test_a_broadcast_does_not_take_the_completion_of_an_all_reduce(tmp_path: Path) -> None:
    def body(kind: Kind, op: str, model: int = 0) -> bytes:
        return pack_body(kind, op=op, index=NO_INDEX, model=model)

    trace = record(
        tmp_path,
        (body(Kind.LAUNCH, "broadcast"), 0, 1, 1),
        (body(Kind.LAUNCH, "all_reduce"), 0, 2, 2),
        (body(Kind.LAUNCH, "all_reduce", model=1), 0, 3, 3),
        (body(Kind.COLLECTIVE, "all_reduce", model=1), 0, 3, 30),
        (body(Kind.COLLECTIVE, "all_reduce"), 0, 2, 20),
        (body(Kind.COLLECTIVE, "broadcast"), 0, 1, 10),
    )
    assert trace.collectives[["bucket", "end_ns"]].to_numpy().tolist() == [[-1, 10], [-1, 20], [-1, 30]]


def test_passes_without_reduction_are_told_from_others(tmp_path: Path) -> None:
    quiet = pack_body(Kind.PHASE, index=Phase.BACKWARD, flags=Flag.NO_SYNC | Flag.DEVICE_CLOCK)
    loud = pack_body(Kind.PHASE, index=Phase.BACKWARD, flags=Flag.DEVICE_CLOCK)
    trace = record(tmp_path, (quiet, 0, 1, 2), (loud, 0, 3, 4))
    assert trace.phases["no_sync"].tolist() == [True, False]
    assert trace.phases["phase"].tolist() == ["backward", "backward"]


def records_with_steps(folder: Path, steps: int) -> np.ndarray:
    log = make_rank(folder, 0, world_size=1)
    for step in range(steps):
        write_step(log, step, begin_ns=step * 10_000 * US)
    log.close()
    return read_log(log.path)[1]


def steps_of(records: np.ndarray) -> list[int]:
    return np.unique(records["step"]).tolist()


def test_no_gap_means_no_step_is_dropped(tmp_path: Path) -> None:
    records = records_with_steps(tmp_path, 4)
    assert len(records) == 4 * RECORDS_PER_STEP
    assert drop_steps_cut_by_ring(records) is records


def test_steps_that_a_gap_cuts_are_dropped_at_both_sides(tmp_path: Path) -> None:
    records = records_with_steps(tmp_path, 10)
    n = RECORDS_PER_STEP
    kept = np.concatenate([records[: 2 * n + 7], records[6 * n + 3 :]])
    assert steps_of(drop_steps_cut_by_ring(kept)) == [0, 1, 7, 8, 9]


def test_a_gap_within_one_step_costs_that_step_only(tmp_path: Path) -> None:
    records = records_with_steps(tmp_path, 5)
    kept = np.delete(records, 2 * RECORDS_PER_STEP + 10)
    assert steps_of(drop_steps_cut_by_ring(kept)) == [0, 1, 3, 4]


def test_the_latest_step_is_kept_while_it_has_not_ended(tmp_path: Path) -> None:
    """A dead rank's last records tell where it stood, even if one of them was torn."""
    records = records_with_steps(tmp_path, 3)
    torn = np.delete(records[:-5], 2 * RECORDS_PER_STEP + 10)
    assert steps_of(drop_steps_cut_by_ring(torn)) == [0, 1, 2]


def test_device_times_that_are_written_late_do_not_make_a_cut_step_look_whole(tmp_path: Path) -> None:
    """On a GPU a step's times are written during the next step, behind that step's first launches."""
    log = make_rank(tmp_path, 0, world_size=1)
    launch = pack_body(Kind.LAUNCH, op="all_reduce", index=0)
    done = pack_body(Kind.COLLECTIVE, op="all_reduce", index=0)
    end = pack_body(Kind.STEP)
    for step in range(8):
        log.append(launch, step, step, step)
        log.append(launch, step, step, step)
        if step:
            for body in (done, done, end):
                log.append(body, step - 1, step, step)
    log.close()
    records = read_log(log.path)[1]
    launches_of_3 = np.flatnonzero((records["kind"] == Kind.LAUNCH) & (records["step"] == 3))
    # Lost: everything from the times of step 0 to the first launch of step 3, so that only its second is left.
    cut = np.concatenate([records[:4], records[launches_of_3[1] :]])
    assert steps_of(drop_steps_cut_by_ring(cut)) == [4, 5, 6, 7]
    # Step 0 has its launches before the gap and its times in it.
    assert steps_of(cut[:4]) == [0, 1]


def test_of_records_that_all_have_gaps_between_them_only_the_last_is_kept(tmp_path: Path) -> None:
    records = np.repeat(records_with_steps(tmp_path, 1)[:1], 200)
    records["sequence"] = np.arange(200) * 2 + 1
    records["step"] = np.arange(200)
    assert steps_of(drop_steps_cut_by_ring(records)) == [199]


def test_a_wrapped_recording_has_only_whole_steps(tmp_path: Path) -> None:
    log = make_rank(tmp_path, 0, world_size=1, limit_bytes=HEADER_BYTES + 1000 * RECORD_BYTES)
    assert isinstance(log, EventLogWriter)
    for step in range(200):
        write_step(log, step, begin_ns=step * 10_000 * US)
    log.close()
    trace = read_trace(tmp_path)
    kept = trace.steps["step"].tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-1] == 199
    assert len(kept) < 40
    assert trace.collectives.groupby("step").size().to_dict() == dict.fromkeys(kept, 3)
    assert trace.collectives["end_ns"].notna().all()


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


def connection(local: str, peer: str, **counters: int) -> dict[str, object]:
    return {"local": local, "peer": peer, **counters}


def peers(folder: Path) -> list[list[object]]:
    return read_trace(folder).links[["rank", "local", "peer", "peer_rank"]].to_numpy().tolist()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path, ranks=3, steps=1)


def test_a_recording_without_samples_has_an_empty_table_fresh_and_from_the_cache(recording: Path) -> None:
    for _ in range(2):
        links = read_trace(recording).links
        assert links.empty
        assert list(links.columns)[:5] == ["rank", "time_ns", "local", "peer", "peer_rank"]


def test_a_sample_has_what_the_kernel_counted(recording: Path) -> None:
    counters = {"bytes_acked": 5, "bytes_received": 6, "busy_us": 7, "rwnd_limited_us": 8}
    counters |= {"delivery_bytes_per_s": 12, "rtt_us": 9, "min_rtt_us": 10, "retransmits": 11}
    add_link_sample(recording, 1, 2_000, connection("10.0.0.1:1", "10.0.0.2:2", **counters))
    (row,) = read_trace(recording).links.to_dict("records")
    ends = {"rank": 1, "time_ns": 2_000, "local": "10.0.0.1:1", "peer": "10.0.0.2:2", "peer_rank": -1}
    assert row == ends | counters


def test_the_peer_is_the_rank_that_has_the_connection_the_other_way_round(recording: Path) -> None:
    a, b, c = "10.0.0.1:1", "10.0.0.2:2", "[fd00::3]:3"
    for time_ns in (1, 2):
        add_link_sample(recording, 0, time_ns, connection(a, b))
        add_link_sample(recording, 1, time_ns, connection(b, a), connection(b, c))
    add_link_sample(recording, 2, 1, connection(c, b), connection(c, "8.8.8.8:53"))
    assert peers(recording) == [
        [0, a, b, 1], [0, a, b, 1],
        [1, b, a, 0], [1, b, c, 2], [1, b, a, 0], [1, b, c, 2],
        [2, c, b, 1], [2, c, "8.8.8.8:53", -1],
    ]  # fmt: skip


def test_a_peer_that_could_be_either_of_two_ranks_is_not_known(recording: Path) -> None:
    a, b = "127.0.0.1:1", "127.0.0.1:2"
    add_link_sample(recording, 0, 1, connection(a, b))
    for rank in (1, 2):
        add_link_sample(recording, rank, 1, connection(b, a))
    assert peers(recording)[0] == [0, a, b, -1]


def test_a_last_sample_that_was_cut_short_is_left_out(recording: Path) -> None:
    add_link_sample(recording, 0, 1, connection("10.0.0.1:1", "10.0.0.2:2"))
    file = rank_folder(recording, 0) / LINKS_FILE
    file.write_text(file.read_text() * 2 + file.read_text()[:40])
    trace = read_trace(recording)
    assert len(trace.links) == 2
    assert trace.problems == ()

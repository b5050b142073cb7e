"""Samples of TCP connections -> a table that knows who is at the other end."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import LINKS_FILE, rank_folder
from tests.synthetic import add_link_sample, write_recording


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

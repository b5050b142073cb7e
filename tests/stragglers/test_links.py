"""Which link is slow, from counters that are known."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from overlapscope.stragglers.transfers import find_slow_links, measure_link_rates
from overlapscope.trace.recording import read_trace
from tests.synthetic import add_link_sample, write_recording

SECOND_NS = 1_000_000_000
FIRST_STEP_ENDS_NS = SECOND_NS + 10_000_000


def address(rank: int, port: int = 29_500) -> str:
    return f"10.0.0.{rank}:{port}"


def rates_of(folder: Path, *samples: tuple[int, dict[str, int]]) -> pd.DataFrame:
    """Rank 0 sends to rank 1, which sends nothing; each sample is seconds after the first step, and counters."""
    write_recording(folder, ranks=2, steps=2)
    for after_s, counters in samples:
        time_ns = FIRST_STEP_ENDS_NS + after_s * SECOND_NS
        add_link_sample(folder, 0, time_ns, {"local": address(0), "peer": address(1)} | counters)
        add_link_sample(folder, 1, time_ns, {"local": address(1), "peer": address(0)})
    return measure_link_rates(read_trace(folder))


def test_the_rate_of_a_link_is_the_upper_quartile_of_what_the_kernel_measured(tmp_path: Path) -> None:
    rates = rates_of(
        tmp_path,
        (0, {"delivery_bytes_per_s": 70, "bytes_acked": 1_000, "busy_us": 50, "retransmits": 3, "min_rtt_us": 9}),
        (2, {"delivery_bytes_per_s": 90, "bytes_acked": 400_000, "busy_us": 9_000, "retransmits": 4, "min_rtt_us": 8}),
        (
            4,
            {
                "delivery_bytes_per_s": 1,
                "bytes_acked": 101_000,
                "busy_us": 1_000_050,
                "retransmits": 5,
                "min_rtt_us": 7,
            },
        ),
    )
    (link,) = rates.to_dict("records")
    assert link == {
        "rank": 0,
        "peer_rank": 1,
        "within_host": False,
        "bytes": 100_000,
        "busy_ns": SECOND_NS,
        "rate_bytes_per_s": 80,
        "busy_share": pytest.approx(0.25),
        "min_rtt_us": 7,
        "retransmits": 2,
    }


def test_what_was_sent_before_the_first_step_was_over_does_not_count(tmp_path: Path) -> None:
    rates = rates_of(
        tmp_path,
        (-1, {}),
        (0, {"bytes_acked": 70_000, "busy_us": 9_000_000}),
        (1, {"bytes_acked": 80_000, "busy_us": 9_100_000}),
    )
    assert rates[["bytes", "busy_ns"]].to_numpy().tolist() == [[10_000, SECOND_NS // 10]]


def test_connections_between_the_same_two_ranks_are_one_link(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=2)
    for after_s in (0, 1):
        time_ns = FIRST_STEP_ENDS_NS + after_s * SECOND_NS
        ports = (1, 2, 3)
        ours = [
            {"local": address(0, p), "peer": address(1, p), "bytes_acked": p * 100 * after_s, "delivery_bytes_per_s": p}
            for p in ports
        ]
        add_link_sample(tmp_path, 0, time_ns, *ours)
        add_link_sample(tmp_path, 1, time_ns, *[{"local": c["peer"], "peer": c["local"]} for c in ours])
    rates = measure_link_rates(read_trace(tmp_path))
    assert rates[["rank", "peer_rank", "bytes", "rate_bytes_per_s"]].to_numpy().tolist() == [[0, 1, 600, 6]]


def test_a_recording_without_samples_has_no_links(tmp_path: Path) -> None:
    rates = rates_of(tmp_path)
    assert rates.empty
    assert find_slow_links(rates).empty


MB = 1_000_000


def links(*rows: tuple[int, int, float], within_host: bool = False, moved: int = 100 * MB) -> pd.DataFrame:
    """Links as ``measure_link_rates`` gives them: rank, peer and MB/s of each."""
    rates = pd.DataFrame(rows, columns=["rank", "peer_rank", "rate_bytes_per_s"])
    rates["rate_bytes_per_s"] *= MB
    return rates.assign(within_host=within_host, bytes=moved, busy_ns=moved * SECOND_NS / rates["rate_bytes_per_s"])


def named(*rates: pd.DataFrame) -> list[list[float]]:
    """Rank, peer, and the usual MB/s."""
    slow = find_slow_links(pd.concat(rates, ignore_index=True))
    slow["usual_bytes_per_s"] /= MB
    return slow[["rank", "peer_rank", "usual_bytes_per_s"]].to_numpy().tolist()


def test_a_link_with_less_than_half_the_usual_rate_is_named() -> None:
    assert named(links((0, 1, 100), (1, 2, 49), (2, 3, 110), (3, 0, 100))) == [[1, 2, 100]]
    assert named(links((0, 1, 100), (1, 2, 51), (2, 3, 110), (3, 0, 100))) == []


def test_the_slowest_link_is_named_first() -> None:
    assert named(links((0, 1, 100), (1, 0, 100), (2, 3, 30), (4, 5, 20), (6, 7, 100))) == [[4, 5, 100], [2, 3, 100]]


def test_a_link_to_a_rank_that_can_hardly_send_is_not_named() -> None:
    assert named(links((0, 1, 41), (1, 2, 24), (2, 3, 800), (3, 0, 600), (4, 5, 700))) == [[1, 2, 650]]


def test_between_two_ranks_the_other_direction_is_the_only_measure() -> None:
    assert named(links((0, 1, 100), (1, 0, 49))) == [[1, 0, 100]]
    assert named(links((0, 1, 100), (1, 0, 51))) == []


def test_one_link_alone_is_never_slow() -> None:
    assert named(links((0, 1, 1))) == []


def test_links_that_leave_the_host_are_not_compared_with_those_that_do_not() -> None:
    inside = links((0, 1, 5000), (1, 2, 5000), (4, 5, 5000), (5, 6, 5000), within_host=True)
    assert named(inside, links((2, 4, 100), (6, 0, 110))) == []
    assert named(inside, links((2, 4, 100), (6, 0, 20))) == [[6, 0, 100]]


def test_links_that_carry_little_are_neither_named_nor_compared_with() -> None:
    """Control messages wait for acknowledgements that the kernel delays on purpose."""
    fast = links((0, 1, 100), (1, 2, 100), (2, 0, 100))
    assert named(fast, links((1, 0, 0.1), (2, 1, 0.1), (0, 2, 0.1), moved=9 * MB)) == []


def test_a_link_that_was_busy_for_too_few_ticks_of_the_kernel_is_not_named() -> None:
    assert named(links((0, 1, 100), (1, 2, 40), (2, 0, 100), moved=3 * MB)) == []


def test_the_usual_rate_is_that_of_the_other_links() -> None:
    """With three links the median of all would be that of one of the others."""
    assert named(links((0, 2, 400), (1, 0, 800), (2, 1, 24))) == [[2, 1, 600]]

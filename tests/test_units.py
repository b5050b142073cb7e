"""Numbers as people read them."""

from __future__ import annotations

import pytest

from overlapscope.text import format_count, format_ns, format_step_ns, format_value, use_no_break_spaces

GLUE = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("text", "together"),
    [
        ("7.24 ms ± 75.2 µs a step", "7.24_ms_±_75.2_µs a step"),
        ("costs 14.7 % of 2 s", "costs 14.7_% of 2_s"),
        ("4 MB and 3.7 GB/s", "4_MB and 3.7_GB/s"),
        ("in 16 steps of 4 ranks", "in 16 steps of 4 ranks"),
    ],
)
def test_a_number_stays_with_its_unit(text: str, together: str) -> None:
    assert use_no_break_spaces(text) == together.replace("_", GLUE)


def test_counts_have_three_digits_from_ten_thousand_on() -> None:
    assert [format_count(count) for count in (0, 9_408, 25_600, 4_194_304, 12_345_678_901)] == [
        "0",
        "9,408",
        "25.6 k",
        "4.19 M",
        "12.3 G",
    ]


def test_a_time_that_rounds_to_one_of_the_next_unit_has_that_unit() -> None:
    assert [format_ns(ns) for ns in (999_499, 999_500, 1_000_000, 999.4, 999.6)] == [
        "999 µs",
        "1.00 ms",
        "1.00 ms",
        "999 ns",
        "1.00 µs",
    ]


def test_a_negative_number_has_a_minus_sign_unless_it_rounds_to_zero() -> None:
    assert [format_value(ns, "ms") for ns in (-1.2e6, -1e3, 1e7)] == ["−1.20", "0.00", "10.00"]


def test_the_article_of_a_step_is_as_its_time_is_spoken() -> None:
    times_ms = (341, 812, 8.14, 11.5, 18, 110, 1.1)
    articles = [format_step_ns(1e6 * time).partition(" ")[0] for time in times_ms]
    assert articles == ["a", "an", "an", "an", "an", "a", "a"]

"""Numbers, ranks and shares as users read them: one notation of each, for every command, page and report.

``format_value`` formats a value by its unit; tables and sentences call it, or one of the functions behind it, so the
same number reads the same everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from overlapscope.interval import Interval

Value = Interval | float | int | str | None
"""A raw value of a report: text, a number, a number with its confidence interval, or None if it is unknown."""
Unit = Literal[
    "text",
    "count",
    "rank",
    "ns",
    "ns range",
    "ms",
    "ms range",
    "ms change",
    "ms change range",
    "share",
    "share change",
    "ratio",
    "bytes",
    "bytes/s",
    "MB",
]
"""Unit and notation of a value. A ``range`` shows the bounds of an interval, a ``change`` has a sign; times are stored
in nanoseconds, and ``ms`` shows them in milliseconds with two decimals, as columns of a table need."""

UNKNOWN: Final = "–"
_MINUS: Final = "\N{MINUS SIGN}"
_NS_PER: Final = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
_BYTES_PER: Final = (("GB", 1024**3), ("MB", 1024**2), ("kB", 1024))

_SPOKEN_WITH_A_VOWEL: Final = r"8|1[18](?!\d)"
"""How eight, eleven, eighteen and eighty begin, but not 110."""


def format_value(value: Value, unit: Unit) -> str:
    """Format a value by its unit; empty for None, a dash for a number that is unknown.

    Example: 1_250_000 is ``1.25 ms`` as ``ns``, ``1.25`` as ``ms``, ``+1.25`` as ``ms change``.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if unit.endswith("range"):
        return _FORMAT_RANGE[unit](value) if isinstance(value, Interval) else ""
    number = value.value if isinstance(value, Interval) else value
    return UNKNOWN if math.isnan(number) else _FORMATS[unit](number)


def format_ns(time_ns: float | None) -> str:
    """Format nanoseconds with three significant digits: ``1.25 ms``, ``312 µs``; a dash if unknown."""
    if time_ns is None or math.isnan(time_ns):
        return UNKNOWN
    for unit, ns in _NS_PER:
        if abs(time_ns) >= 0.9995 * ns:  # from there on it rounds to 1.00
            return f"{_significant(time_ns / ns)} {unit}"
    return f"{time_ns:.0f} ns"


def format_step_ns(time_ns: float) -> str:
    """Format the time of a step with its article: ``a 341 ms step``, ``an 812 ms step``."""
    time = format_ns(time_ns)
    return f"{'an' if re.match(_SPOKEN_WITH_A_VOWEL, time) else 'a'} {time} step"


def format_ns_change(time_ns: float) -> str:
    """Format a difference of times with its sign: ``+1.70 ms``."""
    return f"{'+' if time_ns >= 0 else _MINUS}{format_ns(abs(time_ns))}"


def format_interval_ns(interval: Interval) -> str:
    """Format the bounds of a time: ``1.25 to 1.38 ms``; a dash if unknown."""
    if math.isnan(interval.low) or math.isnan(interval.high):
        return UNKNOWN
    low, high = format_ns(interval.low), format_ns(interval.high)
    amount, _, unit = low.partition(" ")
    return f"{amount if unit == high.partition(' ')[2] else low} to {high}"


def format_timestamp_ns(time_ns: int) -> str:
    """Format a point in time within a step, in milliseconds to the microsecond: ``12.345 ms``."""
    return f"{time_ns / 1e6:,.3f} ms".replace("-", _MINUS)


def format_share(share: float) -> str:
    """Format a ratio as a percentage, with three significant digits below 10 %: ``7.63 %``, ``12 %``.

    A dash if it is NaN, as when the denominator was 0; 100 % only if nothing is missing.
    """
    if math.isnan(share):
        return UNKNOWN
    percent = 100 * share
    if abs(percent) < 9.995:
        return f"{percent:.2f} %".replace("-", _MINUS) if abs(percent) >= 0.005 else "0 %"
    return "99 %" if 99 < percent < 99.95 else f"{percent:.0f} %".replace("-", _MINUS)


def format_share_change(share: float) -> str:
    """Format the change of a share with its sign: ``+3.21 %``, ``−12 %``, ``0 %``."""
    text = format_share(share)
    return text if share <= 0 or text in ("0 %", UNKNOWN) else f"+{text}"


def format_share_range(interval: Interval) -> str:
    """Format the bounds of a change in percent: ``−0.41 to +3.21 %``."""
    return f"{format_share_change(interval.low).removesuffix(' %')} to {format_share_change(interval.high)}"


def format_bytes(size_bytes: float | None) -> str:
    """Format bytes in powers of 1024, as DDP's ``bucket_cap_mb`` counts them: ``25 MB``, ``4 kB``."""
    if size_bytes is None:
        return UNKNOWN
    for unit, size in _BYTES_PER:
        if size_bytes >= size:
            return f"{_significant(size_bytes / size).removesuffix('.00').removesuffix('.0')} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(count: int) -> str:
    """Format a count, with three significant digits from ten thousand upwards: ``9,408``, ``25.6 k``, ``4.19 M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= max(size, 10_000):
            return f"{_significant(count / size).removesuffix('.00').removesuffix('.0')} {unit}"
    return f"{count:,}"


def format_bandwidth(bits_per_s: float) -> str:
    """Format the bandwidth of a link: ``1 Gbit/s``."""
    unit, bits = ("Gbit/s", 1e9) if bits_per_s >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_s / bits:.3g} {unit}"


def count_of(number: int, what: str) -> str:
    """Format a number of things: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def rank_list(ranks: Iterable[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0-5, 7``."""
    numbers = sorted(set(ranks))
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {format_ranks(numbers)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format numbers of ranks or steps, as ``parse_ranks`` reads them; three or more in a row are a range.

    Example: 0, 1, 2, 3, 5, 6 are ``0-3, 5, 6``.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def parse_ranks(text: str, known: Sequence[int]) -> tuple[list[int], list[str]]:
    """Parse ranks and ranges of ranks, such as ``0-7, 12``.

    Args:
        known: The existing ranks.

    Returns:
        Each known rank once, in the order given; and the parts of the text that match no rank.
    """
    found: dict[int, None] = {}
    unknown = []
    for part in re.split(r"[,\s]+", text):
        bounds = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if bounds is None:
            continue
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        meant = [rank for rank in known if first <= rank <= last]
        found.update(dict.fromkeys(meant))
        if not meant:
            unknown.append(part)
    return list(found), unknown


def capitalize(sentence: str) -> str:
    """Capitalize the first letter only."""
    return sentence[:1].upper() + sentence[1:]


def use_no_break_spaces(text: str) -> str:
    """Replace the space between a number and its unit by a no-break space."""
    return re.sub(r"(?<=\d) (?=%|[nµm]?s\b|[kMG]?B\b)| (?=±)|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def _significant(number: float) -> str:
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{digits}f}"


def _format_ms(time_ns: float) -> str:
    text = f"{time_ns / 1e6:.2f}".replace("-", _MINUS)
    return "0.00" if text == f"{_MINUS}0.00" else text


def _format_ms_change(time_ns: float) -> str:
    text = f"{time_ns / 1e6:+.2f}".replace("-", _MINUS)
    return "0.00" if text[1:] == "0.00" else text


def _format_bounds(interval: Interval, format_bound: Callable[[float], str]) -> str:
    if math.isnan(interval.low):
        return ""
    return f"{format_bound(interval.low)} to {format_bound(interval.high)}"


_FORMATS: Final[dict[str, Callable[[float], str]]] = {
    "text": str,
    "count": lambda number: f"{int(number):,}",
    "rank": lambda rank: f"rank {int(rank)}",
    "ns": format_ns,
    "ms": _format_ms,
    "ms change": _format_ms_change,
    "share": format_share,
    "share change": format_share_change,
    "ratio": lambda ratio: f"{ratio:.2f}",
    "bytes": format_bytes,
    "bytes/s": lambda rate: f"{rate / 1e9:.3g} GB/s",
    "MB": lambda size_mb: f"{size_mb:g}",
}
_FORMAT_RANGE: Final[dict[str, Callable[[Interval], str]]] = {
    "ns range": format_interval_ns,
    "ms range": lambda interval: _format_bounds(interval, _format_ms),
    "ms change range": lambda interval: _format_bounds(interval, _format_ms_change),
}

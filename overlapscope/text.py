"""Number formatting: times, sizes, counts and shares in a unit of suitable magnitude."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from overlapscope.interval import Interval

# Parsing and formatting of rank numbers and ranges, such as ``0-7, 12``.


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


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks so that ``parse_ranks`` can read them: ``0-7, 12``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


_NS_PER = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
_BYTES_PER = (("GB", 1024**3), ("MB", 1024**2), ("kB", 1024))


def format_ns(time_ns: float | None) -> str:
    """Format nanoseconds with three significant digits: ``1.25 ms``, ``312 µs``; a dash if unknown."""
    if time_ns is None or math.isnan(time_ns):
        return "–"
    for unit, ns in _NS_PER:
        if abs(time_ns) >= ns:
            return f"{_significant(time_ns / ns)} {unit}"
    return f"{time_ns:.0f} ns"


def format_interval_ns(interval: Interval) -> str:
    """Format the bounds of a time: ``1.25 to 1.38 ms``; a dash if unknown."""
    if math.isnan(interval.low) or math.isnan(interval.high):
        return "–"
    low, high = format_ns(interval.low), format_ns(interval.high)
    amount, _, unit = low.partition(" ")
    return f"{amount if unit == high.partition(' ')[2] else low} to {high}"


def format_timestamp_ns(time_ns: int) -> str:
    """Format a point in time within a step, in milliseconds to the microsecond: ``12.345 ms``."""
    return f"{time_ns / 1e6:,.3f} ms".replace("-", "\N{MINUS SIGN}")


def format_bytes(size_bytes: float | None) -> str:
    """Format bytes in powers of 1024, as DDP's ``bucket_cap_mb`` counts them: ``25 MB``, ``4 kB``."""
    if size_bytes is None:
        return "–"
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


def format_share(share: float) -> str:
    """Format a ratio as a percentage; a dash if it is NaN, as when the denominator was 0."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %" if share < 0.9995 else "100 %"


def use_no_break_spaces(text: str) -> str:
    """Replace the space between a number and its unit by a no-break space."""
    return re.sub(r"(?<=\d) (?=%|[nµm]?s\b|[kMG]?B\b)| (?=±)|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def format_bandwidth(bits_per_s: float) -> str:
    """Format the bandwidth of a link: ``1 Gbit/s``."""
    unit, bits = ("Gbit/s", 1e9) if bits_per_s >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_s / bits:.3g} {unit}"


def _significant(number: float) -> str:
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{digits}f}"

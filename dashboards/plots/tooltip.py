"""Tooltip of a span on the timeline."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from dashboards.plots.span_details import SpanDetails
from overlapscope.breakdown.arrivals import Arrival
from overlapscope.text import format_bytes, format_ns, format_timestamp_ns

_MAX_PARAMETERS: Final = 8

Rows = list[tuple[str, str]]
"""Label and value of each line."""


def build_tooltip(span: SpanDetails, most_parameters: int | None = _MAX_PARAMETERS) -> tuple[str, Rows]:
    """Return title and lines for a span; ``most_parameters`` limits how many parameters are named (None: no limit)."""
    where = "" if span.bucket is None else f" · bucket {span.bucket}"
    title = f"{span.what}{where}"
    rows: Rows = [("rank", str(span.rank)), ("step", str(span.step))]
    if span.no_sync:
        rows.append(("pass", "under no_sync(): gradients are accumulated, not reduced"))
    rows += _build_parameter_rows(span.parameters, most_parameters)
    if span.bytes is not None:
        rows.append(("size", f"{format_bytes(span.bytes)} of {span.dtype}"))
    rows += _build_time_rows(span)
    if span.arrival is not None:
        rows += _build_arrival_rows(span.arrival)
    if span.call_site:
        rows.append(("launched at", span.call_site))
    return title[:1].upper() + title[1:], rows


def build_round_rows(segment: pd.Series[Any]) -> Rows:
    """Return lines on a round of an all-reduce, a row of ``trace.segments``."""
    number = f" {segment['round']} of {segment['rounds']}" if segment["rounds"] > 1 else ""
    rows: Rows = [("round" + number, segment["phase"] or str(segment["round"]))]
    for label, preposition, others in (("sends", "to", "sent_to"), ("receives", "from", "received_from")):
        if segment[others]:
            size = format_bytes(int(segment[f"{others.partition('_')[0]}_bytes"]))
            rows.append((label, f"{size} {preposition} {_format_ranks(segment[others])}"))
    return [*rows, ("takes", format_ns(int(segment["end_ns"] - segment["start_ns"])))]


def _format_ranks(ranks: str) -> str:
    return f"rank{'s' if ',' in ranks else ''} {ranks}"


def _build_time_rows(span: SpanDetails) -> Rows:
    """Return lines on times, which count from the start of the step, as the first line states."""
    rows: Rows = []
    if span.ready_ns is not None:
        rows.append(("ready", format_timestamp_ns(span.ready_ns)))
    if span.launch_ns is not None:
        rows.append(("launched", format_timestamp_ns(span.launch_ns)))
    if span.end_ns is None:
        rows.append(("end", "never seen: launched but not completed"))
    elif span.start_ns == span.end_ns:
        rows.append(("at", format_timestamp_ns(span.start_ns)))
    else:
        rows.append(("start", format_timestamp_ns(span.start_ns) + (" or later" if span.start_is_bound else "")))
        rows += [
            ("end", format_timestamp_ns(span.end_ns) + _format_end_uncertainty(span)),
            ("duration", format_ns(span.duration_ns)),
        ]
    label, moment = rows[0]
    if span.launch_ns is not None or span.end_ns is not None:
        rows[0] = (label, f"{moment} into the {'step' if span.step_is_known else 'recording'}")
    return rows


def _build_arrival_rows(arrival: Arrival) -> Rows:
    """Return lines on the rank it waits for and the link speed: bandwidths as in nccl-tests, of the transfer alone."""
    error = f" ± {format_ns(arrival.clock_error_ns)}" if arrival.clock_error_ns else ""
    waits = f"{format_ns(arrival.wait_ns)}{error} for rank {arrival.last_rank}"
    rows: Rows = [
        ("waits", waits if arrival.wait_ns else "for nobody: it arrives last"),
        ("transfer", f"{format_ns(arrival.transfer_ns)}{error}"),
    ]
    for label, bandwidth in (("algbw", arrival.algbw_bytes_per_s), ("busbw", arrival.busbw_bytes_per_s)):
        if not math.isnan(bandwidth):
            rows.append((label, f"{bandwidth / 1e9:.3g} GB/s"))
    return rows


def _build_parameter_rows(names: tuple[str, ...], most: int | None) -> Rows:
    shown = list(names[:most])
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    label = "parameter" if len(names) == 1 else f"{len(names)} parameters"
    return [(label if line == 0 else "", name) for line, name in enumerate(shown)]


def _format_end_uncertainty(span: SpanDetails) -> str:
    """Return a note on the end of a span that may have been earlier."""
    if not span.end_uncertainty_ns:  # by how much is not known of a device: somebody has waited for it
        return " or earlier" if span.start_is_bound else ""
    if span.duration_ns is not None and span.end_uncertainty_ns >= span.duration_ns:
        return " at the latest"
    return f" or up to {format_ns(span.end_uncertainty_ns)} earlier"

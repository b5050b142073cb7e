"""What people read when they point at a span."""

from __future__ import annotations

from typing import Final

from dashboards.units import format_bytes, format_moment_ns, format_ns
from overlapscope.analysis.span_details import SpanDetails

_MAX_PARAMETERS: Final = 8

Rows = list[tuple[str, str]]
"""Label and value of each line."""


def tooltip_of(span: SpanDetails) -> tuple[str, Rows]:
    """Title and lines for a span."""
    where = "" if span.bucket is None else f" · bucket {span.bucket}"
    title = f"{span.what}{where}".capitalize()
    rows: Rows = [("rank", str(span.rank)), ("step", str(span.step))]
    if span.no_sync:
        rows.append(("pass", "under no_sync(): gradients are accumulated, not reduced"))
    if span.bytes is not None:
        rows.append(("size", f"{format_bytes(span.bytes)} of {span.dtype}"))
    rows += _times(span)
    rows += _parameters(span.parameters)
    if span.call_site:
        rows.append(("launched at", span.call_site))
    return title, rows


def _times(span: SpanDetails) -> Rows:
    since = "of the step" if span.step_is_known else "of the recording"
    rows: Rows = []
    if span.launch_ns is not None:
        if span.ready_ns is not None:
            rows.append(("ready", f"{format_moment_ns(span.ready_ns)} {since}"))
        rows.append(("launched", f"{format_moment_ns(span.launch_ns)} {since}"))
    if span.end_ns is None:
        return [*rows, ("end", "never seen: it was launched and did not complete")]
    if span.start_ns == span.end_ns:
        return [*rows, ("at", f"{format_moment_ns(span.start_ns)} {since}")]
    rows.append(("start", f"{format_moment_ns(span.start_ns)}{' or later' if span.start_is_bound else ''}"))
    end = format_moment_ns(span.end_ns)
    if span.end_uncertainty_ns:
        end += f" or up to {format_ns(span.end_uncertainty_ns)} earlier"
    rows += [("end", end), ("duration", format_ns(span.duration_ns))]
    if span.algbw_gb_per_s is not None:
        rows.append(("algbw", f"{span.algbw_gb_per_s:.3g} GB/s"))
    return rows


def _parameters(names: tuple[str, ...]) -> Rows:
    if not names:
        return []
    shown = list(names[:_MAX_PARAMETERS])
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    label = "parameter" if len(names) == 1 else f"{len(names)} parameters"
    return [(label if row == 0 else "", name) for row, name in enumerate(shown)]

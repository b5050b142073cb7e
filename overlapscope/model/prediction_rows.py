"""The recommendation as table rows, with formatted cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapscope.model import sentences
from overlapscope.model.recommend import Prediction, Recommendation
from overlapscope.units import format_interval_ns, format_ns, format_share

Cells = tuple[str, ...]

SIZE_COLUMNS: Final[Cells] = ("bucket_cap_mb", "buckets", "step", "90 % interval", "exposed", "recorded")
WHAT_IF_COLUMNS: Final[Cells] = ("", "bucket_cap_mb", "step", "gain")


def make_size_rows(found: Recommendation) -> list[Cells]:
    """Return a row for each bucket size worth showing, for DDP's default and for the present setting of the job."""
    predictions = list(found.sizes)
    for other in (found.default, found.now):
        if other.buckets not in {each.buckets for each in predictions}:
            predictions.append(other)
    return [
        (
            ", ".join([_label(each), *_marks(each, found)]),
            str(len(each.buckets)),
            format_ns(each.step_ns.value),
            format_interval_ns(each.step_ns),
            format_ns(each.exposed_ns),
            "" if each.recorded_ns is None else format_ns(each.recorded_ns.value),
        )
        for each in predictions
    ]


def make_what_if_rows(found: Recommendation) -> list[Cells]:
    """Return a row for each change other than the size, with the best size for it."""
    return [
        (each.change, _cap(each.cap_mb), format_ns(each.step_ns), format_share(each.gain)) for each in found.what_ifs
    ]


def list_assumptions(found: Recommendation) -> list[str]:
    """List the assumptions behind the changes, each once, with the changes that it applies to."""
    known = dict.fromkeys(each.assumption for each in found.what_ifs if each.assumption)
    return [
        f"{', '.join(each.change for each in found.what_ifs if each.assumption == assumption)}: {assumption}."
        for assumption in known
    ]


def _label(each: Prediction) -> str:
    return sentences.format_cap_range(each.low_mb, each.high_mb) or ("DDP's default" if each.is_default else "other")


def _marks(each: Prediction, found: Recommendation) -> Iterator[str]:
    if each.buckets == found.best.buckets:
        yield "best"
    if each.buckets == found.now.buckets:
        yield "now"


def _cap(cap_mb: float | None) -> str:
    return "default" if cap_mb is None else f"{cap_mb:g}"

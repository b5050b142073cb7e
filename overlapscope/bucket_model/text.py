"""The recommendation as sentences."""

from __future__ import annotations

import math
from typing import Final

from overlapscope.bucket_model.contention import ASSUMED_COMPUTE_SLOWDOWN
from overlapscope.bucket_model.plans import format_caps
from overlapscope.bucket_model.recommend import MissingMeasurement, Prediction, Recommendation
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.bucket_model.what_if import ChangeKind, Limits, WhatIf
from overlapscope.interval import Interval
from overlapscope.text import (
    capitalize,
    count_of,
    format_ns,
    format_share,
    format_share_change,
    format_share_range,
)

_MOST_CAPS_SHOWN: Final = 12

MISSING_MEASUREMENTS: Final[dict[MissingMeasurement, str]] = {
    "sizes": "The measured all-reduces are all about the same size, so other sizes are guesses: record with "
    "--probe-buckets, or run overlapscope calibrate.",
    "compute slowdown": "One bucket plan doesn't show how much communication slows compute down: record with "
    "--probe-buckets.",
    "lane slowdown": "This recording doesn't show how much two concurrent all-reduces slow each other down: "
    "overlapscope calibrate measures it.",
}
_CHANGES: Final[dict[ChangeKind, str]] = {
    "compression": "fp16 or bf16 compression hook",
    "fewer reductions": "no_sync, and a reduction every {number} micro-steps",
    "bucket views": "gradient_as_bucket_view=True",
    "twice the bandwidth": "links of twice the bandwidth",
    "more ranks": "{number} ranks instead of {ranks}",
}
_ASSUMPTIONS: Final[dict[ChangeKind, str]] = {
    "compression": "gradients are float32, and casting them takes no time",
    "fewer reductions": "a micro-step is as long as a step is now; the batch is {number} times as large",
    "bucket views": "",
    "twice the bandwidth": "",
    "more ranks": "{algorithm} all-reduce over links like those {links}, with the same work per rank",
}


def format_headline(advice: Recommendation) -> str:
    """Say what to do, in one or two sentences."""
    if not advice.has_choice:
        return (
            f"Nothing to choose: every bucket size gives this model the same plan, {_format_bucket_count(advice.now)}."
        )
    is_now = advice.best.buckets == advice.now.buckets
    now, best = format_ns(advice.now.step_ns.value), format_ns(advice.best.step_ns.value)
    if advice.verdict == "change":
        gain = _format_gain(advice)
        return f"{format_advised_setting(advice)}: {now} → {best} a step ({gain}).{_format_good_range(advice)}"
    if is_now or advice.gain.value <= 0:
        more = f"{100 * MIN_GAIN:g} %"
        return f"Keep the bucket size: at {now} a step, no other is predicted to be more than {more} faster."
    would = f"{_format_setting(advice.best)} would change the {now} step by {_format_gain(advice)}"
    if advice.verdict == "leave it":
        return f"Keep the bucket size{'; it hardly matters here' * advice.hardly_matters}: {would}."
    return f"Can't tell yet: {would}."


def format_advised_setting(advice: Recommendation) -> str:
    """Say what to set for the best size, without a full stop."""
    if not advice.best.is_default:
        return f"Set {_format_setting(advice.best)}"
    return f"Remove {advice.size_arguments}" if advice.size_arguments else "Leave bucket_cap_mb unset"


def format_free_plan(advice: Recommendation) -> str:
    """Say what the best plan of all gains, which a single size may not be able to express."""
    sizes_mb = ", ".join(f"{size:.3g}" for size in advice.free_bucket_mb[:_MOST_CAPS_SHOWN])
    sizes_mb += ", ..." if len(advice.free_bucket_mb) > _MOST_CAPS_SHOWN else ""
    if not advice.is_free_faster:
        return f"No plan with buckets of several sizes is predicted to gain {100 * MIN_GAIN:g} % over the best size."
    sure = "" if advice.free_gain.low > 0 else ', which may be no gain at all: bucket_cap_mb="auto" tries it'
    return (
        f"Buckets of {sizes_mb} MB: {format_ns(advice.free.step_ns.value)} a step, "
        f"{_format_change(advice.free_gain)} vs. the best size{sure}."
    )


def format_limit(limits: Limits, exposed_now: float | None = None) -> str:
    """Say what limits the step with the best size.

    Args:
        exposed_now: Share of the present step that is exposed communication; None if its size is the best.
    """
    limited = "The step is limited by" if exposed_now is None else "With the best size the step is limited by"
    exposed = f"{format_share(limits.exposed)} of it is exposed communication"
    exposed += "" if exposed_now is None else f", {format_share(exposed_now)} of the current step"
    if limits.limit == "compute":
        return f"{limited} compute: {exposed}."
    if limits.limit == "differences":
        return (
            f"{limited} differences between ranks: if all were equally fast, it would be "
            f"{format_share(limits.differences)} shorter; {exposed}."
        )
    if limits.limit == "latency":
        return (
            f"{limited} the latency of its all-reduces: without latency it would be "
            f"{format_share(limits.latency)} shorter; {exposed}."
        )
    without = f"if sending bytes took no time, it would be {format_share(limits.bandwidth)} shorter"
    if limits.limit == "last bucket":
        return f"{limited} its last bucket, which has nothing left to overlap with: {without}; {exposed}."
    return f"{limited} bandwidth: {without}; {exposed}."


def format_model_error(advice: Recommendation) -> str:
    """Say by how much the model misses the measurement, which predictions correct for; empty without a measurement."""
    error = advice.curve.predicted.error
    if math.isnan(error):
        return ""
    off = format_share_change(error)
    return f"For the plan that was measured the model alone is off by {off}; predictions are relative to it."


def _format_setting(prediction: Prediction) -> str:
    """Return the setting that gives a plan."""
    if prediction.is_default:
        return "DDP's default"
    if prediction.cap_mb is None:
        return _format_bucket_count(prediction)
    return format_caps([prediction.cap_mb])


def _format_bucket_count(prediction: Prediction) -> str:
    """Return the number of buckets, in words."""
    return count_of(len(prediction.buckets), "bucket")


def _format_gain(advice: Recommendation) -> str:
    """Format the change of the step time with the best size, and what it assumes of compute if that wasn't measured."""
    if "compute slowdown" not in advice.missing:
        return _format_change(advice.gain)
    low, high = (f"{100 * (each - 1):.0f}" for each in (ASSUMED_COMPUTE_SLOWDOWN.low, ASSUMED_COMPUTE_SLOWDOWN.high))
    return f"{_format_change(advice.gain)}, assuming that communication slows compute by {low} to {high} %"


def _format_change(gain: Interval) -> str:
    """Format the change of the step time, with its interval."""
    change = Interval(value=-gain.value, low=-gain.high, high=-gain.low)
    return f"{format_share_change(change.value)}, 90 % interval {format_share_range(change)}"


def _format_cap_range(low_mb: float | None, high_mb: float | None) -> str:
    """Format the range of caps that give the same buckets."""
    if low_mb is None or high_mb is None:
        return ""
    low, high = _round_to_two_digits(low_mb, math.ceil), _round_to_two_digits(high_mb, math.floor)
    if math.isinf(high_mb):
        return f"{low:g} and more"
    if low_mb == 0:
        return f"up to {high:g}"
    return f"{low:g} to {high:g}" if low < high else f"{high_mb:.4g}"


def _format_good_range(advice: Recommendation) -> str:
    caps = _format_cap_range(advice.good_from_mb, advice.good_to_mb)
    return f" {capitalize(caps)} MB are within 1 %." if caps else ""


def _round_to_two_digits(number: float, to: object) -> float:
    """Round to two digits, up or down."""
    if number <= 0 or math.isinf(number):
        return number
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{to(round(number / unit, 6)) * unit:.6g}")  # type: ignore[operator]


def describe_change(change: WhatIf, found: Recommendation) -> str:
    """Name a change."""
    return _CHANGES[change.kind].format(number=change.number, ranks=found.world_size)


def list_assumptions(found: Recommendation) -> list[str]:
    """List the assumptions behind the changes, each once, with the changes that it applies to."""
    changes: dict[str, list[str]] = {}
    for each in found.what_ifs:
        if assumption := _ASSUMPTIONS[each.kind]:
            links = "within this host" if found.hosts == 1 else f"between these {found.hosts} hosts"
            text = assumption.format(number=each.number, algorithm=each.algorithm, links=links)
            changes.setdefault(text, []).append(describe_change(each, found))
    return [f"{', '.join(names)}: {assumption}." for assumption, names in changes.items()]


def format_size_label(each: Prediction, found: Recommendation) -> str:
    """Name the sizes that give a plan, and say whether it is the best or the present one."""
    label = "DDP's default (1, then 25)" if each.is_default else _format_cap_range(each.low_mb, each.high_mb) or "other"
    marks = [mark for mark, other in (("best", found.best), ("now", found.now)) if each.buckets == other.buckets]
    return ", ".join([label, *marks])

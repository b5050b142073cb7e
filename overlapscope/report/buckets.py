"""Build the report of ``overlapscope recommend``: the predicted step of every bucket size, and which one to set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from overlapscope.advice.advice import Advice
from overlapscope.advice.observations import MAX_CYCLES
from overlapscope.breakdown.text import describe_drift
from overlapscope.bucket_model import text
from overlapscope.bucket_model.plans import format_caps
from overlapscope.bucket_model.recommend import Recommendation
from overlapscope.report.report import Column, Report, Section, Table
from overlapscope.text import count_of, format_bytes
from overlapscope.trace.description import describe_auto_choices
from overlapscope.trace.recording import Trace


def build_buckets_report(trace: Trace, advice: Advice, plan_path: Path | None = None) -> Report:
    """Build the report from the advice on a recording.

    Args:
        plan_path: File that the best plan was written to, if any.
    """
    return Report(
        facts=(f"{trace.path}: {describe_basis(advice)}", *describe_auto_choices(trace.run)),
        sections=(build_buckets_section(advice, plan_path),),
        content=_collect_content(trace, advice),
    )


def build_buckets_section(advice: Advice, plan_path: Path | None = None) -> Section:
    """Build the section on bucket sizes: what to set, why, and what other changes would gain."""
    found = advice.recommendation
    return Section(
        name="buckets",
        title="Buckets",
        headline=text.format_headline(found),
        notes=(
            *_generate_caveats(advice),
            *filter(None, [text.format_model_error(found)]),
            _describe_limit(found),
        ),
        tables=(*([_tabulate_sizes(found)] if found.has_choice else []), _tabulate_what_ifs(found)),
        actions=tuple(_generate_actions(found, plan_path)),
    )


def _tabulate_sizes(found: Recommendation) -> Table:
    """Tabulate each bucket size worth showing, DDP's default and the present setting of the job."""
    predictions = list(found.sizes)
    for other in (found.default, found.now):
        if other.buckets not in {each.buckets for each in predictions}:
            predictions.append(other)
    return Table(
        name="sizes",
        title="Predicted step time by bucket size",
        columns=(
            Column("caps", "bucket_cap_mb", "text"),
            Column("buckets", "buckets", "count"),
            Column("step", "step", "ns"),
            Column("step", "90 % interval", "ns range"),
            Column("exposed", "exposed", "ns"),
            Column("recorded", "recorded", "ns"),
        ),
        rows=tuple(
            {
                "caps": text.format_size_label(each, found),
                "buckets": len(each.buckets),
                "step": each.step_ns,
                "exposed": each.exposed_ns,
                "recorded": each.recorded_ns,
                "bucket_cap_mb": each.cap_mb,
                "is_best": each.buckets == found.best.buckets,
                "is_now": each.buckets == found.now.buckets,
            }
            for each in predictions
        ),
    )


def _tabulate_what_ifs(found: Recommendation) -> Table:
    """Tabulate each change other than the size, with the best size for it."""
    return Table(
        name="what_ifs",
        title="What if, each with the best size for it",
        columns=(
            Column("change", "", "text"),
            Column("cap_mb", "bucket_cap_mb", "MB"),
            Column("step", "step", "ns"),
            Column("gain", "gain", "share"),
        ),
        rows=tuple(
            {
                "change": text.describe_change(each, found),
                "cap_mb": "default" if each.cap_mb is None else each.cap_mb,
                "step": each.step_ns,
                "gain": each.gain,
            }
            for each in found.what_ifs
        ),
        notes=tuple(text.list_assumptions(found)),
    )


def describe_basis(advice: Advice) -> str:
    """Name the data that the advice is based on."""
    observations = advice.fitted.observations
    gradients = observations.gradients
    steps, ranks = count_of(len(observations.steps), "step"), count_of(observations.world_size, "rank")
    parts = [
        f"{steps} of {ranks}",
        f"{count_of(len(gradients.names), 'gradient')} of {format_bytes(gradients.total_bytes)}",
        count_of(observations.used_plan_count, "bucket plan"),
    ]
    basis = ", ".join([*parts, "a calibration"] if advice.is_calibrated else parts)
    left_out = advice.recorded_steps - len(observations.steps)
    why = f"warm-up, incomplete ones, and more than {MAX_CYCLES} with one plan"
    return f"{basis}; {count_of(left_out, 'step')} left out ({why})" if left_out else basis


def _describe_limit(found: Recommendation) -> str:
    is_now = found.best.buckets == found.now.buckets
    return text.format_limit(found.limits, None if is_now else found.now.exposed_ns / found.now.step_ns.value)


def _generate_caveats(advice: Advice) -> Iterator[str]:
    if advice.drift is not None:
        yield describe_drift(advice.drift)
    yield from (text.MISSING_MEASUREMENTS[each] for each in advice.recommendation.missing)
    if not advice.fitted.observations.has_common_clock:
        yield "The ranks' clocks can't be compared, so waits and transfers are told apart rank by rank."
    if advice.missing_ranks:
        ranks = f"{advice.missing_ranks} of {count_of(advice.fitted.observations.world_size, 'rank')}"
        yield f"No log found for {ranks}: time spent waiting for them looks like transfer."
    if advice.other_models:
        others = count_of(advice.other_models, "other model")
        yield f"This is for the DDP model that reduces most, not for the {others} of this run."


def _generate_actions(found: Recommendation, plan_path: Path | None) -> Iterator[str]:
    yield text.format_free_plan(found)
    if found.is_free_faster and found.free_caps_mb is not None:
        yield f"  In torch's own DDP: {format_caps(found.free_caps_mb)}"
    if plan_path is not None:
        yield f"  Written to {plan_path}: pass it as DistributedDataParallel(bucket_plan=...)."


def _collect_content(trace: Trace, advice: Advice) -> dict[str, Any]:
    observations, found = advice.fitted.observations, advice.recommendation
    return {
        "schema": 1,
        "path": str(trace.path),
        "ranks": observations.ranks.tolist(),
        "steps": observations.steps.tolist(),
        "world_size": observations.world_size,
        "has_common_clock": observations.has_common_clock,
        "parameters": [parameter.name for parameter in advice.parameters],
        "sentences": [text.format_headline(found), *_generate_caveats(advice), _describe_limit(found)],
        "problems": trace.problems,
        **{field.name: getattr(found, field.name) for field in fields(found) if field.name != "curve"},
        "has_choice": found.has_choice,
        "model_error": found.curve.predicted.error,
    }

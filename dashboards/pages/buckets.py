"""Buckets page: predicted step time for each bucket size, the resulting step, and the setting that gives it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document

from dashboards.forecast import Forecast
from dashboards.pages.account import account_variables
from dashboards.pages.headline import Headline
from dashboards.pages.shell import Arguments, is_order_alone, render, render_part
from dashboards.plots.bucket_figure import CURVE_LEFT_PX, CURVE_RIGHT_PX
from dashboards.plots.bucket_layout import HEAD_PX, LANE_PX, RANK_PX
from dashboards.plots.bucket_tooltip import caps_text
from dashboards.plots.buckets import BucketsPlot, Choice, Chosen, Described
from dashboards.recording import Snapshot
from overlapscope.analysis.advice import Advice, predicted_step
from overlapscope.analysis.choices import choice_sentences
from overlapscope.analysis.lanes import BUCKET_SLOTS
from overlapscope.analysis.summary import Summary
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.model.curve import SPECIALS, Options
from overlapscope.model.sentences import error_of_model, free_plan, headline, limit
from overlapscope.model.typical_step import Step
from overlapscope.trace.reader import Trace
from overlapscope.units import format_bytes, format_ns, format_share

_LARGEST_MB: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class Shortcut:
    """A button that chooses a plan."""

    special: str
    label: str
    hint: str


_SHORTCUTS: Final = (
    Shortcut(special="", label="Best size", hint="The best single size  B"),
    Shortcut(special="best", label="Best plan", hint="The best of all plans; its buckets may differ in size  P"),
    Shortcut(special="present", label="Current plan", hint="The plan of the recorded job  N"),
    Shortcut(special="default", label="DDP's default", hint="A first bucket of 1 MB, then 25 MB  D"),
)


def build(document: Document, snapshot: Snapshot, arguments: Arguments, *, is_plain: bool = False) -> None:
    """Fill a document with the page, for the size and options in the query."""
    if is_order_alone(snapshot.trace):
        _build_reason(document, snapshot, "only collectives were recorded, no gradient buckets", is_plain=is_plain)
        return
    choice = choice_of(arguments)
    shown = snapshot.forecast_by_now(choice.options)
    if shown is None:
        render(
            document,
            "computing.html",
            title="Buckets",
            trace=snapshot.trace,
            is_plain=is_plain,
            message="The model is being fitted to the recording and tried with other bucket sizes. This takes a few "
            "seconds, once; the page then reloads by itself.",
        )
        return
    try:
        forecast = shown.forecast.result()
        curve = forecast.curve(choice.options).result()
    except OverlapScopeError as error:
        _build_reason(document, shown, str(error), is_plain=is_plain)
        return
    plot = BucketsPlot(forecast, choice, curve, lambda chosen, step: describe(shown.summary, forecast, chosen, step))
    document.js_on_event("document_ready", plot.start_script)
    described = plot.describe()
    first_mb = choice.options.first_mb
    render(
        document,
        "buckets_plot.html" if is_plain else "buckets.html",
        title="Buckets",
        trace=shown.trace,
        roots=plot.roots,
        is_plain=is_plain,
        **advice_variables(shown.trace, forecast.advice),
        **_age_variables(shown, snapshot),
        shortcuts=_SHORTCUTS,
        first_mb=None if first_mb is None else f"{first_mb:g}",
        is_compressed=choice.options.is_compressed,
        chosen=described.figures,
        account=described.account,
        ranks=[int(plot.step.ranks[place]) for place in plot.shown],
        all_ranks=forecast.fitted.observations.world_size,
        step_number=forecast.step.number,
        step_px=plot.layout.step_px,
        head_px=HEAD_PX,
        rank_px=RANK_PX,
        lane_px=LANE_PX,
        curve_left_px=CURVE_LEFT_PX,
        curve_right_px=CURVE_RIGHT_PX,
        bucket_slots=BUCKET_SLOTS,
    )


def _age_variables(shown: Snapshot, newest: Snapshot) -> dict[str, Any]:
    return {} if shown is newest else {"of_step": int(shown.trace.steps["step"].max())}


def advice_variables(trace: Trace, advice: Advice) -> dict[str, Any]:
    """Return the advice on bucket sizes and what it is based on, as template variables."""
    found = advice.recommendation
    return {
        "sentence": headline(found),
        "further": [free_plan(found), limit(found.limits), *choice_sentences(trace.run)],
        "basis": basis_of(advice),
        "missing": found.missing,
    }


def choice_of(arguments: Arguments) -> Choice:
    """Parse the choice in ``?cap_mb=…&plan=…&first=…&compression=…``; invalid values are ignored."""
    plan = _text(arguments, "plan")
    return Choice(
        options=Options(
            first_mb=_size_mb(_text(arguments, "first")), is_compressed=_text(arguments, "compression") == "fp16"
        ),
        cap_mb=_size_mb(_text(arguments, "cap_mb")),
        special=next((name for name in SPECIALS if name == plan), None),
    )


def basis_of(advice: Advice) -> str:
    """Return a sentence on the data that the prediction is based on."""
    observations = advice.fitted.observations
    steps, plans = len(observations.steps), observations.used_plans
    calibrated = ", and a calibration" if advice.is_calibrated else ""
    return (
        f"Predicted from {steps:,} step{'s' * (steps != 1)} of {observations.world_size:,} ranks, with {plans} bucket "
        f"plan{'s' * (plans != 1)}{calibrated}. {error_of_model(advice.recommendation)}"
    ).rstrip()


def describe(summary: Summary, forecast: Forecast, chosen: Chosen, step: Step) -> Described:
    """Return the figures and the setting of the choice, and its step as a bar below the recorded one."""
    return Described(
        figures=_figures(forecast, chosen, step),
        account=render_part(
            "account.html",
            **account_variables(summary, ("Predicted", predicted_step(summary.mean, chosen.curve, chosen.place))),
        ),
    )


def _figures(forecast: Forecast, chosen: Chosen, step: Step) -> str:
    curve, place, options = chosen.curve, chosen.place, chosen.choice.options
    low, high = curve.interval_ns[:, place]
    is_measured = curve.measured is not None and not options.is_compressed and curve.plans[place] == curve.measured.plan
    code = curve.setting_of(place, chosen.choice.special)
    size = curve.sizes[place] if place < len(curve.sizes) and chosen.choice.special is None else None
    return render_part(
        "buckets_chosen.html",
        headlines=[
            Headline(
                label="Measured step time" if is_measured else "Predicted step time",
                value=format_ns(curve.predicted_ns[place]),
                note=f"{format_ns(low)} to {format_ns(high)}",
                colour="accent",
            ),
            _against_now(curve.gain_of(place, forecast.reference)),
            Headline(
                label="Exposed",
                value=format_ns(curve.predicted.exposed_ns[place]),
                note=f"{format_share(curve.predicted.exposed_ns[place] / curve.predicted_ns[place])} of the step",
                colour="exposed",
            ),
            Headline(
                label="Buckets",
                value=f"{len(step.plan):,}",
                note=_range_text(int(step.bytes.min()), int(step.bytes.max())),
                colour="span-bucket-0",
            ),
        ],
        code=code,
        hook="model.register_comm_hook(None, default_hooks.fp16_compress_hook)" if options.is_compressed else "",
        caps="" if size is None else caps_text(size),
        plan_file=code.startswith("bucket_plan"),
        needs_list="bucket_cap_mb_list" in code,
    )


def _against_now(gain: Interval) -> Headline:
    value, low, high = (_signed(-share) for share in (gain.value, gain.high, gain.low))
    return Headline(
        label="Versus now",
        value=value,
        note=f"{low} to {high}" if low != high else "as it is set now",
        colour="hidden",
    )


def _signed(share: float) -> str:
    text = format_share(abs(share))
    sign = "+" if share > 0 else "\N{MINUS SIGN}"
    return "0 %" if text == "0.0 %" else f"{sign}{text}"


def _range_text(least: int, most: int) -> str:
    return f"of {format_bytes(most)}" if least == most else f"{format_bytes(least)} to {format_bytes(most)}"


def _build_reason(document: Document, snapshot: Snapshot, reason: str, *, is_plain: bool) -> None:
    render(
        document,
        "problem.html",
        title="Buckets",
        trace=snapshot.trace,
        is_plain=is_plain,
        **reason_variables(snapshot.trace, reason),
    )


def reason_variables(trace: Trace, reason: str) -> dict[str, Any]:
    """Return why nothing can be predicted and what to do, from the message of an error, as template variables."""
    what, _, todo = reason.removeprefix(f"{trace.path}: ").partition(": ")
    return {
        "headline": "No bucket size can be predicted from this recording",
        "message": f"{what[:1].upper()}{what[1:]}.",
        "advice": f"{todo[:1].upper()}{todo[1:]}."
        if todo
        else "Record about 30 steps of a model wrapped in "
        "DistributedDataParallel: 'overlapscope record --probe-buckets -o FOLDER -- torchrun ...'.",
    }


def _text(arguments: Arguments, name: str) -> str:
    return b",".join(arguments.get(name, [])).decode(errors="replace")


def _size_mb(text: str) -> float | None:
    try:
        size_mb = float(text)
    except ValueError:
        return None
    return size_mb if math.isfinite(size_mb) and 0 < size_mb <= _LARGEST_MB else None

"""Buckets page: predicted step time for each bucket size, the resulting step, and the setting that gives it."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from bokeh.document import Document

from dashboards.forecast import BucketChoice, ChosenPlan, Forecast, predict_mean_step
from dashboards.pages.breakdown import build_breakdown_context
from dashboards.pages.shell import (
    QueryArguments,
    find_incident,
    get_argument,
    has_only_collectives,
    render,
    render_fragment,
)
from dashboards.plots.browser_rpc import RequestColumns
from dashboards.plots.bucket_columns import HEAD_PX, LANE_PX, RANK_PX, format_caps
from dashboards.plots.buckets import CURVE_LEFT_PX, CURVE_RIGHT_PX, BucketsPlot
from dashboards.recording import Snapshot
from overlapscope.advice.advice import Advice
from overlapscope.breakdown.lanes import BUCKET_SLOTS
from overlapscope.breakdown.summary import Summary
from overlapscope.bucket_model.prediction import SPECIALS, Options
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.report.buckets import build_buckets_section, describe_basis
from overlapscope.report.report import Number
from overlapscope.text import capitalize, format_bytes, format_ns, format_share, format_share_change
from overlapscope.trace.description import describe_auto_choices
from overlapscope.trace.recording import Trace

_LARGEST_MB: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class PlanShortcut:
    """A button that chooses a plan."""

    special: str
    label: str
    hint: str


_PLAN_SHORTCUTS: Final = (
    PlanShortcut(special="", label="Best size", hint="The best single size  B"),
    PlanShortcut(special="best", label="Best plan", hint="The best of all plans; its buckets may differ in size  P"),
    PlanShortcut(special="present", label="Current plan", hint="The plan of the recorded job  N"),
    PlanShortcut(special="default", label="DDP's default", hint="A first bucket of 1 MB, then 25 MB  D"),
)


def build(document: Document, snapshot: Snapshot, arguments: QueryArguments, *, is_plain: bool = False) -> None:
    """Fill a document with the page, for the size and options in the query."""
    if has_only_collectives(snapshot.trace):
        _build_unavailable(document, snapshot, "only collectives were recorded, no gradient buckets", is_plain=is_plain)
        return
    choice = parse_choice(arguments)
    shown = snapshot.latest_forecast(choice.options)
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
        chosen = forecast.choose(choice).result()
    except OverlapScopeError as error:
        _build_unavailable(document, shown, str(error), is_plain=is_plain)
        return
    plot = BucketsPlot(forecast, chosen)
    ChoiceRpc(plot, shown.summary, forecast)
    document.js_on_event("document_ready", plot.start_script)
    first_mb = choice.options.first_mb
    render(
        document,
        "buckets_plot.html" if is_plain else "buckets.html",
        title="Buckets",
        trace=shown.trace,
        incident=find_incident(snapshot),
        roots=plot.roots,
        is_plain=is_plain,
        **build_advice_context(shown.trace, forecast.advice),
        **_build_age_context(shown, snapshot),
        shortcuts=_PLAN_SHORTCUTS,
        first_mb=None if first_mb is None else f"{first_mb:g}",
        is_compressed=choice.options.is_compressed,
        **render_choice(shown.summary, forecast, chosen),
        ranks=[int(chosen.step.ranks[index]) for index in plot.shown],
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


class ChoiceRpc:
    """Answers to the choices of the browser: the step is replayed with other buckets in a few milliseconds.

    Other options need another curve, which is computed in the background; until it is ready, plots stay as they are.

    Args:
        plot: the plot to update.
        summary: the mean step of the recording.
        forecast: predictions for the recording.
    """

    def __init__(self, plot: BucketsPlot, summary: Summary, forecast: Forecast) -> None:
        """Create the messages."""
        self._plot, self._summary, self._forecast = plot, summary, forecast
        wanted = ("id", "cap_mb", "move", "special", "first_mb", "is_compressed", "width_px")
        shown = ("id", "cap_mb", "shown_mb", "special", "first_mb", "is_compressed", "chosen", "breakdown")
        self.request = plot.rpc.request("asked", wanted, self._on_asked)
        self.response = plot.rpc.response("answer", shown)

    def _on_asked(self, args: RequestColumns) -> None:
        future = self._forecast.choose(_parse_request(args, self._plot.chosen))
        document = self._plot.root.document
        if future.done() or document is None:
            self._answer(args, future)
        else:
            respond = partial(self._answer, args)
            future.add_done_callback(lambda done: document.add_next_tick_callback(partial(respond, done)))

    def _answer(self, args: RequestColumns, chosen: Future[ChosenPlan]) -> None:
        plot = self._plot
        plot.update(chosen.result(), int(args["width_px"][0]))
        choice = plot.chosen.choice
        values = {
            "cap_mb": plot.cap_mb,
            "shown_mb": plot.shown_mb,
            "special": choice.special or "",
            "first_mb": choice.options.first_mb,
            "is_compressed": choice.options.is_compressed,
            **render_choice(self._summary, self._forecast, plot.chosen),
        }
        # Last, because the browser waits for it, and then has everything else.
        self.response.data = {"id": args["id"], **{name: [value] for name, value in values.items()}}


def _parse_request(args: RequestColumns, before: ChosenPlan) -> BucketChoice:
    first_mb, cap_mb, special = args["first_mb"][0], args["cap_mb"][0], args["special"][0]
    options = Options(
        first_mb=None if first_mb is None else float(first_mb), is_compressed=bool(args["is_compressed"][0])
    )
    choice = BucketChoice(
        options=options,
        cap_mb=None if cap_mb is None else float(cap_mb),
        special=next((name for name in SPECIALS if name == special), None),
    )
    move = int(args["move"][0])
    if not move:
        return choice
    sizes = before.curve.sizes
    index = before.index if before.index < len(sizes) else before.curve.fastest - move
    return replace(choice, cap_mb=sizes[min(max(index + move, 0), len(sizes) - 1)].cap_mb, special=None)


def _build_age_context(shown: Snapshot, latest: Snapshot) -> dict[str, Any]:
    return {} if shown is latest else {"of_step": int(shown.trace.steps["step"].max())}


def build_advice_context(trace: Trace, advice: Advice) -> dict[str, Any]:
    """Return the section on bucket sizes and what it is based on, as template variables."""
    section = build_buckets_section(advice)
    basis = [f"Predicted from {describe_basis(advice)}.", *section.notes, *section.actions]
    return {"section": section, "basis": " ".join([*basis, *describe_auto_choices(trace.run)])}


def parse_choice(arguments: QueryArguments) -> BucketChoice:
    """Parse the choice in ``?cap_mb=…&plan=…&first=…&compression=…``; invalid values are ignored."""
    plan = get_argument(arguments, "plan")
    return BucketChoice(
        options=Options(
            first_mb=_parse_size_mb(get_argument(arguments, "first")),
            is_compressed=get_argument(arguments, "compression") == "fp16",
        ),
        cap_mb=_parse_size_mb(get_argument(arguments, "cap_mb")),
        special=next((name for name in SPECIALS if name == plan), None),
    )


def render_choice(summary: Summary, forecast: Forecast, chosen: ChosenPlan) -> dict[str, Any]:
    """Return the markup of the choice: ``chosen``, its figures and setting, and ``breakdown``, both steps as bars."""
    predicted = predict_mean_step(summary.mean, chosen.curve, chosen.index)
    return {
        "chosen": _render_figures(forecast, chosen),
        "breakdown": render_fragment("breakdown.html", **build_breakdown_context(summary, ("Predicted", predicted))),
    }


def _render_figures(forecast: Forecast, chosen: ChosenPlan) -> str:
    curve, index, options, step = chosen.curve, chosen.index, chosen.choice.options, chosen.step
    low, high = curve.interval_ns[:, index]
    exposed_ns = float(curve.predicted.exposed_ns[index])
    is_measured = curve.measured is not None and not options.is_compressed and curve.plans[index] == curve.measured.plan
    code = curve.format_setting(index, chosen.choice.special)
    size = curve.sizes[index] if index < len(curve.sizes) and chosen.choice.special is None else None
    return render_fragment(
        "buckets_chosen.html",
        numbers=[
            Number(
                key="step",
                label="Measured step time" if is_measured else "Predicted step time",
                value=curve.predicted_ns[index],
                unit="ns",
                note=f"{format_ns(low)} to {format_ns(high)}",
            ),
            _build_gain_number(curve.compute_gain(index, forecast.reference)),
            Number(
                key="exposed",
                label="Exposed",
                value=exposed_ns,
                unit="ns",
                note=f"{format_share(exposed_ns / curve.predicted_ns[index])} of the step",
            ),
            Number(
                key="buckets",
                label="Buckets",
                value=len(step.plan),
                unit="count",
                note=_format_size_range(int(step.bytes.min()), int(step.bytes.max())),
            ),
        ],
        code=code,
        hook="model.register_comm_hook(None, default_hooks.fp16_compress_hook)" if options.is_compressed else "",
        caps="" if size is None else format_caps(size),
        plan_file=code.startswith("bucket_plan"),
        needs_list="bucket_cap_mb_list" in code,
    )


def _build_gain_number(gain: Interval) -> Number:
    low, high = (format_share_change(-share) for share in (gain.high, gain.low))
    note = f"{low} to {high}" if low != high else "as it is set now"
    return Number(key="gain", label="Versus now", value=-gain.value, unit="share change", note=note)


def _format_size_range(least: int, most: int) -> str:
    return f"of {format_bytes(most)}" if least == most else f"{format_bytes(least)} to {format_bytes(most)}"


def _build_unavailable(document: Document, snapshot: Snapshot, reason: str, *, is_plain: bool) -> None:
    render(
        document,
        "problem.html",
        title="Buckets",
        trace=snapshot.trace,
        is_plain=is_plain,
        **build_unavailable_context(snapshot.trace, reason),
    )


def build_unavailable_context(trace: Trace, reason: str) -> dict[str, Any]:
    """Return why nothing can be predicted and what to do, from the message of an error, as template variables."""
    what, _, todo = reason.removeprefix(f"{trace.path}: ").partition(": ")
    return {
        "headline": "No bucket size can be predicted from this recording",
        "message": f"{capitalize(what)}.",
        "advice": f"{capitalize(todo)}."
        if todo
        else "Record about 30 steps of a model wrapped in "
        "DistributedDataParallel: 'overlapscope record --probe-buckets -o FOLDER -- torchrun ...'.",
    }


def _parse_size_mb(text: str) -> float | None:
    try:
        size_mb = float(text)
    except ValueError:
        return None
    return size_mb if math.isfinite(size_mb) and 0 < size_mb <= _LARGEST_MB else None

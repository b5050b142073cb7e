"""HTTP handler of table downloads: ``tables/NAME.csv`` and ``tables/NAME.parquet`` beside the pages of a recording."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np
import pandas as pd
from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import RequestHandler, authenticated

from dashboards.pages.buckets import parse_choice
from dashboards.pages.order import parse_group
from dashboards.pages.runs import build_runs_table
from dashboards.pages.shell import QueryArguments, parse_step_range, render_standalone
from dashboards.rank_map import Heatmap
from dashboards.recording import Snapshot
from dashboards.runs import RunIndex
from dashboards.urls import RUN_ROUTE, RunUrl, file_stem
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS
from overlapscope.bucket_model.partition import MB, NO_LIMIT
from overlapscope.bucket_model.prediction import Curve
from overlapscope.bucket_model.schedule import DrawnStep
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Entry
from overlapscope.diagnosis.order_view import Cell, OrderLanes
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.table_files import encode_table
from overlapscope.interval import Interval
from overlapscope.stragglers import text
from overlapscope.stragglers.finding import Finding, SlowLink
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.text import capitalize, format_ranks

# The tables of the pages as pandas DataFrames, for downloads and notebooks. Times are nanoseconds.

MAX_CELLS: Final = 1_000_000
"""Maximum number of cells (collectives times ranks) in a table of the order: more take minutes to read."""


def breakdown_table(summary: Summary) -> pd.DataFrame:
    """Tabulate the blocks of the mean step, which sum to it, and below exposed communication its parts by reason.

    Returns:
        block, part_of (empty for a block), mean_ns with the bounds of its 90 % interval, share (of the step),
        critical_path_ns, and the longest occurrence of the block: longest_ns, longest_step, longest_rank. Blocks that
        take no time are left out.
    """
    rows = []
    for name, mean in summary.mean.blocks.items() if summary.steps else ():
        on_path = None if summary.job is None else summary.job.blocks[name].value
        step, rank, longest_ns = summary.longest.get(name, (None, None, None))
        longest = {"longest_ns": longest_ns, "longest_step": step, "longest_rank": rank}
        if mean.value or on_path:
            rows.append(_block_row(BLOCK_LABELS[name], "", mean, summary) | {"critical_path_ns": on_path} | longest)
        if name == "exposed":
            parts = {REASON_LABELS[reason]: part for reason, part in summary.exposed_for.items() if part.value}
            rows += [_block_row(label, BLOCK_LABELS[name], part, summary) for label, part in parts.items()]
    whole = {"longest_ns": "Int64", "longest_step": "Int64", "longest_rank": "Int64"}
    columns = ["block", "part_of", "mean_ns", "mean_low_ns", "mean_high_ns", "share", "critical_path_ns", *whole]
    return pd.DataFrame(rows, columns=columns).astype({"critical_path_ns": np.float64, **whole})


def ranks_table(snapshot: Snapshot) -> pd.DataFrame:
    """Tabulate the means of each rank's steps, from ``Summary.means_by_rank``, with its host and device."""
    places = snapshot.trace.ranks[["rank", "host", "device"]]
    return places.merge(snapshot.summary.means_by_rank(), on="rank")


def steps_table(summary: Summary) -> pd.DataFrame:
    """Tabulate the breakdown of every step of every rank, and whether it is included in means (``is_counted``)."""
    return summary.figures.assign(is_counted=summary.is_steady)


def findings_table(found: Stragglers) -> pd.DataFrame:
    """Tabulate the straggler findings: ranks, cause, pattern, and what fixing each would save."""
    return pd.DataFrame([_finding_row(each) for each in found.findings], columns=_FINDING_COLUMNS)


def heatmap_table(heatmap: Heatmap) -> pd.DataFrame:
    """Tabulate the heatmap of ranks and steps, a row per cell: rank, host, step, compute_ns, lateness_ns, wait_ns."""
    ranks, steps = len(heatmap.ranks), len(heatmap.steps)
    return pd.DataFrame(
        {
            "rank": np.repeat(heatmap.ranks, steps),
            "host": np.repeat(np.array(heatmap.hosts, dtype=object), steps),
            "step": np.tile(heatmap.steps, ranks),
            **{f"{name}_ns": cells.ravel() for name, cells in heatmap.figures_ns.items()},
        }
    )


def sizes_table(curve: Curve) -> pd.DataFrame:
    """Tabulate the predicted step of every bucket plan of a curve, small sizes first.

    Returns:
        bucket_cap_mb (NaN for a plan that no size gives), above_mb and up_to_mb (range of caps that give this plan;
        up_to_mb is infinite if all larger caps do), buckets (number of them), predicted_ns with the bounds of its 90 %
        interval, exposed_ns, recorded_ns (NaN if the plan was not recorded), is_now, is_default, is_best_plan.
    """
    measured, rows = curve.measured_steps_ns(), []
    for index, plan in enumerate(curve.plans):
        size = curve.sizes[index] if index < len(curve.sizes) else None
        up_to = None if size is None else np.inf if size.high_bytes == NO_LIMIT else size.high_bytes / MB
        rows.append(
            {
                "bucket_cap_mb": None if size is None else size.cap_mb,
                "above_mb": None if size is None else size.low_bytes / MB,
                "up_to_mb": up_to,
                "buckets": len(plan),
                **interval_columns("predicted", curve.step_of(index)),
                "exposed_ns": float(curve.predicted.exposed_ns[index]),
                "recorded_ns": measured[index].value if index in measured else None,
                "is_now": index == curve.special["present"],
                "is_default": index == curve.special["default"],
                "is_best_plan": index == curve.special["best"],
            }
        )
    floats = ("bucket_cap_mb", "above_mb", "up_to_mb", "recorded_ns")
    return pd.DataFrame(rows).astype(dict.fromkeys(floats, np.float64))


def bucket_spans_table(recorded: DrawnStep, predicted: DrawnStep) -> pd.DataFrame:
    """Tabulate every bucket of the recorded and the predicted step on every rank; times are since the step's start.

    Returns:
        step ("recorded" or "predicted"), rank, bucket, bytes, ready_ns, launch_ns, start_ns, end_ns.
    """
    return pd.concat([_bucket_spans("recorded", recorded), _bucket_spans("predicted", predicted)], ignore_index=True)


def order_table(lanes: OrderLanes) -> pd.DataFrame:
    """Tabulate the collectives of one process group, by number and rank.

    If a rank has no entry for a number, its row has the state "nothing in the log". Times are on each rank's own clock.

    Raises:
        OverlapScopeError: the table would have more than ``MAX_CELLS`` rows.
    """
    ranks, numbers = lanes.group.ranks, max(0, lanes.latest - lanes.oldest + 1)
    if len(ranks) * numbers > MAX_CELLS:
        raise OverlapScopeError(
            f"{numbers:,} collectives of {len(ranks):,} ranks are more than the {MAX_CELLS:,} that fit a table: "
            "the logs themselves are in the recording, and docs/trace-format.md says how to read them"
        )
    shown = lanes.lanes_of(ranks)
    cells = lanes.window(shown, lanes.oldest, lanes.latest).cells
    table = pd.DataFrame(
        [_order_row(lanes.group.name, shown[cell.lane].ranks[0], cell) for cell in cells], columns=_CELL_COLUMNS
    )
    return table.astype(dict.fromkeys(_INTEGER_COLUMNS, "Int64"))


def interval_columns(name: str, interval: Interval) -> dict[str, float]:
    """Return columns for a value and the bounds of its interval."""
    return {f"{name}_ns": interval.value, f"{name}_low_ns": interval.low, f"{name}_high_ns": interval.high}


def _block_row(label: str, part_of: str, mean: Interval, summary: Summary) -> dict[str, Any]:
    return {"block": label, "part_of": part_of, **interval_columns("mean", mean), "share": summary.share_of(mean)}


_LINK_COLUMNS: Final = tuple(f"link_{field.name}" for field in fields(SlowLink))
_FINDING_COLUMNS: Final = (
    *("ranks", "host", *_LINK_COLUMNS, "cause", "pattern", "statistic", "steps", "worst_step", "delay_ns"),
    "lateness_ns",
    *("saving_ns", "saving_low_ns", "saving_high_ns", "saving_share"),
    "sentence",
)


def _finding_row(finding: Finding) -> dict[str, Any]:
    link = {} if finding.link is None else {f"link_{name}": each for name, each in asdict(finding.link).items()}
    return {
        "ranks": finding.ranks,
        "host": finding.host,
        **link,
        "cause": finding.cause,
        "pattern": finding.pattern.kind,
        "statistic": finding.pattern.statistic,
        "steps": len(finding.steps),
        "worst_step": finding.worst_step,
        "delay_ns": finding.delay_ns,
        "lateness_ns": finding.lateness_ns,
        **interval_columns("saving", finding.saving.step),
        "saving_share": finding.saving_share,
        "sentence": text.describe(finding),
    }


def _bucket_spans(name: str, step: DrawnStep) -> pd.DataFrame:
    ranks, buckets = step.ready_ns.shape
    times = ("ready_ns", "launch_ns", "start_ns", "end_ns")
    return pd.DataFrame(
        {
            "step": name,
            "rank": np.repeat(step.ranks, buckets),
            "bucket": np.tile(np.arange(buckets), ranks),
            "bytes": np.tile(step.bytes, ranks),
            **{each: getattr(step, each).ravel() for each in times},
        }
    )


_CELL_COLUMNS: Final = (
    *("group", "number", "rank", "state", "difference", "step", "batch", "phase", "op", "reduce_op", "dtype"),
    *("elements", "bytes", "peer", "role", "bucket", "call_site", "announced_ns", "launched_ns", "completed_ns"),
)
_INTEGER_COLUMNS: Final = (
    *("step", "batch", "elements", "bytes", "peer", "bucket", "announced_ns", "launched_ns", "completed_ns"),
)


def _order_row(group: str, rank: int, cell: Cell) -> dict[str, Any]:
    index = {"group": group, "number": cell.number, "rank": rank, "difference": cell.difference}
    return index | ({"state": "nothing in the log"} if cell.entry is None else _entry(cell.entry))


def _entry(entry: Entry) -> dict[str, Any]:
    signature = entry.signature
    return {
        "state": entry.state,
        "step": None if entry.step == UNKNOWN_STEP else entry.loop_step,
        "batch": entry.batch,
        "phase": entry.phase,
        **{
            name: getattr(signature, name) for name in ("op", "reduce_op", "dtype", "elements", "bytes", "peer", "role")
        },
        "bucket": signature.bucket if signature.role == "bucket" else None,
        "call_site": None if entry.call_site is None else str(entry.call_site),
        **{name: getattr(entry, name) for name in ("announced_ns", "launched_ns", "completed_ns")},
    }


MakeTable = Callable[[Snapshot, QueryArguments], pd.DataFrame]
"""Function from a recording and the query of its page to a table; raises OverlapScopeError if there is none."""


def _findings(snapshot: Snapshot, _arguments: QueryArguments) -> pd.DataFrame:
    table = findings_table(_stragglers(snapshot))
    return table.assign(ranks=[format_ranks(ranks) for ranks in table["ranks"]])


def _map(snapshot: Snapshot, _arguments: QueryArguments) -> pd.DataFrame:
    _stragglers(snapshot)
    assert snapshot.heatmap is not None
    return heatmap_table(snapshot.heatmap)


def _order(snapshot: Snapshot, arguments: QueryArguments) -> pd.DataFrame:
    diagnosis = snapshot.diagnosis
    if diagnosis is None or not diagnosis.groups:
        raise OverlapScopeError("this recording has no order of collectives")
    return order_table(diagnosis.lanes(parse_group(diagnosis, arguments)))


def _sizes(snapshot: Snapshot, arguments: QueryArguments) -> pd.DataFrame:
    return sizes_table(snapshot.forecast.result().curve(parse_choice(arguments).options).result())


def _predicted_bucket_spans(snapshot: Snapshot, arguments: QueryArguments) -> pd.DataFrame:
    forecast = snapshot.forecast.result()
    return bucket_spans_table(forecast.step.recorded, forecast.choose(parse_choice(arguments)).result().step)


def _stragglers(snapshot: Snapshot) -> Stragglers:
    if snapshot.stragglers is None:
        reason = text.explain_missing_stragglers(snapshot.trace)
        raise OverlapScopeError(f"{reason.message} {reason.advice}")
    return snapshot.stragglers


TABLES: Final[dict[str, MakeTable]] = {
    "breakdown": lambda snapshot, _: breakdown_table(snapshot.summary),
    "ranks": lambda snapshot, _: ranks_table(snapshot),
    "steps": lambda snapshot, _: steps_table(snapshot.summary),
    "phases": lambda snapshot, _: snapshot.trace.phases,
    "gradients": lambda snapshot, _: snapshot.trace.gradients,
    "collectives": lambda snapshot, _: snapshot.trace.collectives,
    "segments": lambda snapshot, _: snapshot.trace.segments,
    "stragglers": _findings,
    "ranks-by-step": _map,
    "by-rank": lambda snapshot, _: _stragglers(snapshot).by_rank,
    "by-host": lambda snapshot, _: _stragglers(snapshot).by_host,
    "by-phase": lambda snapshot, _: _stragglers(snapshot).by_cause,
    "by-bucket": lambda snapshot, _: _stragglers(snapshot).by_bucket,
    "order": _order,
    "bucket-sizes": _sizes,
    "bucket-spans": _predicted_bucket_spans,
}
"""Tables of a recording, by their names in the URL."""

RUNS_TABLE: Final = "runs"
"""Name of the table of runs, which is at the top level."""


def table_routes(runs: RunIndex) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the routes of tables, beside the pages of each run, for Bokeh's server."""
    of_run = RUN_ROUTE.replace("{run:path}", "(?P<run>.+)")
    file = r"tables/(?P<table>[a-z-]+)\.(?P<kind>csv|parquet)"
    return [(f"{route}/{file}", _TableHandler, {"runs": runs}) for route in ("", of_run)]


class _TableHandler(AuthRequestHandler):
    def initialize(self, runs: RunIndex) -> None:
        self._runs = runs

    @authenticated
    async def get(self, table: str, kind: str, run: str = "") -> None:
        self.set_header("Cache-Control", "no-store")
        try:
            # In a thread, so that pages are served while a large recording is read.
            stem, frame = await asyncio.to_thread(self._find, table, run)
        except OverlapScopeError as error:
            self._refuse(str(error))
            return
        self.set_header(
            "Content-Type", "text/csv; charset=utf-8" if kind == "csv" else "application/vnd.apache.parquet"
        )
        self.set_header("Content-Disposition", f'attachment; filename="{stem}-{table}.{kind}"')
        parts = encode_table(frame, "csv" if kind == "csv" else "parquet")
        while part := await asyncio.to_thread(next, parts, b""):
            self.write(part)
            await self.flush()

    def _find(self, table: str, run: str) -> tuple[str, pd.DataFrame]:
        """Return the stem of the file name, and the table."""
        if table == RUNS_TABLE and not run:
            return file_stem("", None), build_runs_table(self._runs.latest())
        run_url = RunUrl.from_route(run) if run else RunUrl()
        path = self._runs.path_of(run_url.run) if run else self._runs.only_run
        if path is None or table not in TABLES:
            raise OverlapScopeError("there is no table at this address")
        arguments = self.request.arguments
        snapshot = self._runs.recording(path).latest(which=parse_step_range(arguments))
        return file_stem(run_url.run, path), TABLES[table](snapshot, arguments)

    def _refuse(self, message: str) -> None:
        self.set_status(404)
        self.finish(
            render_standalone(
                "problem.html",
                title="No table",
                headline="This table can't be saved",
                message=capitalize(message).rstrip(".") + ".",
                advice="Go back to the page, and reload it: it shows what there is.",
            )
        )

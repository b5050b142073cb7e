"""HTTP handler of table downloads: ``tables/NAME.csv`` and ``tables/NAME.parquet`` beside the pages of a recording."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pandas as pd
from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import RequestHandler, authenticated

from dashboards.pages.buckets import parse_choice
from dashboards.pages.order import parse_group
from dashboards.pages.runs import build_runs_table
from dashboards.pages.shell import QueryArguments, parse_step_range, render_standalone
from dashboards.place import RUN_ROUTE, RunUrl, file_stem
from dashboards.plots.buckets import resolve_choice
from dashboards.recording import Snapshot
from dashboards.runs import RunIndex
from dashboards.tables import (
    breakdown_table,
    bucket_spans_table,
    findings_table,
    heatmap_table,
    order_table,
    ranks_table,
    sizes_table,
    steps_table,
)
from overlapscope.analysis import sentences
from overlapscope.analysis.rank_numbers import format_ranks
from overlapscope.analysis.stragglers import Stragglers
from overlapscope.errors import OverlapScopeError
from overlapscope.exports.table_files import encode_parquet, generate_csv

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


def _bucket_spans(snapshot: Snapshot, arguments: QueryArguments) -> pd.DataFrame:
    forecast, choice = snapshot.forecast.result(), parse_choice(arguments)
    plan = resolve_choice(choice, forecast.curve(choice.options).result()).plan
    return bucket_spans_table(forecast.step.recorded, forecast.step_with(plan, choice.options))


def _stragglers(snapshot: Snapshot) -> Stragglers:
    if snapshot.stragglers is None:
        reason = sentences.explain_missing_stragglers(snapshot.trace)
        raise OverlapScopeError(f"{reason.message} {reason.advice}")
    return snapshot.stragglers


TABLES: Final[dict[str, MakeTable]] = {
    "account": lambda snapshot, _: breakdown_table(snapshot.summary),
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
    "bucket-spans": _bucket_spans,
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
        parts = generate_csv(frame) if kind == "csv" else iter([encode_parquet(frame)])
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
                message=f"{message[:1].upper()}{message[1:]}".rstrip(".") + ".",
                advice="Go back to the page, and reload it: it shows what there is.",
            )
        )

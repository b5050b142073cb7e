"""HTTP handler of ``/metrics``, at which Prometheus scrapes the metrics of all runs."""

from __future__ import annotations

from typing import Any, Final

from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import RequestHandler, authenticated

from dashboards.runs import RunIndex
from overlapscope.exports.open_metrics import Sample, format_open_metrics

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def metrics_routes(runs: RunIndex) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the route of ``/metrics`` for Bokeh's server."""
    return [("/metrics", _MetricsHandler, {"runs": runs})]


class _MetricsHandler(AuthRequestHandler):
    def initialize(self, runs: RunIndex) -> None:
        self._runs = runs

    @authenticated
    def get(self) -> None:
        """Answer with the metrics known so far: runs are analyzed in the background, as for the table of runs."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.set_header("Cache-Control", "no-store")
        self.write(
            format_open_metrics(
                {
                    row.run.name or row.run.path.name: [
                        Sample("overlapscope_live", int(row.is_live)),
                        *(() if row.judged is None else row.judged.samples),
                    ]
                    for row in self._runs.latest()
                }
            )
        )

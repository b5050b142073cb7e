"""The address at which Prometheus asks what is known of all runs: ``/metrics``."""

from __future__ import annotations

from typing import Any, Final

from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import RequestHandler, authenticated

from dashboards.runs import Runs
from overlapscope.exports.open_metrics import Sample, text_of

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def metrics_routes(runs: Runs) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """The address, for Bokeh's server."""
    return [("/metrics", _MetricsHandler, {"runs": runs})]


class _MetricsHandler(AuthRequestHandler):
    def initialize(self, runs: Runs) -> None:
        self._runs = runs

    @authenticated
    def get(self) -> None:
        """Answer with what is known by now: runs are judged in the background, as for the table of runs."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.set_header("Cache-Control", "no-store")
        self.write(
            text_of(
                {
                    row.run.name or row.run.path.name: [
                        Sample("overlapscope_live", int(row.is_live)),
                        *(() if row.judged is None else row.judged.samples),
                    ]
                    for row in self._runs.newest()
                }
            )
        )

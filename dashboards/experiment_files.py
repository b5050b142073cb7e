"""HTTP handler of downloads of experiments: ``experiments/NAME.svg``, ``.png``, ``.csv`` and ``.parquet``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.web import HTTPError, RequestHandler, authenticated

from dashboards.charts.drawing import draw_figure
from dashboards.charts.png import png_file
from dashboards.charts.svg import svg_file
from dashboards.experiments import FoundExperiment, find_experiments
from dashboards.place import file_stem
from overlapscope.errors import OverlapScopeError
from overlapscope.exports.table_files import encode_parquet, generate_csv


def experiment_routes(folders: Sequence[Path]) -> list[tuple[str, type[RequestHandler], dict[str, Any]]]:
    """Return the routes of figures and results for Bokeh's server."""
    return [(r"/experiments/(?P<name>[^/]+)\.(?P<kind>svg|png|csv|parquet)", _FileHandler, {"folders": folders})]


_TYPES = {
    "svg": "image/svg+xml",
    "png": "image/png",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}


class _FileHandler(AuthRequestHandler):
    def initialize(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    @authenticated
    async def get(self, name: str, kind: str) -> None:
        self.set_header("Cache-Control", "no-store")
        found = next((each for each in find_experiments(self._folders) if each.name == unquote(name)), None)
        if found is None:
            raise HTTPError(404, "no such experiment")
        try:
            content = await asyncio.to_thread(_content, found, kind)
        except OverlapScopeError as error:
            raise HTTPError(404, str(error)) from None
        self.set_header("Content-Type", _TYPES[kind])
        self.set_header("Content-Disposition", f'attachment; filename="{file_stem(found.name, None)}.{kind}"')
        self.finish(content)


def _content(found: FoundExperiment, kind: str) -> bytes:
    if kind == "csv":
        return b"".join(generate_csv(found.rows))
    if kind == "parquet":
        return encode_parquet(found.rows)
    scene = draw_figure(found.experiment.title, found.figure)
    return svg_file(scene).encode() if kind == "svg" else png_file(scene)

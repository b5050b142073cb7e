"""The gateway to the pages: the only module of overlapscope that imports dashboards, and only when it is called.

Commands and ``overlapscope.open`` reach the web app, its report and its figures through these functions. Everything
else knows neither Panel nor Bokeh, and starts without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dashboards.notebook import OpenedRecording as OpenedRecording
    from overlapscope.compare.comparison import Comparison
    from overlapscope.console import Progress
    from overlapscope.fleet.fleet import Fleet
    from overlapscope.lab.experiments.charts import FigureContent
    from overlapscope.report.report import Report
    from overlapscope.trace.recording import Trace
    from overlapscope.trace.table_file import StepRange


def open_run(path: Path | str, steps: tuple[int, int] | None) -> OpenedRecording:
    """Open a recording, or a range of its steps, for notebooks and scripts."""
    from dashboards.notebook import OpenedRecording

    return OpenedRecording(path, steps)


def serve(
    folders: Sequence[Path],
    *,
    address: str,
    port: int | None,
    token_file: Path | None,
    password_file: Path | None,
    oauth: str | None,
    hosts: Sequence[str],
    **options: Any,
) -> None:
    """Serve recordings until Ctrl-C.

    Args:
        folders: each a recording, or a folder of recordings.
        address: address to listen on.
        port: port to listen on; the default or the next free one if not given.
        token_file: as in ``dashboards.access.choose_access``, like the next three.
        password_file: file with the password of each user.
        oauth: OAuth provider.
        hosts: host names of the server.
        **options: further options of ``dashboards.app.serve``.
    """
    from dashboards.access import choose_access

    access = choose_access(address, token_file=token_file, password_file=password_file, oauth=oauth, hosts=hosts)
    from dashboards import app  # after a wrong option has been reported, because Panel takes a second

    app.serve(folders, address=address, port=port, access=access, **options)


def render_report(
    path: Path, kind: Literal["html", "md"], now: datetime, steps: StepRange | None, progress: Progress
) -> tuple[str, Trace]:
    """Return the report of a recording as HTML or Markdown, and the recording."""
    from dashboards.recording import RecordingCache
    from dashboards.report.html import render_html_report
    from dashboards.report.markdown import render_markdown_report

    snapshot = RecordingCache(path).latest(progress.count, which=steps)
    progress.begin("writing the report")
    return (render_html_report if kind == "html" else render_markdown_report)(snapshot, now), snapshot.trace


def render_comparison(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Return a comparison as one HTML file: see ``dashboards.report.html.render_comparison_file``."""
    from dashboards.report.html import render_comparison_file

    return render_comparison_file(found, parts, fail_above)


def write_pictures(folder: Path, name: str, title: str, figure: FigureContent) -> list[Path]:
    """Write the figure of an experiment as SVG and PNG: see ``dashboards.experiment_figures.write_pictures``."""
    from dashboards import experiment_figures

    return experiment_figures.write_pictures(folder, name, title, figure)


def render_fleet(fleet: Fleet, report: Report) -> str:
    """Return the page of many runs as one HTML file: see ``dashboards.report.fleet.render_fleet_file``."""
    from dashboards.report.fleet import render_fleet_file

    return render_fleet_file(fleet, report, datetime.now())

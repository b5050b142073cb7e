"""Runs page: the table of the runs in a folder, which is updated while it is open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import pandas as pd
from bokeh.document import Document
from bokeh.events import Event
from bokeh.models import CustomJS, Spacer

from dashboards.pages.shell import render, render_fragment
from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.plots.trend import HEIGHT_PX, WIDTH_PX, build_sparkline_path
from dashboards.run_facts import StepTimes
from dashboards.runs import RunIndex, RunRow, RunSummary
from dashboards.urls import RunUrl, run_pages_url
from overlapscope.diagnosis.text import format_kind
from overlapscope.errors import OverlapScopeError
from overlapscope.text import UNKNOWN, format_ns, format_share
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.runs import RunNotes, parse_tags

_POLL_INTERVAL_MS: Final = 2_000
_NOT_SUMMARIZED: Final = RunSummary(line="")

COLUMNS: Final = (
    ("name", "Run", "text"),
    ("started", "Started", "text roomy"),
    ("model", "Model", "text wide"),
    ("ranks", "Ranks", "roomy"),
    ("device", "Device", "text wide"),
    ("steps", "Steps", "roomy"),
    ("step", "Step time", ""),
    ("exposed", "Exposed", "roomy"),
    ("hidden", "Hidden", "roomy"),
    ("times", "Trend", "text"),
    ("verdict", "Verdict", "text"),
)
"""Key, label and classes of each column; the picture of step times can't be sorted by.

``wide`` columns need a wide window, ``roomy`` ones are not shown on a phone.
"""


Cell = tuple[str, float | str | None, str]
"""Text, sort key and hint."""
_EMPTY_CELL: Final[Cell] = (UNKNOWN, None, "")


@dataclass(frozen=True, kw_only=True)
class RowView:
    """A row of the table as texts; cells that are numbers also have a sort key."""

    name: str
    folder: str
    run: str
    """Name of its latest attempt, quoted for an address."""
    address: str
    badges: tuple[str, ...]
    """``incident``, ``live``, or both."""
    attempts: str
    model_and_device: str
    """Text for narrow windows, which have no columns for these."""
    cells: dict[str, Cell]
    """Cells by column."""
    path: str
    times_hint: str
    kind: str
    kind_class: str
    line: str
    tags: tuple[str, ...]
    note: str
    notes_problem: str


def build(document: Document, runs: RunIndex) -> None:
    """Fill a document with the table."""
    rows = runs.latest()
    table = _LiveTable(runs, rows)
    document.js_on_event("document_ready", table.start_script)

    def follow(_event: Event) -> None:
        document.add_periodic_callback(table.update, _POLL_INTERVAL_MS)

    # Updates before the page is ready would never reach its script.
    document.on_event("document_ready", follow)
    document.template_variables["place"] = RunUrl(has_table=True)
    render(
        document,
        "runs.html",
        title="Runs",
        roots=[table.root],
        columns=COLUMNS,
        rows=[render_row(row) for row in rows],
        is_found=runs.is_found,
        left_out=runs.found.left_out,
        why_none=explain_missing_runs(runs),
        folders=[str(folder) for folder in runs.folders],
    )


class _LiveTable:
    """The table on one open page, and its messages between server and browser.

    Args:
        runs: the runs of the folder.
        rows: rows that are on the page already.
    """

    def __init__(self, runs: RunIndex, rows: Sequence[RunRow]) -> None:
        """Create the sources of the messages."""
        self._runs = runs
        self._shown = {row.run.name: render_row(row) for row in rows}
        self._rpc = BrowserRpc()
        self.order = self._rpc.response("order", ("name",))
        self.order.data = {"name": [*self._shown]}
        self.changed = self._rpc.response("changed", ("name", "html"))
        note = ("tags", "note", "seen_tags", "seen_note")
        self.wanted = self._rpc.request("wanted", ("id", "name", *note), self._annotate)
        self.response = self._rpc.response("answer", ("id", "error"))
        self.root = Spacer(name="socket")
        """Invisible root: through it the browser finds the sources, and reports that it is ready."""
        self._rpc.attach(self.root)

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready."""
        return CustomJS(args={"sources": self._rpc.sources}, code="window.overlapscope.startRuns(sources)")

    def update(self) -> None:
        """Send the rows that are new or changed, and the order of all rows, to the page."""
        now = {row.run.name: render_row(row) for row in self._runs.latest()}
        changed = [name for name, html in now.items() if self._shown.get(name) != html]
        names = [*now]
        if changed:
            self.changed.data = {"name": changed, "html": [now[name] for name in changed]}
        if names != [*self._shown]:
            self.order.data = {"name": names}
        self._shown = now

    def _annotate(self, args: RequestColumns) -> None:
        wanted = {name: values[0] for name, values in args.items()}
        notes = RunNotes(tags=parse_tags(wanted["tags"]), note=wanted["note"].strip())
        seen = RunNotes(tags=parse_tags(wanted["seen_tags"]), note=wanted["seen_note"])
        try:
            self._runs.annotate(wanted["name"], notes, seen)
        except OverlapScopeError as error:
            self.response.data = {"id": [wanted["id"]], "error": [str(error)]}
            return
        self.update()
        self.response.data = {"id": [wanted["id"]], "error": [""]}


@lru_cache(maxsize=4096)
def render_row(row: RunRow) -> str:
    """Return the markup of a row."""
    return render_fragment(
        "runs_row.html", row=build_row_view(row), columns=COLUMNS, width_px=WIDTH_PX, height_px=HEIGHT_PX
    )


def build_row_view(row: RunRow) -> RowView:
    """Return a row as texts."""
    facts, judged = row.facts, row.judged or _NOT_SUMMARIZED
    attempts = len(row.run.attempts)
    # While a run is live, its files know more than the last analysis of it.
    times = facts.latest if row.is_live else judged.times or facts.latest
    steps = facts.steps if row.is_live or judged.steps is None else judged.steps
    return RowView(
        name=row.run.name,
        folder=str(row.run.path),
        run=quote(os.fsencode(row.run.latest_name), safe=""),
        address=run_pages_url(row.run.latest_name) + "order" * row.is_incident,
        badges=("incident",) * row.is_incident + ("live",) * row.is_live,
        attempts=f"{attempts} attempts" if attempts > 1 else "",
        model_and_device=" · ".join(filter(None, (facts.model, facts.device))),
        cells={
            "started": _format_date(facts.started_unix_ns),
            "model": _format_name(facts.model),
            "ranks": _format_count(judged.ranks if facts.ranks is None else facts.ranks),
            "device": _format_name(facts.device),
            "steps": _format_count(steps),
            **_format_figures(row),
        },
        path=build_sparkline_path(times) if times else "",
        times_hint=describe_step_times(times) if times else "",
        kind=format_kind(judged.kind),
        kind_class="fault" if judged.is_fault else "healthy" if judged.kind == "healthy" else "",
        line=judged.line,
        tags=row.notes.tags,
        note=row.notes.note,
        notes_problem=row.notes_problem,
    )


def build_runs_table(rows: Sequence[RunRow]) -> pd.DataFrame:
    """Return the table as a frame, with the numbers that its rows show.

    Returns:
        run, folder, started_unix_ns, model, ranks, device, steps, step_ns (of the mean step, or until that is known the
        median of the latest ones), exposed_ns and overlap_ratio (of the mean step), verdict and sentence (empty until
        they are known), is_live, is_incident, attempts, tags, note.
    """
    numbers = ("started", "ranks", "steps", "step", "exposed", "hidden")
    views = [(row, build_row_view(row)) for row in rows]
    table = pd.DataFrame(
        {
            "run": [view.name for _, view in views],
            "folder": [view.folder for _, view in views],
            **{name: [view.cells[name][1] for _, view in views] for name in (*numbers, "model", "device")},
            "verdict": [view.kind for _, view in views],
            "sentence": [view.line for _, view in views],
            "is_live": [row.is_live for row, _ in views],
            "is_incident": [row.is_incident for row, _ in views],
            "attempts": [len(row.run.attempts) for row, _ in views],
            "tags": [", ".join(view.tags) for _, view in views],
            "note": [view.note for _, view in views],
        }
    )
    whole = dict.fromkeys(("started", "ranks", "steps"), "Int64")
    return table.astype({**whole, "step": "Float64", "exposed": "Float64", "hidden": "Float64"}).rename(
        columns={"started": "started_unix_ns", "step": "step_ns", "exposed": "exposed_ns", "hidden": "overlap_ratio"}
    )


def describe_step_times(times: StepTimes) -> str:
    """Return the hint of a picture of step times: its steps, and their shortest and longest time."""
    low, high = format_ns(min(times.times_ns)), format_ns(max(times.times_ns))
    return f"Steps {times.first:,} to {times.last:,}: {low} to {high}; zero is at the bottom"


def explain_missing_runs(runs: RunIndex) -> list[str]:
    """Return why each folder has nothing to show, as the commands report it."""
    reasons = []
    for folder in runs.folders:
        try:
            find_rank_folders(folder)
        except OverlapScopeError as error:
            reasons.append(str(error))
    return reasons


def _format_figures(row: RunRow) -> dict[str, Cell]:
    """Return the figures as in the sentence of the row; until it is known, the step time of the latest steps."""
    judged, latest_ns = row.judged, row.facts.latest_step_ns
    exposed: Cell = ("", None, "being read")
    hidden = exposed
    if judged is not None:
        ratio = judged.overlap_ratio
        exposed = (format_ns(judged.exposed_ns), judged.exposed_ns, "of the mean step")
        hidden = _EMPTY_CELL if ratio is None else (format_share(ratio), ratio, "of communication, in the mean step")
    step = format_ns(None) if latest_ns is None else f"≈ {format_ns(latest_ns)}"
    of_step: Cell = (step, latest_ns, "the median of the newest steps")
    if judged is not None and judged.step_ns is not None:
        of_step = (format_ns(judged.step_ns), judged.step_ns, "the mean step")
    return {"step": of_step, "exposed": exposed, "hidden": hidden}


def _format_date(unix_ns: int | None) -> Cell:
    if not unix_ns:
        return _EMPTY_CELL
    try:
        return f"{datetime.fromtimestamp(unix_ns / 1e9):%d %b %Y, %H:%M}", unix_ns, ""
    except (ValueError, OverflowError, OSError):
        return _EMPTY_CELL


def _format_count(count: int | None) -> Cell:
    return _EMPTY_CELL if count is None else (f"{count:,}", count, "")


def _format_name(name: str) -> Cell:
    return (name, name, "") if name else _EMPTY_CELL

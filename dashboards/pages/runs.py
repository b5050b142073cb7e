"""Runs page: the table of the runs in a folder, which is updated while it is open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import pandas as pd
from bokeh.document import Document
from bokeh.events import Event
from bokeh.models import CustomJS, Spacer

from dashboards.pages.shell import render, render_part
from dashboards.place import Place, address_of
from dashboards.plots.dialogue import Asked, Dialogue
from dashboards.plots.sparkline import HEIGHT_PX, WIDTH_PX, sparkline_path
from dashboards.runs import RunRow, Runs
from overlapscope.analysis.run_facts import StepTimes
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.run_notes import RunNotes, tags_in
from overlapscope.units import format_ns

_LOOK_EVERY_MS: Final = 2_000

COLUMNS: Final = (
    ("name", "Run", "text"),
    ("started", "Started", "text roomy"),
    ("model", "Model", "text wide"),
    ("ranks", "Ranks", "roomy"),
    ("device", "Device", "text wide"),
    ("steps", "Steps", "roomy"),
    ("step", "Step time", ""),
    ("exposed", "Exposed", "roomy"),
    ("times", "Trend", "text"),
    ("verdict", "Verdict", "text"),
)
"""Key, label and classes of each column; the picture of step times can't be sorted by.

``wide`` columns need a wide window, ``roomy`` ones are not shown on a phone.
"""


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
    cells: dict[str, tuple[str, float | str | None, str]]
    """Text, sort key and hint, by column."""
    path: str
    times_hint: str
    kind: str
    kind_class: str
    line: str
    tags: tuple[str, ...]
    note: str
    notes_problem: str


def build(document: Document, runs: Runs) -> None:
    """Fill a document with the table."""
    rows = runs.newest()
    table = _Table(runs, rows)
    document.js_on_event("document_ready", table.start_script)

    def follow(_event: Event) -> None:
        document.add_periodic_callback(table.update, _LOOK_EVERY_MS)

    # Updates before the page is ready would never reach its script.
    document.on_event("document_ready", follow)
    document.template_variables["place"] = Place(has_table=True)
    render(
        document,
        "runs.html",
        title="Runs",
        roots=[table.root],
        columns=COLUMNS,
        rows=[row_html(row) for row in rows],
        is_found=runs.is_found,
        left_out=runs.found.left_out,
        why_none=why_none(runs),
        folders=[str(folder) for folder in runs.folders],
    )


class _Table:
    """The table on one open page, and its messages between server and browser.

    Args:
        runs: the runs of the folder.
        rows: rows that are on the page already.
    """

    def __init__(self, runs: Runs, rows: Sequence[RunRow]) -> None:
        """Create the sources of the messages."""
        self._runs = runs
        self._shown = {row.run.name: row_html(row) for row in rows}
        self._dialogue = Dialogue()
        self.order = self._dialogue.answer("order", ("name",))
        self.order.data = {"name": [*self._shown]}
        self.changed = self._dialogue.answer("changed", ("name", "html"))
        note = ("tags", "note", "seen_tags", "seen_note")
        self.wanted = self._dialogue.question("wanted", ("id", "name", *note), self._annotate)
        self.answer = self._dialogue.answer("answer", ("id", "error"))
        self.root = Spacer(name="socket")
        """Invisible root: through it the browser finds the sources, and reports that it is ready."""
        self._dialogue.attach(self.root)

    @property
    def start_script(self) -> CustomJS:
        """A script that the browser runs when the document is ready."""
        return CustomJS(args={"sources": self._dialogue.sources}, code="window.overlapscope.startRuns(sources)")

    def update(self) -> None:
        """Send the rows that are new or changed, and the order of all rows, to the page."""
        now = {row.run.name: row_html(row) for row in self._runs.newest()}
        changed = [name for name, html in now.items() if self._shown.get(name) != html]
        names = [*now]
        if changed:
            self.changed.data = {"name": changed, "html": [now[name] for name in changed]}
        if names != [*self._shown]:
            self.order.data = {"name": names}
        self._shown = now

    def _annotate(self, asked: Asked) -> None:
        wanted = {name: values[0] for name, values in asked.items()}
        notes = RunNotes(tags=tags_in(wanted["tags"]), note=wanted["note"].strip())
        seen = RunNotes(tags=tags_in(wanted["seen_tags"]), note=wanted["seen_note"])
        try:
            self._runs.annotate(wanted["name"], notes, seen)
        except OverlapScopeError as error:
            self.answer.data = {"id": [wanted["id"]], "error": [str(error)]}
            return
        self.update()
        self.answer.data = {"id": [wanted["id"]], "error": [""]}


def row_html(row: RunRow) -> str:
    """Return the markup of a row."""
    return _markup(row)


@lru_cache(maxsize=4096)
def _markup(row: RunRow) -> str:
    return render_part("runs_row.html", row=row_view(row), columns=COLUMNS, width_px=WIDTH_PX, height_px=HEIGHT_PX)


def row_view(row: RunRow) -> RowView:
    """Return a row as texts."""
    facts, judged = row.facts, row.judged
    attempts = len(row.run.attempts)
    times = facts.newest if judged is None or judged.times is None or row.is_live else judged.times
    steps = facts.steps if row.is_live or judged is None or judged.steps is None else judged.steps
    ranks = judged.ranks if facts.ranks is None and judged is not None else facts.ranks
    return RowView(
        name=row.run.name,
        folder=str(row.run.path),
        run=quote(os.fsencode(row.run.newest_name), safe=""),
        address=address_of(row.run.newest_name) + ("order" if row.is_incident else ""),
        badges=tuple(name for name, is_so in (("incident", row.is_incident), ("live", row.is_live)) if is_so),
        attempts=f"{attempts} attempts" if attempts > 1 else "",
        model_and_device=" · ".join(filter(None, (facts.model, facts.device))),
        cells={
            "started": _date(facts.started_unix_ns),
            "model": (facts.model or "–", facts.model or None, ""),
            "ranks": _count(ranks),
            "device": (facts.device or "–", facts.device or None, ""),
            "steps": _count(steps),
            **_figures(row),
        },
        path=sparkline_path(times) if times else "",
        times_hint=times_hint(times) if times else "",
        kind=judged.kind if judged else "",
        kind_class=""
        if judged is None
        else "fault"
        if judged.is_fault
        else "healthy"
        if judged.kind == "Healthy"
        else "",
        line=judged.line if judged else "",
        tags=row.notes.tags,
        note=row.notes.note,
        notes_problem=row.notes_problem,
    )


def runs_table(rows: Sequence[RunRow]) -> pd.DataFrame:
    """Return the table as a frame, with the numbers that its rows show.

    Returns:
        run, folder, started_unix_ns, model, ranks, device, steps, step_ns (of a live run the median of its latest
        steps), exposed_ns (of the mean step), verdict and sentence (empty until they are known), is_live, is_incident,
        attempts, tags, note.
    """
    numbers = ("started", "ranks", "steps", "step", "exposed")
    views = [(row, row_view(row)) for row in rows]
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
    return table.astype({**whole, "step": "Float64", "exposed": "Float64"}).rename(
        columns={"started": "started_unix_ns", "step": "step_ns", "exposed": "exposed_ns"}
    )


def times_hint(times: StepTimes) -> str:
    """Return the hint of a picture of step times: its steps, and their shortest and longest time."""
    low, high = format_ns(min(times.times_ns)), format_ns(max(times.times_ns))
    return f"Steps {times.first:,} to {times.last:,}: {low} to {high}; zero is at the bottom"


def why_none(runs: Runs) -> list[str]:
    """Return why each folder has nothing to show, as the commands report it."""
    reasons = []
    for folder in runs.folders:
        try:
            find_rank_folders(folder)
        except OverlapScopeError as error:
            reasons.append(str(error))
    return reasons


def _figures(row: RunRow) -> dict[str, tuple[str, float | str | None, str]]:
    """Return step time and exposed communication: of a finished run the same as on its Overview page."""
    judged = row.judged
    now_ns = row.facts.newest_step_ns
    exposed_ns = None if judged is None else judged.exposed_ns
    exposed: tuple[str, float | str | None, str] = (format_ns(exposed_ns), exposed_ns, "of the mean step")
    if judged is None:
        exposed = ("", None, "being read")
    if judged is not None and judged.step_ns is not None and not row.is_live:
        return {"step": (format_ns(judged.step_ns), judged.step_ns, "the mean step"), "exposed": exposed}
    step = f"≈ {format_ns(now_ns)}" if now_ns is not None else format_ns(None)
    return {"step": (step, now_ns, "the median of the newest steps"), "exposed": exposed}


def _date(unix_ns: int | None) -> tuple[str, float | str | None, str]:
    try:
        return (f"{datetime.fromtimestamp((unix_ns or 0) / 1e9):%d %b %Y, %H:%M}", unix_ns, "") if unix_ns else _none()
    except (ValueError, OverflowError, OSError):
        return _none()


def _count(count: int | None) -> tuple[str, float | str | None, str]:
    return _none() if count is None else (f"{count:,}", count, "")


def _none() -> tuple[str, Any, str]:
    return "–", None, ""

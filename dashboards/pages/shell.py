"""Page shell: rendering, and what all pages share, which is the theme and the header with run facts and problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from bokeh.document import Document
from bokeh.model import Model
from bokeh.models import CustomJS
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dashboards import theme
from dashboards.glossary import explain_term
from dashboards.policy import FILE_POLICY
from dashboards.recording import Snapshot, StepSelection
from dashboards.urls import RunUrl, file_stem
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.lanes import BUCKET_SLOTS
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.diagnosis.rank_state import is_running
from overlapscope.diagnosis.text import format_kind
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.editor_links import LINE_OF_CODE, link_line, read_editor
from overlapscope.errors import NotClosed, OverlapScopeError, Problem
from overlapscope.report.problems import merge_problems
from overlapscope.text import capitalize, count_of, use_no_break_spaces
from overlapscope.trace.description import (
    CONFIDENTIAL,
    describe_backend,
    describe_clocks,
    describe_models,
    describe_strategies,
)
from overlapscope.trace.folders import read_import_source
from overlapscope.trace.recording import Trace
from overlapscope.trace.table_file import parse_step_bounds, step_range_of_slice

QueryArguments = Mapping[str, Sequence[bytes]]
"""The query of an address."""

PageBuilder = Callable[[Document, Snapshot, QueryArguments], None]
"""Function that fills a document with a page."""

NAVIGATION: Final = (
    ("./", "Overview"),
    ("timeline", "Timeline"),
    ("buckets", "Buckets"),
    ("stragglers", "Stragglers"),
    ("order", "Order"),
)
"""Route and label of each page of a run in the header."""

DOCUMENT_OF: Final = {
    "Overview": "breakdown",
    "Buckets": "bucket-model",
    "Stragglers": "stragglers",
    "Order": "faults",
    "Compare": "compare",
}
"""Document that explains a page, for its link to the documents; the glossary for others."""

_ENVIRONMENT: Final = Environment(
    loader=PackageLoader("dashboards", "assets"), autoescape=True, undefined=StrictUndefined
)
_ENVIRONMENT.globals.update(
    blocks=BLOCKS, phases=PHASE_LABELS, bucket_slots=BUCKET_SLOTS, number_colors=theme.NUMBER_COLORS
)
_ENVIRONMENT.globals["file_policy"] = FILE_POLICY
_ENVIRONMENT.globals["explain"] = explain_term
_ENVIRONMENT.globals["place"] = RunUrl()  # unless the document has another
_ENVIRONMENT.globals["incident"] = None  # unless a job has failed
_ENVIRONMENT.globals["can_save"] = False  # except on a server
_ENVIRONMENT.globals["is_recorded"] = False  # unless the document is a page of a recording on a server
_ENVIRONMENT.filters["together"] = use_no_break_spaces
_ENVIRONMENT.filters["kind_label"] = format_kind
_ENVIRONMENT.filters["element"] = lambda root: Markup(
    '<div id="{}" data-root-id="{}" style="display: contents"></div>'
).format(root.elementid, root.id)


def format_code(text: str) -> Markup:
    """Return a sentence as markup: what is in backquotes as code, and files by their name, with their path on hover.

    Of files of one name the folder is kept, too. A line that the user's editor can open is a link.
    """
    markup = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    paths = {match[1] for match in LINE_OF_CODE.finditer(markup)}
    editor = read_editor(in_browser=True)

    def shorten(match: re.Match[str]) -> str:
        path, line = match.groups()
        if path.startswith("..."):
            return match[0]
        folder, _, name = path.rpartition("/")
        is_only = all(other == path or not other.endswith(f"/{name}") for other in paths)
        shown = name if is_only else f"{folder.rpartition('/')[2]}/{name}"
        if url := link_line(path, line, editor):
            return f'<a class="file" title="{path}" href="{escape(url)}">{shown}:{line}</a>'
        return f'<span class="file" title="{path}">{shown}</span>:{line}'

    return Markup(LINE_OF_CODE.sub(shorten, markup))  # noqa: S704 - of a text that was escaped


_ENVIRONMENT.filters["code"] = format_code


def get_argument(arguments: QueryArguments, name: str) -> str:
    """Return an argument of the query; empty if it is not given, and joined by commas if it is given several times."""
    return b",".join(arguments.get(name, [])).decode(errors="replace")


def get_number(arguments: QueryArguments, name: str) -> int | None:
    """Return a whole number in the query; None if there is none."""
    text = get_argument(arguments, name)
    return int(text) if text.isdecimal() and len(text) < 12 else None


def parse_step_range(arguments: QueryArguments) -> StepSelection | None:
    """Parse the steps to load, such as ``read=all`` or ``read=100:200``; None if there are none in the query."""
    text = get_argument(arguments, "read")
    if text == "all":
        return "all"
    try:
        return step_range_of_slice(*parse_step_bounds(text))
    except OverlapScopeError:
        return None


def render(
    document: Document,
    template: str,
    *,
    title: str,
    trace: Trace | None = None,
    roots: Sequence[Model] = (),
    is_plain: bool = False,
    further_problems: Sequence[Problem] = (),
    incident: Verdict | None = None,
    **variables: Any,
) -> None:
    """Fill a document with a page.

    Args:
        document: the document to fill.
        template: name of a file in ``dashboards/assets``.
        title: title of the page.
        trace: recording whose facts and problems the page shows.
        roots: plots, placed by the template by their names.
        is_plain: True to omit the header, for a plot on its own route.
        further_problems: problems with files that only this page uses.
        incident: fault of the job, for a page that doesn't explain it.
        **variables: further template variables.
    """
    document.title = f"{title} · OverlapScope"
    document.template = _ENVIRONMENT.get_template(template)
    place: RunUrl = document.template_variables.get("place", RunUrl())
    of_run = NAVIGATION if place.run or not place.has_table else ()
    chosen = format_loaded_steps(trace) if trace is not None and trace.extent == "chosen" else ""
    of_lab = ((f"{place.top_url}experiments", "Experiments"),) * bool(
        document.template_variables.get("has_experiments")
    )
    document.template_variables.update(
        **build_shell_context(title, trace, further_problems),
        is_plain=is_plain,
        incident=None if is_plain else incident,
        navigation=(
            *of_run,
            (place.compare(chosen), "Compare"),
            *of_lab,
            (f"{place.top_url}docs/{DOCUMENT_OF.get(title, 'glossary')}", "Docs"),
        ),
        is_recorded=trace is not None and not is_plain,
        can_save=bool(roots) and not is_plain,
        file_stem=file_stem(
            document.template_variables.get("place", RunUrl()).run, None if trace is None else trace.path
        ),
        **variables,
    )
    with document.models.freeze():  # otherwise the references of all roots are collected again for each root
        for root in roots:
            document.add_root(root)
    document.js_on_event("connection_lost", CustomJS(code="window.overlapscope.reconnect()"))


def render_standalone(template: str, *, title: str, further_problems: Sequence[Problem] = (), **variables: Any) -> str:
    """Return the markup of a page without header, for files and for visitors who are not logged in."""
    context = build_shell_context(title, None, further_problems)
    return render_fragment(template, roots=[], is_plain=True, navigation=(), **context, **variables)


def find_incident(snapshot: Snapshot) -> Verdict | None:
    """Return the fault of the job; None if there is none."""
    diagnosis = snapshot.diagnosis
    return diagnosis.verdict if diagnosis is not None and diagnosis.is_incident else None


def build_shell_context(title: str, trace: Trace | None, further_problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return the template variables of ``shell.html``, except for the addresses of pages."""
    known: Sequence[Problem] = [*(trace.problems if trace else ()), *further_problems]
    if trace is not None and any(isinstance(problem, NotClosed) for problem in known) and is_running(trace.path):
        known = [problem for problem in known if not isinstance(problem, NotClosed)]
    problems = sorted(merge_problems(known), key=lambda problem: problem.severity != "error")
    return {
        "page_title": title,
        "facts": list_run_facts(trace) if trace else [],
        "extent": format_loaded_steps(trace) if trace is not None and trace.extent != "all" else "",
        "problems": problems,
        "has_errors": any(problem.severity == "error" for problem in problems),
        "problems_summary": _summarize_problems(problems),
        "colors": theme.browser_colors(),
        "css_themes": {name: theme.css_variables(name) for name in ("light", "dark")},
    }


def render_fragment(template: str, **variables: Any) -> str:
    """Return the markup of a part of a page that changes while it is open."""
    return str(_ENVIRONMENT.get_template(template).render(**variables))


def has_only_collectives(trace: Trace) -> bool:
    """Return whether only collectives were recorded, as under plain torch.distributed."""
    return trace.has_only_collectives


def list_run_facts(trace: Trace) -> list[tuple[str, str]]:
    """Return label and value of the known facts about the run."""
    run = trace.run
    started_ns = run.get("started_unix_ns")
    known = {
        "model": describe_models(run),
        "ranks": f"{ranks:,}" if isinstance(ranks := run.get("world_size"), int) else ranks,
        "backend": describe_backend(run),
        "strategy": describe_strategies(run),
        "clocks": describe_clocks(trace),
        "recorder": f"in {recorder['language']}" if (recorder := run.get("recorder")) else None,
        "imported from": read_import_source(run),
        "names": "pseudonyms" if CONFIDENTIAL in run else None,
        "recorded": f"{datetime.fromtimestamp(started_ns / 1e9):%d %b %Y, %H:%M}" if started_ns else None,
    }
    return [(label, str(value)) for label, value in known.items() if value]


def format_loaded_steps(trace: Trace) -> str:
    """Return which steps were read, in the format that ``parse_step_range`` parses."""
    step = trace.steps["step"]
    return "0:0" if step.empty else f"{step.min()}:{step.max() + 1}"


def _summarize_problems(problems: Sequence[Any]) -> str:
    errors = sum(problem.severity == "error" for problem in problems)
    notes = len(problems) - errors
    if len(problems) == 1:
        return str(problems[0].message)
    parts = [count_of(count, word) for count, word in ((errors, "problem"), (notes, "note")) if count]
    return f"This recording has {' and '.join(parts)}; what could be read is shown."


# Error pages: a folder without anything to show, steps that can't be shown, and a run that does not exist.


def build(document: Document, error: OverlapScopeError) -> None:
    """Fill a document with an error and what to do about it."""
    message, _, advice = str(error).partition("; ")
    render(
        document,
        "problem.html",
        title="Nothing to show",
        headline="There is nothing to show yet",
        message=f"{message}.",
        advice=f"{capitalize(advice)}. Then reload this page." if advice else "",
    )


def build_no_steps(document: Document, error: OverlapScopeError) -> None:
    """Fill a document with why the steps in the query can't be shown."""
    message = str(error).partition("; choose")[0]
    render(
        document,
        "problem.html",
        title="No such steps",
        headline="These steps can't be shown",
        message=f"{message}.",
        advice="",
        way_out="Open the page without choosing steps",
    )


def build_no_run(document: Document, reason: OverlapScopeError) -> None:
    """Fill a document with why an address leads to no run."""
    render(
        document,
        "problem.html",
        title="No such run",
        headline="There is no such run",
        message=f"{capitalize(str(reason))}.",
        advice="The table of runs lists those that there are.",
    )

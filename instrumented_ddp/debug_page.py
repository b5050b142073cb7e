"""A page for torch's debug server with the verdict on the job, as ``overlapscope diagnose`` gives it.

Example::

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers  # torch has no public name for its own pages

    start_debug_server(handlers=[*default_handlers(), VerdictPage("traces")])

The server is torch's, of 2.13 and later, and experimental. It knows its pages by their methods alone, so nothing of it
is imported here. It runs in a process of its own beside rank 0 and shows what is in the folder as rank 0's host sees
it: all ranks if they share a disk, else those of this host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from overlapscope.diagnosis.attempts import format_attempts, read_attempt, read_attempts
from overlapscope.diagnosis.report_text import format_report
from overlapscope.errors import OverlapScopeError
from overlapscope.report.problems import merge_problems
from overlapscope.trace.environment import TRACE_VARIABLE
from overlapscope.trace.folders import find_latest_attempt

_PATH: Final = "/overlapscope"
_TEMPLATE: Final = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}OverlapScope{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ report | e }}</pre>{% endblock %}
"""


class _Route(NamedTuple):
    path: str
    handler: Callable[[Any], bytes]


class _Link(NamedTuple):
    path: str
    label: str


class VerdictPage:
    """The verdict as a page, and as a dump named ``overlapscope`` (for ``enabled_dumps``).

    Args:
        trace: folder of the recording; None for that of ``overlapscope record``.
    """

    fetch_timeout = 60.0
    """Set by the server; nothing is fetched here."""

    def __init__(self, trace: str | Path | None = None) -> None:
        self._trace = os.environ.get(TRACE_VARIABLE) if trace is None else str(trace)

    def routes(self) -> list[_Route]:
        """Return the address of the page."""
        return [_Route(_PATH, self._render)]

    def nav_links(self) -> list[_Link]:
        """Return the link in the head of all pages."""
        return [_Link(_PATH, "OverlapScope")]

    def templates(self) -> dict[str, str]:
        """Return the template of the page, which extends torch's."""
        return {"overlapscope.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the verdict as text."""
        if self._trace is None:
            return "This job is not recorded: start it with 'overlapscope record', or name the folder of its recording."
        first = Path(self._trace)
        try:
            attempt = read_attempt(find_latest_attempt(first))
        except OverlapScopeError as error:
            return str(error)
        problems = (f"{problem.severity}: {problem}" for problem in merge_problems(attempt.problems))
        more = f"For all of it: overlapscope serve {first}"
        report = format_report(attempt.verdict, attempt.evidence)
        return "\n".join([*format_attempts(read_attempts(first)), report, "", *problems, more])

    def dump_filename(self) -> str:
        """Return the beginning of the names of dumps, and the name by which they are asked for."""
        return "overlapscope"

    def _render(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("overlapscope.html", report=self.dump())
        return page

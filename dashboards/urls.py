"""URLs of the pages of a run: the path contains the run's name, followed by ``/-/``, as in ``/runs/a/b/-/timeline``.

So relative links between pages, reloads and the browser's Back button stay at the same run without further effort.
``/-/`` is needed because a run may have the name of a page.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote_to_bytes

RUN_ROUTE: Final = "/runs/{run:path}/-"
"""Prefix of the routes of a run's pages."""


@dataclass(frozen=True, kw_only=True)
class RunUrl:
    """The run of a page, and the relative URLs that lead out of it."""

    run: str = ""
    """Name of the run; empty for the only recording served, and for the table of runs."""
    top_url: str = ""
    """Relative URL of the top page; empty on the top page itself."""
    has_table: bool = False
    """True if the top page is a table of runs."""

    @classmethod
    def from_route(cls, run: str) -> RunUrl:
        """Create it from a route: run ``a/b`` has the pages ``/runs/a/b/-/...``, whose ``top_url`` is ``../../../../``.

        Args:
            run: percent-encoded name of the run, as in the URL.
        """
        return cls(run=os.fsdecode(unquote_to_bytes(run)), top_url="../" * (run.count("/") + 3), has_table=True)

    def compare(self, steps: str = "") -> str:
        """Return the relative URL of the comparison page; from the pages of a run, it compares two of its step ranges.

        Args:
            steps: range of steps that the page shows, if limited, which both sides begin with.
        """
        name = quote(os.fsencode(self.run), safe="")
        of_run = [f"base={name}", f"new={name}"] if self.run else []
        of_steps = [f"base_steps={steps}", f"new_steps={steps}"] if steps else []
        return "?".join(filter(None, [f"{self.top_url}compare", "&".join(of_run + of_steps)]))


def run_pages_url(run: str) -> str:
    """Return the URL of a run's pages, relative to the table of runs."""
    return f"runs/{quote(os.fsencode(run))}/-/"


def file_stem(run: str, folder: Path | None) -> str:
    """Return the beginning of the names of files that are saved from a page.

    Args:
        run: name of the run; empty for the only recording served, and for the table of runs.
        folder: folder of the recording, if there is one.
    """
    name = run or (folder.resolve().name if folder else "")
    return "-".join(filter(None, ["overlapscope", *re.split(r"[^A-Za-z0-9._]+", name)]))

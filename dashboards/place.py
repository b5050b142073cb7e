"""Where a page of a run is: its address holds the run's name like a path, and ends it with ``/-/``.

So relative links from page to page, reloads and the browser's Back lead to pages of the same run without further care.
``/-/`` is there because a run may be called as a page is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote_to_bytes

RUN_ROUTE: Final = "/runs/{run:path}/-"
"""What the routes of a run's pages begin with."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The run that a page is of, and how to leave it."""

    run: str = ""
    """Its name; empty for the only recording that is served, and for the table of runs."""
    to_top: str = ""
    """The relative address of the top: empty there."""
    has_table: bool = False
    """Whether a table of runs is at the top."""

    @classmethod
    def of_route(cls, run: str) -> Place:
        """The place of a run's pages.

        Args:
            run: its name as in the address.
        """
        return cls(run=os.fsdecode(unquote_to_bytes(run)), to_top="../" * (run.count("/") + 3), has_table=True)

    def compare(self, steps: str = "") -> str:
        """The relative address of the page that compares; from pages of a run, two ranges of its steps.

        Args:
            steps: that the page shows, if it was asked for some: those to begin with.
        """
        name = quote(os.fsencode(self.run), safe="")
        of_run = [f"base={name}", f"new={name}"] if self.run else []
        of_steps = [f"base_steps={steps}", f"new_steps={steps}"] if steps else []
        return "?".join(filter(None, [f"{self.to_top}compare", "&".join(of_run + of_steps)]))


def address_of(run: str) -> str:
    """The address of a run's pages, relative to the table of runs."""
    return f"runs/{quote(os.fsencode(run))}/-/"


def file_stem(run: str, folder: Path | None) -> str:
    """What the names of files begin with that are saved from a page.

    Args:
        run: its name; empty for the only recording that is served, and for the table of runs.
        folder: of the recording, if there is one.
    """
    name = run or (folder.resolve().name if folder else "")
    return "-".join(filter(None, ["overlapscope", *re.split(r"[^A-Za-z0-9._]+", name)]))

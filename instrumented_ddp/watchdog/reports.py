"""What a rank leaves behind, and says, when the watchdogs have found something."""

from __future__ import annotations

import faulthandler
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrumented_ddp.timing import host_now_ns
from overlapscope.trace.format import REPORTS_FILE


def stacks_file(report: int) -> str:
    """Name of the file with the stacks of a rank's ``report``-th report."""
    return f"stacks_{report}.txt"


class Reports:
    """The reports of one rank.

    Args:
        folder: of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[dict[str, Any]] = []
        with suppress(OSError, ValueError):  # those from before the process group was made
            self._lines = [json.loads(line) for line in (folder / REPORTS_FILE).read_text("utf-8").splitlines()]

    def add(self, verdict: dict[str, Any], message: str, *, step: int, process_state: str) -> int:
        """Write down what was found, and what Python is doing meanwhile.

        Returns:
            The number of the report, from 1.
        """
        number = len(self._lines) + 1
        self._lines.append(
            {
                "report": number,
                "time_ns": host_now_ns(),
                "step": step,
                "process_state": process_state,
                "verdict": verdict,
                "message": message,
                "retracted_ns": None,
            }
        )
        self._write()
        with suppress(OSError, RuntimeError), (self._folder / stacks_file(number)).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return number

    def retract(self, number: int) -> None:
        """The job goes on: what was called stuck was slow."""
        self._lines[number - 1]["retracted_ns"] = host_now_ns()
        self._write()

    def _write(self) -> None:
        path = self._folder / REPORTS_FILE
        part = path.with_suffix(".part")
        with suppress(OSError):
            part.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")
            part.replace(path)


def say(text: str) -> None:
    """Print where people look. A terminal that is gone stops nothing."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)

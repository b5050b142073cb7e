"""OverlapScope: profile, tune and debug data-parallel training.

Trace format, analysis and command line. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlapscope.pages import OpenedRecording

__version__ = "1.0.0"


def open(path: Path | str, steps: tuple[int, int] | None = None) -> OpenedRecording:  # noqa: A001 - as in ov.open("traces/")
    """Open a recording, or a range of its steps, for notebooks and scripts: see ``OpenedRecording``."""
    from overlapscope.pages import open_run

    return open_run(path, steps)

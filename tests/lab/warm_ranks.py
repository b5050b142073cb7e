"""Ranks that start at once: a lab of a hundred jobs would mostly consist of importing torch."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.warm_process import WarmProcess


class WarmRank(WarmProcess):
    """Runs a script, for ``overlapscope.lab.jobs``."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        super().__init__([str(script)], environment)

"""The stacks of a process that runs no Python: faulthandler writes them at a crash, and when another rank asks."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

STACKS_SIGNAL: Final = signal.SIGRTMAX - 3
"""A signal that nobody else uses."""

HELD_STACKS_FILE: Final = "stacks_0.txt"

_kept_open: Final[list[TextIO]] = []
"""Where faulthandler writes when the process crashes. It is never disabled, as it may be the user's by then."""


class HeldStacks:
    """Makes faulthandler write stacks while this is open.

    Args:
        folder: of the rank.

    Raises:
        OSError, RuntimeError, ValueError: faulthandler can't, or the user has the signal.
    """

    def __init__(self, folder: Path) -> None:
        if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise RuntimeError(f"signal {STACKS_SIGNAL} is in use")
        self._file = (folder / HELD_STACKS_FILE).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._file)
            _kept_open.append(self._file)

    def close(self) -> None:
        """Stop writing stacks on request; an empty file is removed."""
        faulthandler.unregister(STACKS_SIGNAL)
        with suppress(ValueError):  # a rank that has not heard of this may still ask, and by default the signal kills
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        if os.fstat(self._file.fileno()).st_size == 0:
            with suppress(OSError):
                Path(self._file.name).unlink()
        if self._file not in _kept_open:
            self._file.close()

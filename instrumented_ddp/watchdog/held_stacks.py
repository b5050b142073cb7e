"""Stack traces of a process that runs no Python code, dumped by faulthandler at a crash or on a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

STACKS_SIGNAL: Final = signal.SIGRTMAX - 3
"""Signal that makes faulthandler dump stacks, chosen such that nothing else uses it."""

STACKS_FILE: Final = "stacks_0.txt"

_kept_open: Final[list[TextIO]] = []
"""Files that faulthandler writes to at a crash. It is never disabled, as the user may have enabled it since."""


class FaulthandlerDump:
    """Registration of faulthandler, which dumps stacks while this is open.

    Args:
        folder: folder of the rank.

    Raises:
        OSError, RuntimeError, ValueError: faulthandler can't be registered, or the user handles the signal.
    """

    def __init__(self, folder: Path) -> None:
        if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise RuntimeError(f"signal {STACKS_SIGNAL} is in use")
        self._file = (folder / STACKS_FILE).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._file)
            _kept_open.append(self._file)

    def close(self) -> None:
        """Stop dumping stacks on request, and remove the file if it is empty."""
        faulthandler.unregister(STACKS_SIGNAL)
        with suppress(ValueError):  # another rank may still send it, and by default the signal kills
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        if os.fstat(self._file.fileno()).st_size == 0:
            with suppress(OSError):
                Path(self._file.name).unlink()
        if self._file not in _kept_open:
            self._file.close()

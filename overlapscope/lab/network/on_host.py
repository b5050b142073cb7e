"""Launcher that becomes a command on a simulated host, with the host's name and the names of the others.

    ip netns exec NAMESPACE python -m overlapscope.lab.network.on_host NAME ETC-FOLDER PROGRAM ARGUMENTS...

``ip netns exec`` gives the process a private mount namespace, so files mounted over those in ``/etc`` here are seen on
this host only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path
from typing import Final

# linux/sched.h, linux/mount.h
_CLONE_NEWUTS: Final = 0x04000000
_MS_BIND: Final = 4096


def main() -> None:
    """Take the host's name, and become the command.

    Raises:
        OSError: The kernel refuses it, or the program can't be run.
    """
    name, etc, program, *arguments = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    for own in Path(etc).iterdir():
        over = Path("/etc", own.name)
        if over.exists() and libc.mount(bytes(own), bytes(over), None, _MS_BIND, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {over}")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: can't be started ({error})")

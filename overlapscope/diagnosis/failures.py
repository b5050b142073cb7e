"""Classification of exceptions: a rank's own error, the consequence of another rank's end, or an interrupt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Final, NamedTuple

from overlapscope.diagnosis.evidence import Failure, RankEvidence
from overlapscope.trace.user_code import RAISES, is_library_file

_BACKEND_ERRORS: Final = ("RuntimeError", "ConnectionError", "TimeoutError")
_PEER_ERRORS: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|remote (process|peer)"
    r"|by peer|connectFullMesh|time[d]? ?out|ncclRemoteError|ncclSystemError|recvBytes|sendBytes|watchdog|abort"
    r"|process group.*shut",
    re.IGNORECASE,
)
_FRAMES: Final = re.compile(r'^ +File "(.+)", line \d+, in .+(?:\n +(.*))?', re.MULTILINE)
_TORCHS_OWN: Final = re.compile(r"/(torch|instrumented_ddp)/")
_HANDLING: Final = re.compile(
    r"^(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):$",
    re.MULTILINE,
)
_LAST_LINES: Final = re.compile(r"^(\w[\w.]*)(?:: ((?s:.*)))?\s*\Z", re.MULTILINE)
"""The end of a traceback: the type of the exception, and its message."""
_DISAGREEMENT: Final = "DDP expects same model across all ranks"
_MEMORY_ERRORS: Final = ("MemoryError", "OutOfMemoryError")
_OUT_OF_MEMORY: Final = re.compile(r"out of memory|can'?t allocate memory|cannot allocate memory", re.IGNORECASE)
_TIMEOUT: Final = re.compile(r"time[d]? ?out", re.IGNORECASE)
_UNREACHABLE_RANK: Final = re.compile(
    r"connectFullMesh(?:.*?remote=\[(?P<host>[^\]]+)\](?::(?P<port>\d+))?)?"
    r"|\bconnect \[(?P<old_host>[^\]]+)\]:(?P<old_port>\d+)"
    r"|\bsocket\w+Connect\b(?:: Connect to (?P<nccl_host>[^\s<]+)<(?P<nccl_port>\d+)>)?",
    re.DOTALL,
)
"""In gloo's messages (transport/tcp) and NCCL's (misc/socket.cc), of which older and hidden ones lack the address."""
_HOSTS: Final = ("host", "old_host", "nccl_host")
_PORTS: Final = ("port", "old_port", "nccl_port")
_UNREACHABLE_STORE: Final = re.compile(
    r"client socket has\b(?:.*?(?:connect to|address of) \(\[?(?P<host>[^,\]]+)\]?, (?P<port>\d+)\))?", re.DOTALL
)
"""In c10d's (torch/csrc/distributed/c10d/socket.cpp)."""


def is_consequence(failure: Failure | None) -> bool:
    """Return True if a failure means that another rank died or was waited for too long, or that it was interrupted.

    The former also if it was raised while such an exception was handled, as by the script's error handling or cleanup.
    """
    return is_interrupted(failure) or any(map(_is_peer_failure, _with_earlier(failure)))


def has_own_failure(one: RankEvidence) -> bool:
    """Return True if a rank was ended by its own exception: no consequence, and not after it was signaled to end."""
    if one.failure is None or is_consequence(one.failure):
        return False
    return one.signaled_at_ns is None or one.failure.time_ns < one.signaled_at_ns


def is_disagreement(failure: Failure) -> bool:
    """Return True if a failure says that ranks disagree, which is the doing of whoever differs."""
    return _DISAGREEMENT in failure.message


def is_interrupted(failure: Failure | None) -> bool:
    """Return True if a user or its watchdog ended the rank."""
    return failure is not None and failure.type.rpartition(".")[2] in ("KeyboardInterrupt", "IncidentError")


def is_timeout(failure: Failure | None) -> bool:
    """Return True if a failure is a timeout on a rank that was alive: a rank that dies closes its connections."""
    return any(_is_peer_failure(one) and _TIMEOUT.search(one.message) is not None for one in _with_earlier(failure))


def is_memory_failure(failure: Failure | None) -> bool:
    """Return True if a failure means that there was no memory left."""
    if failure is None:
        return False
    return failure.type.rpartition(".")[2] in _MEMORY_ERRORS or _OUT_OF_MEMORY.search(failure.message) is not None


class UnreachableAddress(NamedTuple):
    """An address that a rank could not connect to."""

    host: str
    """Empty if unknown, like the port."""
    port: str
    is_store: bool
    """True if it is that of the store, else of another rank, which had given it: so that one had started."""

    @property
    def is_loopback(self) -> bool:
        """Return True if each host takes it for its own."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def find_unreachable_address(failure: Failure | None) -> UnreachableAddress | None:
    """Return the address to which a rank could not connect, if it failed because of that."""
    if failure is None or not _is_backend_error(failure):
        return None
    if found := _UNREACHABLE_RANK.search(failure.message):
        host, port = (next(filter(None, found.group(*names)), "") for names in (_HOSTS, _PORTS))
        return UnreachableAddress(host, port, is_store=False)
    found = _UNREACHABLE_STORE.search(failure.message)
    return UnreachableAddress(found["host"] or "", found["port"] or "", is_store=True) if found else None


def _with_earlier(failure: Failure | None) -> Iterator[Failure]:
    """Yield an exception and, from its traceback, those that were being handled when it was raised."""
    if failure is None:
        return
    yield failure
    *earlier, _ = _HANDLING.split(failure.traceback)
    for text in earlier:
        if last_lines := _LAST_LINES.search(text):
            yield Failure(type=last_lines[1], message=last_lines[2] or "", traceback=text)


def _is_peer_failure(failure: Failure) -> bool:
    is_of_backend = _is_backend_error(failure) and _may_come_from_c10d(failure)
    return is_of_backend and _PEER_ERRORS.search(failure.message) is not None


def _is_backend_error(failure: Failure) -> bool:
    name = failure.type.rpartition(".")[2]
    return name in _BACKEND_ERRORS or name.startswith("Dist")


def _may_come_from_c10d(failure: Failure) -> bool:
    """Return True if the innermost frame may be one that launches a collective or waits for it.

    File servers and data loaders close connections and time out, too. C++ has no frames: a ``work.wait()`` of the
    user's ends at the user's line, but Python's own exceptions never come from there.
    """
    frames = _FRAMES.findall(failure.traceback)
    if not frames:
        return True
    file, source = frames[-1]
    if _TORCHS_OWN.search(file):
        return "/torch/utils/data/" not in file
    is_pythons = failure.type.rpartition(".")[2] in ("ConnectionError", "TimeoutError")
    return not is_library_file(file) and not is_pythons and not RAISES.search(source)

"""How one rank ended: by its own ``ended.json``, and as the process that had started it saw it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlapscope.diagnosis.evidence import CallSite, ExitCall, Failure, Liveness
from overlapscope.diagnosis.process import written_ns
from overlapscope.trace.exits import Exit


def ended_with(liveness: Liveness, exit_status: int | None) -> Liveness:
    """The state of a process of which the exit status is known: to its end with an error is no good end.

    ``os._exit(0)`` leaves no word, and is an end all the same.
    """
    if liveness == "gone" and exit_status == 0:
        return "ended"
    return "failed" if liveness == "ended" and exit_status is not None and exit_status > 0 else liveness


def exit_of(where: dict[str, Any], exits: Sequence[Exit]) -> Exit | None:
    """The end of the process of a ``rank.json``; its number may have been that of others before."""
    begun_ns = written_ns(where)
    ends = [
        each
        for each in exits
        if not each.is_job
        and each.pid == where.get("pid")
        and each.boot_id == where.get("boot_id")
        and (begun_ns is None or each.time_ns >= begun_ns)
    ]
    return min(ends, key=lambda each: each.time_ns, default=None)


def interrupted_ns(where: dict[str, Any], exits: Sequence[Exit]) -> int | None:
    """When the whole job was told to end, on the clock of the process of a ``rank.json``."""
    times = [each.told_ns for each in exits if each.is_job and each.boot_id == where.get("boot_id")]
    return min([time_ns for time_ns in times if time_ns is not None], default=None)


def exit_call_of(ended: dict[str, Any]) -> ExitCall | None:
    """The call of ``sys.exit`` in an ``ended.json``."""
    status, caught = ended.get("exit_status"), ended.get("caught")
    if not isinstance(status, int):
        return None
    failure = failure_of({"how": "exception", **caught}) if isinstance(caught, dict) else None
    return ExitCall(
        status=status,
        call_site=call_site_of(ended),
        caught=failure,
        text=str(ended.get("exit_text") or ""),
        has_begun_next=has_begun_next_of(ended),
    )


def failure_of(ended: dict[str, Any]) -> Failure | None:
    """The exception in an ``ended.json``."""
    if ended.get("how") != "exception":
        return None
    return Failure(
        type=str(ended.get("type", "an exception")),
        message=str(ended.get("message", "")),
        call_site=call_site_of(ended),
        traceback=str(ended.get("traceback", "")),
        time_ns=time_ns if isinstance(time_ns := ended.get("time_ns"), int) else 0,
        has_begun_next=has_begun_next_of(ended),
    )


def has_begun_next_of(content: dict[str, Any]) -> bool | None:
    """Whether the user's loop had begun its next iteration."""
    begun = content.get("has_begun_next")
    return begun if isinstance(begun, bool) else None


def call_site_of(content: dict[str, Any]) -> CallSite | None:
    """The line of the user's code that a file names."""
    file, line = content.get("file"), content.get("line")
    if not isinstance(file, str) or not isinstance(line, int):
        return None
    return CallSite(file=file, line=line, function=str(content.get("function") or ""))

"""How one rank ended: from its own ``ended.json``, and as its parent process observed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlapscope.diagnosis.evidence import CallSite, ExitCall, Failure, Liveness
from overlapscope.diagnosis.process import parse_written_ns
from overlapscope.trace.exits import ProcessExit


def combine_liveness_and_status(liveness: Liveness, exit_status: int | None) -> Liveness:
    """Combine the state of a process with its exit status: running to the end but exiting with an error is a failure.

    ``os._exit(0)`` leaves no record, but is a normal end.
    """
    if liveness == "gone" and exit_status == 0:
        return "ended"
    return "failed" if liveness == "ended" and exit_status is not None and exit_status > 0 else liveness


def find_exit(where: dict[str, Any], exits: Sequence[ProcessExit]) -> ProcessExit | None:
    """Find the exit of the process that wrote a ``rank.json``; its PID may have been used by earlier processes."""
    begun_ns = parse_written_ns(where)
    ends = [
        each
        for each in exits
        if not each.is_command
        and each.pid == where.get("pid")
        and each.boot_id == where.get("boot_id")
        and (begun_ns is None or each.time_ns >= begun_ns)
    ]
    return min(ends, key=lambda each: each.time_ns, default=None)


def find_job_signal_ns(where: dict[str, Any], exits: Sequence[ProcessExit]) -> int | None:
    """Return when the whole job was signaled to end, on the clock of the process that wrote a ``rank.json``."""
    times = [each.signaled_at_ns for each in exits if each.is_command and each.boot_id == where.get("boot_id")]
    return min([time_ns for time_ns in times if time_ns is not None], default=None)


def parse_exit_call(ended: dict[str, Any]) -> ExitCall | None:
    """Parse the call of ``sys.exit`` in an ``ended.json``."""
    status, caught = ended.get("exit_status"), ended.get("caught")
    if not isinstance(status, int):
        return None
    failure = parse_failure({"how": "exception", **caught}) if isinstance(caught, dict) else None
    return ExitCall(
        status=status,
        call_site=parse_call_site(ended),
        caught=failure,
        text=str(ended.get("exit_text") or ""),
        has_begun_next_iteration=parse_next_iteration_flag(ended),
    )


def parse_failure(ended: dict[str, Any]) -> Failure | None:
    """Parse the exception in an ``ended.json``."""
    if ended.get("how") != "exception":
        return None
    return Failure(
        type=str(ended.get("type", "an exception")),
        message=str(ended.get("message", "")),
        call_site=parse_call_site(ended),
        traceback=str(ended.get("traceback", "")),
        time_ns=time_ns if isinstance(time_ns := ended.get("time_ns"), int) else 0,
        has_begun_next_iteration=parse_next_iteration_flag(ended),
    )


def parse_next_iteration_flag(content: dict[str, Any]) -> bool | None:
    """Return True if the user's loop had begun its next iteration; None if unknown."""
    begun = content.get("has_begun_next_iteration")
    return begun if isinstance(begun, bool) else None


def parse_call_site(content: dict[str, Any]) -> CallSite | None:
    """Parse a line of the user's code from the fields of a JSON record."""
    file, line = content.get("file"), content.get("line")
    if not isinstance(file, str) or not isinstance(line, int):
        return None
    return CallSite(file=file, line=line, function=str(content.get("function") or ""))

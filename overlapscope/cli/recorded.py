"""Completion of a recording when the training command has ended: exit status, verdict, and hints on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.advice.auto_choices import describe_auto_choices
from overlapscope.cli import recording_folder
from overlapscope.cli.child_process import ReceivedSignal, exit_code
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_bytes
from overlapscope.trace.checksum import parse_json_text
from overlapscope.trace.schema import RUN_FILE
from overlapscope.trace.small_files import find_latest_attempt, remove_if_empty

# Final messages of ``record`` about bucket plans: whether others were probed, if not why, and which was chosen.

_CALIBRATE_HINT: Final = "measure with 'overlapscope calibrate'"


def describe_probing(folder: Path) -> list[str]:
    """Describe in one sentence per model of the lowest rank whether plans were probed, or why there is no model."""
    models = _models(folder)
    if not models:
        return [f"no bucket plans were probed: the training has no DistributedDataParallel; {_CALIBRATE_HINT} instead"]
    sentences = dict.fromkeys(_sentence(model.get("probing")) for model in models)
    if len(sentences) == 1:
        return list(sentences)
    return [f"model {model['model']} ({model['class']}): {_sentence(model.get('probing'))}" for model in models]


def describe_choices(folder: Path) -> list[str]:
    """Describe what ``bucket_cap_mb="auto"`` chose, according to the lowest rank."""
    return describe_auto_choices({"models": _models(folder)})


def _models(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"rank_*/{RUN_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name))
    for file in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return list(parse_json_text(file.read_bytes())["models"])
    return []


def _sentence(probing: dict[str, Any] | None) -> str:
    if probing is None:
        return (
            "no bucket plans were probed: the plan of torch's own DistributedDataParallel can't be changed; use "
            f"instrumented_ddp.DistributedDataParallel, or {_CALIBRATE_HINT}"
        )
    if probing["state"] == "impossible":
        return f"no bucket plans were probed: {probing['why']}; {_CALIBRATE_HINT} instead"
    if "steps" not in probing:
        return "no bucket plans were probed: the training has fewer than 2 steps"
    begins, ends = probing["first_step"], probing["first_step"] + probing["steps"]
    if probing["state"] == "done":
        return f"probed {probing['plans']} bucket plans in steps {begins} to {ends - 1}"
    too_few = f"{probing['plans']} plans take {ends + 1} steps, outside join(); train for longer"
    if probing["state"] == "begun":
        return f"probed bucket plans for only part of their steps: {too_few}"
    return f"no bucket plans were probed: too few steps; {too_few}"


@dataclass(frozen=True, kw_only=True)
class EndedCommand:
    """How a recorded command ended."""

    program: str
    """Name of the program, as the user wrote it."""
    pid: int
    status: int
    """Exit status of the command; -N if signal N killed it."""
    received: Sequence[ReceivedSignal]
    """Signals that this process received and that were meant for the command."""


def finish_recording(
    folder: Path, ended: EndedCommand, print_status: Callable[[str], None], *, probed: bool = False
) -> int:
    """Write into the recording how the job ended, and print what went wrong and how to view the recording.

    Args:
        folder: folder of the recording; it is removed if nothing was recorded and it is empty.
        say: prints a sentence, prefixed with the name of the command.
        probed: other bucket plans were requested.

    Returns:
        The command's exit code: the job's, or 1 if nothing was recorded.
    """
    from overlapscope.trace.process_files import write_exit

    code = exit_code(ended.status)
    attempt = find_latest_attempt(folder)
    recorded = recording_folder.describe(attempt)
    if recorded is None:
        recording_folder.clear(folder)
        remove_if_empty(folder)
        how = f"ended with exit code {code}" if code else "succeeded"
        print_status(
            f"nothing was recorded: '{ended.program}' {how}, and no Python process it started called "
            f"torch.distributed.init_process_group with overlapscope installed"
        )
        return code or 1
    with suppress(OSError):  # the disk is full
        signal_received, signaled_at_ns = ended.received[0] if ended.received else (None, None)
        write_exit(
            attempt,
            ended.pid,
            ended.status,
            signaled_at_ns=signaled_at_ns,
            signal_received=signal_received,
            is_command=True,
        )
    _print_verdict(attempt)
    if probed:
        for sentence in describe_probing(attempt):
            print_status(sentence)
    for sentence in describe_choices(attempt):
        print_status(sentence)
    done = count_of(recorded.steps, "step") if recorded.steps else count_of(recorded.collectives, "collective")
    look = "serve" if recorded.steps else "diagnose"
    print_status(
        f"recorded {count_of(recorded.ranks, 'rank')}, {done}, {format_bytes(recorded.disk_bytes)} "
        f"in {attempt}\nview it: overlapscope {look} {shlex.quote(str(attempt))}"
    )
    return code


def _print_verdict(folder: Path) -> None:
    """Print why each attempt ended if there are several, and the verdict if the last one failed."""
    from overlapscope.diagnosis.attempts import format_attempts, read_attempt, read_attempts
    from overlapscope.diagnosis.report_text import format_report

    with suppress(OverlapScopeError):  # unreadable: commands that read the recording report it
        attempts = read_attempts(folder)
        if attempts:
            print("\n".join([*format_attempts(attempts), ""]), file=sys.stderr)
        attempt = attempts[-1] if attempts else read_attempt(folder)
        if attempt.verdict.kind == "interrupted":
            print(attempt.verdict.sentence + "\n", file=sys.stderr)
        elif attempt.verdict.is_fault and attempt.verdict.kind != "cannot tell":
            print(format_report(attempt.verdict, attempt.evidence) + "\n", file=sys.stderr)

"""Environment variables that configure recording in training processes; ``overlapscope record`` sets them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.schema import DEFAULT_LIMIT_BYTES

TRACE_VARIABLE: Final = "OVERLAPSCOPE_TRACE"
"""Absolute path of the folder to record into. Not set: nothing is recorded unless the script asks for it."""

DETAIL_VARIABLE: Final = "OVERLAPSCOPE_DETAIL"
"""One of ``DETAILS``."""

LIMIT_VARIABLE: Final = "OVERLAPSCOPE_LIMIT_MB"
"""Maximum size of one rank's log, a whole number of MB (1024² bytes). Not set: ``DEFAULT_LIMIT_BYTES``."""

ON_INCIDENT_VARIABLE: Final = "OVERLAPSCOPE_ON_INCIDENT"
"""One of ``ON_INCIDENT``."""

STALL_TIMEOUT_VARIABLE: Final = "OVERLAPSCOPE_STALL_TIMEOUT_S"
"""Minimum stall in seconds before ``raise`` aborts a job that may only be slow; by default
``DEFAULT_STALL_TIMEOUT_S``."""

DEFAULT_STALL_TIMEOUT_S: Final = 120.0

PROBE_VARIABLE: Final = "OVERLAPSCOPE_PROBE_BUCKETS"
"""``1``: try other bucket plans too, for a few steps each. Not set or ``0``: use only the script's own."""

SAMPLE_VARIABLE: Final = "OVERLAPSCOPE_SAMPLE"
"""Every how many steps one is recorded in full, as ``every`` of ``RecordingMode``; ``0``: no steps are recorded until
``overlapscope control`` asks for it. Not set: ``DEFAULT_EVERY``."""

DEFAULT_EVERY: Final = 1

CONFIDENTIAL_VARIABLE: Final = "OVERLAPSCOPE_CONFIDENTIAL"
"""``1``: the folder is private to one host. Processes record into it and into no other, and none makes it elsewhere."""

OnIncident = Literal["report", "raise", "off"]

ON_INCIDENT: Final[tuple[OnIncident, ...]] = ("report", "raise", "off")
"""Reactions of watchdogs to an incident: report it; report it and abort a job that can't continue; none, because no
watchdog runs."""

Choice = TypeVar("Choice", bound=str)

Detail = Literal["buckets", "parameters"]

DETAILS: Final[tuple[Detail, ...]] = ("buckets", "parameters")
"""Levels of detail: steps, phases and buckets only, or also when the gradient of each parameter is ready."""


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """Recording options of a training process."""

    folder: Path
    detail: Detail
    limit_bytes: int
    on_incident: OnIncident
    stall_timeout_s: float
    probe_buckets: bool
    every: int
    """As in ``RecordingMode``."""


def read_recording_options(trace: str | Path | None) -> RecordingOptions | None:
    """Return the recording options: into ``trace`` if the script names a folder, else from the environment.

    Returns:
        None if neither asks for a recording.

    Raises:
        OverlapScopeError: a variable has an invalid value, or a private folder is of another host.
    """
    folder = _find_folder(trace)
    if not folder:
        return None
    detail = _read_choice(DETAIL_VARIABLE, DETAILS)
    limit_mb = os.environ.get(LIMIT_VARIABLE)
    if limit_mb is not None and not limit_mb.isdecimal():
        raise OverlapScopeError(f"{LIMIT_VARIABLE}={limit_mb}: not a size; give a whole number of MB")
    on_incident = _read_choice(ON_INCIDENT_VARIABLE, ON_INCIDENT)
    stall_timeout_s = os.environ.get(STALL_TIMEOUT_VARIABLE)
    if stall_timeout_s is not None and not stall_timeout_s.isdecimal():
        raise OverlapScopeError(f"{STALL_TIMEOUT_VARIABLE}={stall_timeout_s}: no time; give a whole number of seconds")
    probe = os.environ.get(PROBE_VARIABLE, "0")
    if probe not in ("0", "1"):
        raise OverlapScopeError(f"{PROBE_VARIABLE}={probe}: unknown; give 1 or 0")
    sample = os.environ.get(SAMPLE_VARIABLE)
    if sample is not None and not sample.isdecimal():
        raise OverlapScopeError(f"{SAMPLE_VARIABLE}={sample}: not a number of steps; give a whole number, 0 for none")
    return RecordingOptions(
        folder=Path(folder).absolute(),
        detail=detail,
        limit_bytes=DEFAULT_LIMIT_BYTES if limit_mb is None else int(limit_mb) * 1024**2,
        on_incident=on_incident,
        stall_timeout_s=DEFAULT_STALL_TIMEOUT_S if stall_timeout_s is None else float(stall_timeout_s),
        probe_buckets=probe == "1",
        every=DEFAULT_EVERY if sample is None else int(sample),
    )


def is_confidential() -> bool:
    """Return whether names may be written into the recording's folder and nowhere else."""
    return os.environ.get(CONFIDENTIAL_VARIABLE) == "1"


def _find_folder(trace: str | Path | None) -> str | Path | None:
    """Return the folder to record into: of a confidential job that of the environment, whatever the script names."""
    folder = os.environ.get(TRACE_VARIABLE)
    if not is_confidential():
        return folder if trace is None else trace
    if folder and not Path(folder).is_dir():
        raise OverlapScopeError(
            f"{folder}: private to another host; run 'overlapscope record --confidential' on each of them"
        )
    return folder


def _read_choice(variable: str, choices: Sequence[Choice]) -> Choice:
    """Return the value of an environment variable; the first choice if it is not set.

    Raises:
        OverlapScopeError: it is none of the choices.
    """
    value = os.environ.get(variable, choices[0])
    for choice in choices:
        if value == choice:
            return choice
    raise OverlapScopeError(f"{variable}={value}: unknown; give one of {', '.join(choices)}")


def add_startup_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python process that becomes a rank is recorded, whatever it runs."""
    package = importlib.util.find_spec("instrumented_ddp")  # found without an import, which would need torch
    folders = package.submodule_search_locations if package is not None else None
    if not folders:
        return dict(environment)
    before = environment.get("PYTHONPATH")
    startup = str(Path(folders[0]) / "startup")
    return {**environment, "PYTHONPATH": f"{startup}{os.pathsep}{before}" if before else startup}

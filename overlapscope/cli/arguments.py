"""Argument types that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import is_url, resolve_recording_path

if TYPE_CHECKING:
    from overlapscope.trace.table_file import StepRange

RECORDING: Final = "folder that 'overlapscope record -o' wrote, or a URL such as s3://bucket/run"


def parse_positive_int(text: str) -> int:
    """Parse a positive integer."""
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def strip_dashes(words: Sequence[str]) -> list[str]:
    """Return a command line without the ``--`` that separates it from our own options."""
    return [*words[1:]] if words[:1] == ["--"] else [*words]


def port(text: str) -> int:
    """Parse a port number to listen on; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 (any free port) to 65535")
    return int(text)


def steps(text: str) -> tuple[int | None, int | None]:
    """Parse a range of steps ``START:STOP``, STOP exclusive as in a Python slice."""
    from overlapscope.trace.table_file import parse_step_bounds

    try:
        return parse_step_bounds(text)
    except OverlapScopeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_steps_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--steps``, which limits a command to a range of steps."""
    parser.add_argument(
        "--steps",
        type=_step_range,
        default=":",
        metavar="START:STOP",
        help="step range, STOP exclusive; only this range is loaded (default: all steps)",
    )


def _step_range(text: str) -> StepRange:
    from overlapscope.trace.table_file import step_range_of_slice

    return step_range_of_slice(*steps(text))


def parse_folder_or_url(text: str) -> Path:
    """Parse the recording of a command that reads only tables, not logs, and so accepts URLs too.

    Raises:
        argparse.ArgumentTypeError: URLs of this kind are not supported.
    """
    try:
        return resolve_recording_path(text)
    except OverlapScopeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_folder(text: str) -> Path:
    """Parse the recording of a command that reads logs, which are only on local disks.

    Raises:
        argparse.ArgumentTypeError: it is a URL.
    """
    if is_url(text):
        can = "summary, stragglers, recommend, compare, export and fleet"
        raise argparse.ArgumentTypeError(f"{text}: only {can} read URLs; copy the recording to this machine")
    return Path(text)

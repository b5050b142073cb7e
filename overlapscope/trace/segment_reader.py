"""Table of segments: rounds of the all-reduces of buckets, with a description of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd

from overlapscope.trace.folders import read_lines
from overlapscope.trace.log import Problem
from overlapscope.trace.segments import SEGMENTS_FILE, Message

SEGMENT_COLUMNS: Final = (
    *("rank", "model", "step", "plan_epoch", "bucket", "lane", "phase", "round", "rounds"),
    *("sent_to", "sent_bytes", "received_from", "received_bytes", "start_ns", "end_ns"),
)

_UNKNOWN: Final = (-1, 0, "", 0, 0, "", 0, "", 0)


Rounds = dict[int, tuple[Any, ...]]
"""Description of a segment by its number: bucket, lane, phase, round, rounds, sent_to, sent_bytes, received_from,
bytes."""


def read_rounds(folder: Path, problems: list[Problem]) -> Rounds:
    """Read the description of each segment of a rank.

    Args:
        folder: folder of the rank.
        problems: receives problems with its file.
    """
    return dict(read_lines(folder / SEGMENTS_FILE, problems, _rows_of))


def add_segment_content(segments: pd.DataFrame, rounds: Mapping[int, Rounds]) -> pd.DataFrame:
    """Add descriptions to segments.

    Args:
        segments: table from ``event_tables``.
        rounds: descriptions by rank; a rank without segments may be missing.

    Returns:
        ``SEGMENT_COLUMNS``: ``sent_to`` and ``received_from`` are ranks as text, ``1, 2``. ``bucket`` is -1 for a
            segment whose description is lost.
    """
    keys = zip(segments["rank"].tolist(), segments["segment"].tolist(), strict=True)
    found = [rounds[rank].get(number, _UNKNOWN) for rank, number in keys]
    names = ("bucket", "lane", "phase", "round", "rounds", "sent_to", "sent_bytes", "received_from", "received_bytes")
    content = {
        name: pd.Series(values, dtype="str" if name in ("phase", "sent_to", "received_from") else "int64")
        for name, values in zip(names, zip(*found, strict=True) if found else [()] * len(names), strict=True)
    }
    return segments.assign(**content)[list(SEGMENT_COLUMNS)]


def _rows_of(line: Any) -> list[tuple[int, tuple[Any, ...]]]:
    sent, received = ([(int(rank), int(size)) for rank, size in line[side]] for side in ("sends", "receives"))
    what = (int(line["bucket"]), int(line["lane"]), str(line["phase"]), int(line["round"]), int(line["rounds"]))
    return [(int(line["segment"]), (*what, *_format_messages(sent), *_format_messages(received)))]


def _format_messages(messages: list[Message]) -> tuple[str, int]:
    """Return the peers of some messages as text, and their total size in bytes."""
    return ", ".join(str(rank) for rank, _ in messages), sum(size for _, size in messages)

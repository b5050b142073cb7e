"""The card of a rank that can't write one itself, from its files: it is dead, stopped, or holds the GIL."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from overlapscope.diagnosis.evidence import CallSite, Entry, RankEvidence
from overlapscope.diagnosis.rank_files import read_rank
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.trace.format import ALIVE_FILE, rank_folder
from overlapscope.trace.group_reader import read_collective_logs

_BEFORE: Final = 6
_AFTER: Final = 8
_NEWEST: Final = 12
_SITE: Final = ("file", "line", "function")
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_NOT_THE_USERS: Final = (f"{sysconfig.get_path('stdlib')}/", "/site-packages/", str(Path(__file__).parents[1]))


def card_of(run_folder: Path, rank: int, differences: Mapping[str, int]) -> dict[str, Any] | None:
    """What ``OwnState.card`` would say.

    Args:
        differences: by group, the number around which entries are wanted.

    Returns:
        None if the rank has left nothing here.
    """
    folder = rank_folder(run_folder, rank)
    if not folder.exists():
        return None
    logs = read_collective_logs({rank: folder})
    source = RecordedOrder(logs)
    newest: list[Entry] = []
    signatures: set[int] = set()
    sites: set[int] = set()
    groups = []
    for one in source.groups():
        last = source.newest(one, rank)
        first = last - _NEWEST + 1
        newest += source.entries(one, rank, last, last)
        if one.name in differences and not one.is_point_to_point:
            first, last = differences[one.name] - _BEFORE, differences[one.name] + _AFTER
        entries = source.columns(one, rank, max(1, first), last).tolist()
        signatures.update(entry[1] for entry in entries)
        sites.update(entry[2] for entry in entries)
        groups.append(
            {
                "name": one.name,
                "ranks": one.ranks,
                "description": one.description,
                "backend": one.backend,
                "point_to_point": one.is_point_to_point,
                "newest": source.newest(one, rank),
                "entries": entries,
            }
        )
    known, places = logs.signatures(rank), logs.call_sites(rank)
    last_launched = max(newest, key=lambda entry: entry.announced_ns, default=None)
    return {
        "evidence": asdict(_evidence(rank, folder, last_launched)),
        "groups": groups,
        "signatures": [{"signature": n} | asdict(known[n]) for n in sorted(signatures) if n in known],
        "call_sites": {n: dict(zip(_SITE, places[n], strict=True)) for n in sorted(sites) if n in places},
    }


def last_awake_ns(run_folder: Path, rank: int) -> int:
    """When the watchdog of a rank of this host was last awake, could it tell the others or not; 0: nobody knows."""
    try:
        return int.from_bytes((rank_folder(run_folder, rank) / ALIVE_FILE).read_bytes()[:8], "little")
    except OSError:
        return 0


def _evidence(rank: int, folder: Path, newest: Entry | None) -> RankEvidence:
    evidence = read_rank(rank, folder, newest, is_closed=False).evidence
    site = line_in(evidence.stacks)
    if evidence.standing is None or site is None:
        return evidence
    return replace(evidence, standing=replace(evidence.standing, call_site=site))


def line_in(stacks: str) -> CallSite | None:
    """The user's line in the main thread of what faulthandler has written, which names that thread last."""
    main_thread = stacks.rpartition("Thread 0x")[2]
    for file, line, function in _FRAME.findall(main_thread):
        if not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS):
            return CallSite(file=file, line=int(line), function=function)
    return None

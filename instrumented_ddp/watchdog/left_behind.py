"""Snapshots of ranks that can't publish one, read from their files: such a rank is dead, stopped, or holds the GIL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from overlapscope.diagnosis.card import Card, make_card
from overlapscope.diagnosis.rank_files import read_rank
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.diagnosis.stacks import user_line
from overlapscope.trace.exits import read_exits
from overlapscope.trace.format import ALIVE_FILE, rank_folder
from overlapscope.trace.group_reader import read_collective_logs
from overlapscope.trace.host import boot_identity


def card_of(run_folder: Path, rank: int, differences: Mapping[str, int]) -> Card | None:
    """Return the snapshot of a rank from its files.

    Args:
        differences: by group, the entry number around which entries are wanted.

    Returns:
        None if the rank has left no files here.
    """
    folder = rank_folder(run_folder, rank)
    if not folder.exists():
        return None
    logs = read_collective_logs({rank: folder})
    source = RecordedOrder(logs)
    exits = read_exits(run_folder, [])  # the launcher may have seen its exit by now
    evidence = read_rank(rank, folder, source.newest_of(rank), is_closed=False, exits=exits).evidence
    site = user_line(evidence.stacks)  # the stacks were requested just now, if possible
    if evidence.standing is not None and site is not None:
        evidence = replace(evidence, standing=replace(evidence.standing, call_site=site))
    return make_card(
        evidence,
        [group.files[rank] for group in logs.groups.values()],
        signature_of=logs.signatures(rank).get,
        call_site_of=source.call_sites(rank).get,
        differences=differences,
    )


def is_end_known(run_folder: Path, pid: int) -> bool:
    """Return whether the launcher of a process on this host has recorded how it ended."""
    here = boot_identity()
    return any(each.pid == pid and each.boot_id == here and not each.is_job for each in read_exits(run_folder, []))


def last_awake_ns(run_folder: Path, rank: int) -> int:
    """Return when the watchdog of a rank on this host was last awake, even if it could not publish it; 0 if unknown."""
    try:
        return int.from_bytes((rank_folder(run_folder, rank) / ALIVE_FILE).read_bytes()[:8], "little")
    except OSError:
        return 0

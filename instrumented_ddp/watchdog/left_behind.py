"""Snapshots of ranks that can't publish one, read from their files: such a rank is dead, stopped, or holds the GIL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from overlapscope.diagnosis.card import RankSnapshot, make_snapshot
from overlapscope.diagnosis.rank_files import read_rank
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.diagnosis.stacks import find_user_line
from overlapscope.trace.exits import read_exits
from overlapscope.trace.format import LIVENESS_FILE, rank_folder
from overlapscope.trace.group_reader import open_collective_logs
from overlapscope.trace.host import get_boot_id


def read_snapshot(run_folder: Path, rank: int, differences: Mapping[str, int]) -> RankSnapshot | None:
    """Return the snapshot of a rank from its files.

    Args:
        differences: by group, the entry number around which entries are wanted.

    Returns:
        None if the rank has left no files here.
    """
    folder = rank_folder(run_folder, rank)
    if not folder.exists():
        return None
    logs = open_collective_logs({rank: folder})
    source = RecordedOrder(logs)
    exits = read_exits(run_folder, [])  # the launcher may have seen its exit by now
    evidence = read_rank(rank, folder, source.newest_of(rank), is_closed=False, exits=exits).evidence
    site = find_user_line(evidence.stacks)  # the stacks were requested just now, if possible
    if evidence.position is not None and site is not None:
        evidence = replace(evidence, position=replace(evidence.position, call_site=site))
    return make_snapshot(
        evidence,
        [group.files[rank] for group in logs.groups.values()],
        signature_of=logs.signatures(rank).get,
        call_site_of=source.call_sites(rank).get,
        differences=differences,
    )


def is_exit_recorded(run_folder: Path, pid: int) -> bool:
    """Return whether the launcher of a process on this host has recorded how it ended."""
    here = get_boot_id()
    return any(each.pid == pid and each.boot_id == here and not each.is_command for each in read_exits(run_folder, []))


def last_awake_ns(run_folder: Path, rank: int) -> int:
    """Return when the watchdog of a rank on this host was last awake, even if it could not publish it; 0 if unknown."""
    try:
        return int.from_bytes((rank_folder(run_folder, rank) / LIVENESS_FILE).read_bytes()[:8], "little")
    except OSError:
        return 0

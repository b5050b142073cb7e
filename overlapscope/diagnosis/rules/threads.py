"""Rule for groups in which two threads of a rank launch collectives: their order is left to chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapscope.diagnosis.evidence import Entry, GroupOrder, RankEvidence
from overlapscope.diagnosis.process_state import was_aborted_by_native_thread
from overlapscope.diagnosis.rules import order
from overlapscope.diagnosis.texts import collectives as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.collective_log import OTHER_THREAD

_SIGABRT_STATUS: Final = -6
_ABORTED: Final = "Fatal Python error: Aborted"
"""Marker of the stacks of a process that gloo has ended, as when it received more than it expected."""


def find_unordered_threads(facts: Facts) -> Verdict | None:
    """Find a difference in the order of a group, or an abort of gloo in it, where two threads of a rank launch."""
    for group in facts.evidence.groups:
        threads = {rank: pair for rank in group.ranks if (pair := _threads_in(group, rank)) is not None}
        if threads and group.divergence in ("signature", "names") and _is_by_thread(group):
            found = order.find_divergence(facts)
            if found is not None and found.group == group.name:
                words = text.threads_launch(group, threads, at_difference=group.entries_at(found.number))
                return replace(found, kind="different collectives", blamed=(), **words)
        aborted = [rank for rank in threads if _has_aborted(facts.ranks.get(rank))]
        if aborted:
            first = threads[aborted[0]]
            return Verdict(
                kind="different collectives",
                **text.threads_launch(group, threads, aborted=aborted),
                concerned=tuple(sorted(facts.ranks)),
                step=first[0].loop_step,
                group=group.name,
                call_sites=known_sites({rank: pair[1].call_site for rank, pair in threads.items()}),
            )
    return None


def _threads_in(group: GroupOrder, rank: int) -> tuple[Entry, Entry] | None:
    """Return the latest entry of the main thread and of another one, which launch in one group; None if one does."""
    window = group.windows.get(rank, ())
    of_main = [entry for entry in window if not entry.flags & OTHER_THREAD]
    of_other = [entry for entry in window if entry.flags & OTHER_THREAD]
    return (of_main[-1], of_other[-1]) if of_main and of_other else None


def _is_by_thread(group: GroupOrder) -> bool:
    """Return True if, at the first difference, one rank has launched on another thread where one has not."""
    return len({bool(entry.flags & OTHER_THREAD) for entry in group.entries_at(group.first_divergence).values()}) == 2


def _has_aborted(one: RankEvidence | None) -> bool:
    if one is None or one.liveness not in ("gone", "failed"):
        return False
    is_natives = was_aborted_by_native_thread(one.stacks)
    return is_natives or (one.exit_status == _SIGABRT_STATUS and _ABORTED not in one.stacks)

"""Notes on where ranks wait within a bucket sum that a strategy builds from sends and receives, for any verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapscope.diagnosis.facts import Facts
from overlapscope.diagnosis.segments import SegmentMessage
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import format_round, in_step, join_and, rank_list
from overlapscope.trace.signature import POINT_TO_POINT

_MAX_WAIT_NOTES: Final = 8


def note_segment_waits(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return the rounds in which ranks wait, and for whom, one sentence each."""
    if verdict.kind in ("healthy", "interrupted"):
        return ()
    others = sorted(facts.ranks.keys() - {*verdict.named})
    sentences = [text for rank in others for text in list(_waits(facts, rank)) or _undelivered(facts, rank)]
    return tuple(sentences[:_MAX_WAIT_NOTES])


def _waits(facts: Facts, rank: int) -> Iterator[str]:
    """Yield, for each round in progress, a sentence about ranks that have not posted their side."""
    waits: dict[str, list[SegmentMessage]] = {}
    for one in facts.messages_of(rank):
        if not one.is_answered and one.peer not in facts.unrecorded:
            waits.setdefault(_describe_round(one), []).append(one)
    for round_name, messages in waits.items():
        lacks = {op: sorted({one.peer for one in messages if one.entry.signature.op == op}) for op in POINT_TO_POINT}
        what = [
            f"{rank_list(peers)}{_peer_wait_text(facts, peers)} to {'send' if op == 'recv' else 'receive'} its part"
            for op, peers in lacks.items()
            if peers
        ]
        yield f"Rank {rank} waits in {round_name} for {join_and(what)}."


def _peer_wait_text(facts: Facts, peers: list[int]) -> str:
    """Return for whom a single peer waits itself."""
    wait = next((wait for wait in facts.waits if [wait.rank] == peers), None)
    return "" if wait is None else f", which waits for {rank_list(wait.late)},"


def _undelivered(facts: Facts, rank: int) -> Iterator[str]:
    """Yield a sentence if a message does not arrive although both sides have posted it; only while the job runs."""
    receives = [one for one in facts.messages_of(rank) if one.entry.signature.op == "recv" and one.is_answered]
    # Several are waited for in order, so it is unknown which are complete; a single one is given some time.
    if len(receives) == 1 and facts.evidence.is_live and facts.is_stuck(rank):
        peer = receives[0].peer
        yield f"Rank {rank} waits in {_describe_round(receives[0])} for what rank {peer} sends, and it has not arrived."


def _describe_round(message: SegmentMessage) -> str:
    """Format the round: ``round 2 of 3 (reduce-scatter) of the sum of bucket 1 by ring in step 12``."""
    signature = message.entry.signature
    model = f" of model {signature.model}" if signature.model else ""
    what = f"the sum of bucket {signature.bucket}{model} by {signature.strategy}{in_step(message.entry)}"
    where = format_round(signature)
    return f"{where} of {what}" if signature.rounds > 1 else f"{what} ({where})"

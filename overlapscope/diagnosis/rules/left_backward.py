"""Rule for exceptions raised in a backward and caught, so that training continued without some gradients."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import InterruptedBackward, RankEvidence
from overlapscope.diagnosis.facts import Facts
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import at_line

INTERRUPTED_BACKWARD_ADVICE: Final = (
    "Log the exception where it is caught: it is the cause.",
    "Let it end the process, or have all ranks agree after each backward, with an all_reduce, to skip the batch.",
)
_MOST_RANKS: Final = 4


def interrupted_backward_in(one: RankEvidence, step: int | None) -> InterruptedBackward | None:
    """Return the interrupted backward of a rank in this step, unless the rank may have run another one since."""
    has_run_another = one.position is not None and one.position.phase in ("backward", "finalize", "optimizer")
    return None if has_run_another else next((left for left in one.interrupted_backwards if left.step == step), None)


def note_interrupted_backwards(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return, as evidence for another fault it may explain, the latest interrupted backward of each rank by then."""
    if not verdict.is_fault or verdict.kind == "gradients never ready":
        return ()
    latest = {
        rank: left
        for rank, one in sorted(facts.ranks.items())
        for left in one.interrupted_backwards
        if verdict.step is None or left.step <= verdict.step
    }
    return tuple(
        f"An exception came out of the backward of rank {rank} in step {left.step}{at_line(left.call_site)} and was caught: "
        "the training went on."
        for rank, left in list(latest.items())[:_MOST_RANKS]
    )

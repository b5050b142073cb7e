"""What is wrong, and how that is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from overlapscope.diagnosis.evidence import UNKNOWN_STEP, CallSite, Entry

FaultKind = Literal[
    "healthy",
    "models differ",  # parameters of another order, shape, dtype or number
    "different collectives",  # of another op, size, dtype or root
    "missing collective",  # one rank has left one out, or has one too many
    "swapped collectives",  # same shapes, other tensors
    "step behind",  # a rank averages the gradients of another step
    "batch skipped",  # a rank averages the gradients of another batch
    "gradients never ready",
    "not reduced",  # the optimizer has used gradients of this rank alone
    "uneven inputs",  # a rank ran out of data before the others
    "groups interleaved",  # two groups, entered in different orders
    "waits for data",
    "stuck",  # somewhere else
    "stopped",  # SIGSTOP, a debugger
    "holds the GIL",
    "killed",
    "out of memory",
    "failed",  # an exception of the user's, or of the backend
    "never started",
    "wrong world size",
    "slow",  # no fault
    "cannot tell",
]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A diagnosis. ``blamed`` is empty where the evidence allows nobody to be named, as with two equal sides."""

    kind: FaultKind
    sentence: str
    """What has happened, for people: one or two sentences with ranks, step, bucket, parameters and line."""
    blamed: tuple[int, ...] = ()
    concerned: tuple[int, ...] = ()
    """Ranks that the sentence speaks of, blamed or not."""
    step: int | None = None
    """Where it began."""
    group: str | None = None
    number: int | None = None
    """Of the first entry that differs, or that never completed, in its group."""
    bucket: int | None = None
    parameters: tuple[str, ...] = ()
    """Of the bucket, or those that never became ready, or the first that differs."""
    call_sites: dict[int, CallSite] | None = None
    """By rank: the line that matters."""
    windows: dict[int, tuple[Entry, ...]] | None = None
    """By rank: what it did in the group around the first divergence."""
    evidence: tuple[str, ...] = ()
    """What the verdict rests on, a sentence each; also what could not be known."""
    advice: tuple[str, ...] = ()
    """What to try."""
    also: tuple[str, ...] = ()
    """Other things that were found and are probably consequences."""

    @property
    def is_fault(self) -> bool:
        """Something is wrong with the job, or it can't be told that nothing is."""
        return self.kind not in ("healthy", "slow")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = asdict(self)
        for window in (content["windows"] or {}).values():
            for entry in window:
                entry["step"] = None if entry["step"] == UNKNOWN_STEP else entry["step"]
        return content

"""A verdict: what is wrong with a job, and how that is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from overlapscope.diagnosis.evidence import UNKNOWN_STEP, CallSite, Entry

FaultKind = Literal[
    "healthy",
    "models differ",  # parameters in a different order, or of different shape, dtype or number
    "settings differ",  # of DistributedDataParallel, so that ranks launch different collectives
    "different collectives",  # of a different op, size, dtype or root
    "missing collective",  # one rank left one out, or has one too many
    "swapped collectives",  # same shapes, different tensors
    "step behind",  # a rank averages the gradients of another step
    "batch skipped",  # a rank averages the gradients of another batch
    "gradients never ready",
    "not reduced",  # the optimizer used gradients of this rank alone
    "replicas differ",  # parameters that should be the same on all ranks are not
    "uneven inputs",  # a rank left its loop before the others
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
    "interrupted",  # from outside, and no fault before
    "cannot tell",
]


Certainty = Literal["certain", "likely", "can't tell"]
"""Whether the evidence leaves no other explanation, or leaves one that is less probable, or says too little."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A diagnosis."""

    kind: FaultKind
    sentence: str
    """What happened, for people: one or two sentences with ranks, step, bucket, parameters and line."""
    alternative: str = ""
    """What else it could be, for people: a clause without a full stop. Empty if nothing."""
    blamed: tuple[int, ...] = ()
    """Ranks that have done it, which is certain. Empty if the evidence names no rank, as with two equal sides."""
    suspected: tuple[int, ...] = ()
    """Ranks that have done it, if the alternative is not true."""
    concerned: tuple[int, ...] = ()
    """Ranks that the sentence mentions, blamed or not."""
    step: int | None = None
    """Where it began."""
    last_step: int | None = None
    """If it may have begun in one of several steps, from ``step`` on: the last of them."""
    group: str | None = None
    number: int | None = None
    """Number, in its group, of the first entry that differs or never completed."""
    bucket: int | None = None
    parameters: tuple[str, ...] = ()
    """Names of the bucket's parameters, of those that never became ready, or of the first that differs."""
    call_sites: dict[int, CallSite] | None = None
    """The line that matters, by rank."""
    windows: dict[int, tuple[Entry, ...]] | None = None
    """What each rank did in the group around the first divergence."""
    evidence: tuple[str, ...] = ()
    """What the verdict rests on, one sentence each; also what could not be known."""
    advice: tuple[str, ...] = ()
    """What to try."""
    also: tuple[str, ...] = ()
    """Other things that were found and are probably consequences."""

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong with the job, or that can't be ruled out."""
        return self.kind not in ("healthy", "slow", "interrupted")

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that it is about: blamed, or suspected."""
        return self.blamed or self.suspected

    @property
    def certainty(self) -> Certainty:
        """How sure the verdict is."""
        if self.kind == "cannot tell":
            return "can't tell"
        return "likely" if self.alternative else "certain"

    def as_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
        content = asdict(self) | {"certainty": self.certainty}
        for window in (content["windows"] or {}).values():
            for entry in window:
                entry["step"] = None if entry["step"] == UNKNOWN_STEP else entry["step"]
        return content

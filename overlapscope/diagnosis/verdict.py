"""Verdict of a diagnosis: the fault, the ranks and location, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Required, TypedDict

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
    "not finite",  # NaN or infinite gradients of some ranks went into the weights of all
    "replicas differ",  # parameters that should be the same on all ranks are not
    "uneven inputs",  # a rank left its loop before the others
    "groups interleaved",  # two groups, entered in different orders
    "waits for data",
    "stuck",  # anywhere but in the data loader
    "stopped",  # SIGSTOP, a debugger
    "holds the GIL",
    "killed",
    "out of memory",
    "failed",  # an exception of the user's code, or of the backend
    "never started",
    "wrong world size",
    "slow",  # no fault
    "interrupted",  # from outside, and no fault before
    "cannot tell",
]


Certainty = Literal["certain", "likely", "can't tell"]
"""Certainty of a verdict: no other explanation is left, a less probable one is, or evidence is insufficient."""


class VerdictText(TypedDict, total=False):
    """Fields of a verdict that people read, as the functions of ``overlapscope.diagnosis.texts`` return them."""

    sentence: Required[str]
    alternative: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


RemarkKind = Literal[
    "gradients not finite",  # and the weights are
    "gradients reduced twice",
    "unequal micro batches",  # ranks ran unequal numbers of backwards before an update
    "parameters without optimizer",  # on one rank
    "parameters that stand still",  # on one rank
    "same data",  # on several ranks
]


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What looks like an oversight, and is no fault that anything proves."""

    kind: RemarkKind
    sentence: str
    ranks: tuple[int, ...] = ()
    """Ranks that it is about."""
    step: int | None = None
    """Step in which it was first seen."""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a diagnosis."""

    kind: FaultKind
    sentence: str
    """What happened, for people: one or two sentences with ranks, step, bucket, parameters and line."""
    alternative: str = ""
    """Alternative explanation, for people: a clause without a full stop. Empty if there is none."""
    blamed: tuple[int, ...] = ()
    """Ranks that certainly caused it. Empty if the evidence names no rank, as with two equal sides."""
    suspected: tuple[int, ...] = ()
    """Ranks that caused it, unless the alternative is true."""
    concerned: tuple[int, ...] = ()
    """Ranks that the sentence mentions, blamed or not."""
    step: int | None = None
    """Step in which it began."""
    last_step: int | None = None
    """Last step in which it may have begun, if it may have been in any of several from ``step`` on."""
    group: str | None = None
    number: int | None = None
    """Number, in its group, of the first entry that differs or never completed."""
    bucket: int | None = None
    parameters: tuple[str, ...] = ()
    """Names of the bucket's parameters, of those that never became ready, or of the first that differs."""
    call_sites: dict[int, CallSite] = field(default_factory=dict)
    """Relevant line of code, by rank."""
    windows: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries of each rank in the group around the first divergence."""
    evidence: tuple[str, ...] = ()
    """What the verdict is based on, one sentence each; also what is unknown."""
    advice: tuple[str, ...] = ()
    """What to try."""
    also: tuple[str, ...] = ()
    """Other findings that are probably consequences."""
    remarks: tuple[Remark, ...] = ()
    """What looks like an oversight, with any verdict; no fault."""

    @property
    def is_fault(self) -> bool:
        """Return True if something is wrong with the job, or that can't be ruled out."""
        return self.kind not in ("healthy", "slow", "interrupted")

    @property
    def named(self) -> tuple[int, ...]:
        """Return the ranks that the verdict is about: blamed, or suspected."""
        return self.blamed or self.suspected

    @property
    def certainty(self) -> Certainty:
        """Return the certainty of the verdict."""
        if self.kind == "cannot tell":
            return "can't tell"
        return "likely" if self.alternative else "certain"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON: all steps are iterations of the user's loop, as in the sentences."""
        content = asdict(self) | {"certainty": self.certainty}
        for rank, window in content["windows"].items():
            for entry, known in zip(window, self.windows[rank], strict=True):
                entry["step"] = None if known.step == UNKNOWN_STEP else known.loop_step
        return content


def known_sites(sites: Mapping[int, CallSite | None]) -> dict[int, CallSite]:
    """Return the call sites that are known, by rank in order."""
    return {rank: site for rank, site in sorted(sites.items()) if site is not None}

"""Detection of training steps and forward/backward passes in a profile, on the clock of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.account.intervals import Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.imports.kineto import Profile

_PROFILING_HINTS: Final = {
    "torch.profiler": "with ProfilerActivity.CPU (and CUDA on a GPU)",
    "Nsight Systems": "under torch.autograd.profiler.emit_nvtx()",
}
"""Options of each tool with which its traces have all that is needed."""

Span = tuple[int, int]
"""(start, end), in nanoseconds of the profile."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and the backward that follows it."""

    step: int
    """Index of the step, counted from the first one of the profile."""
    forward: Span
    is_trained: bool
    """True if gradients are computed; False in an evaluation."""
    backward: Span | None
    """Backward; None if another forward precedes it, as when one module is called after another."""
    copies_in_ns: Int64Array
    """(n,) times at which a gradient had been copied into its bucket."""
    copies_out_ns: Int64Array
    """(n, 2) start and end of each copy of a gradient out of its bucket."""


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """The steps that a profile covers completely."""

    first: int
    """Number of the first step, from its ``ProfilerStep#`` annotation; 0 without one."""
    begin_ns: int
    """Start of the first step."""
    ends_ns: Int64Array
    """(steps,) end of each step, which is the end of its last optimizer."""
    passes: tuple[Pass, ...]
    """Passes of all steps in order of time."""
    optimizers: tuple[Span, ...]
    """Calls of ``Optimizer.step`` in order of time."""
    fetches: tuple[Span, ...]
    """Waits for a batch of a DataLoader in order of time."""

    def index_at(self, host_ns: int) -> int | None:
        """Return the index of the step at a time; None if that step does not end in the profile.

        Example: with steps that end at 8 and 16, time 5 is in step 0, 9 in step 1, and 17 in none.
        """
        step = int(np.searchsorted(self.ends_ns, host_ns))
        return step if step < len(self.ends_ns) else None


def find_steps(profile: Profile) -> ProfileSteps:
    """Find the steps of a profile.

    Raises:
        OverlapScopeError: there are none; the message says what the profile lacks.
    """
    forwards, optimizers = _spans_of_kind(profile, "forward"), _spans_of_kind(profile, "optimizer")
    if not len(forwards) or not len(optimizers):
        lacks = "forward of DistributedDataParallel" if not len(forwards) else "step of an optimizer"
        raise OverlapScopeError(
            f"{profile.source.path}: no {lacks} in it; profile whole steps of a DDP training "
            f"{_PROFILING_HINTS[profile.source.tool]}"
        )
    # A step ends with the last optimizer before the next forward. Example: with forwards from 0 and 10 and optimizers
    # that end at 6, 8 and 16, next_forward is 1, 1, 2, so that the steps end at 8 and 16.
    next_forward = np.searchsorted(forwards[:, 0], optimizers[:, 1])
    is_last = np.append(next_forward[1:] != next_forward[:-1], True)
    ends_ns = optimizers[is_last & (next_forward > 0), 1]
    first, begin_ns = _find_first_step(profile, int(forwards[0, 0]))
    return ProfileSteps(
        first=first,
        begin_ns=begin_ns,
        ends_ns=ends_ns,
        passes=_find_passes(profile, forwards, optimizers, ends_ns),
        optimizers=tuple((start, end) for start, end in optimizers.tolist() if begin_ns <= start),
        fetches=tuple((start, end) for start, end in _spans_of_kind(profile, "fetch").tolist() if begin_ns <= start),
    )


def _find_passes(
    profile: Profile, forwards: Int64Array, optimizers: Int64Array, ends_ns: Int64Array
) -> tuple[Pass, ...]:
    autograd, copies_in, copies_out = (_spans_of_kind(profile, kind) for kind in ("autograd", "copy_in", "copy_out"))
    trained = profile.trained.to_numpy(dtype=np.int64).reshape(-1, 1)
    begins_ns = np.sort(np.concatenate([forwards[:, 0], optimizers[:, 0]]))

    def between(spans: Int64Array, begin_ns: int, end_ns: int) -> Int64Array:
        return spans[(spans[:, 0] >= begin_ns) & (spans[:, 0] < end_ns)]

    passes = []
    for begin_ns, end_ns in forwards.tolist():
        step = int(np.searchsorted(ends_ns, begin_ns))
        if step == len(ends_ns):
            break
        until_ns = int(begins_ns[np.searchsorted(begins_ns, end_ns)])
        own = between(autograd, end_ns, until_ns)
        passes.append(
            Pass(
                step=step,
                forward=(begin_ns, end_ns),
                is_trained=len(between(trained, begin_ns, end_ns)) > 0 if len(trained) else len(own) > 0,
                backward=(int(own[:, 0].min()), int(own[:, 1].max())) if len(own) else None,
                copies_in_ns=between(copies_in, end_ns, until_ns)[:, 1],
                copies_out_ns=between(copies_out, end_ns, until_ns),
            )
        )
    return tuple(passes)


def _find_first_step(profile: Profile, first_forward_ns: int) -> tuple[int, int]:
    """Return the number of the first step and its start."""
    spans = profile.spans
    steps = spans[(spans["kind"] == "step") & (spans["start_ns"] <= first_forward_ns)]
    if not len(steps):
        return 0, first_forward_ns
    number = str(steps["name"].iloc[-1]).partition("#")[2]
    return int(number) if number.isdecimal() else 0, int(steps["start_ns"].iloc[-1])


def _spans_of_kind(profile: Profile, kind: str) -> Int64Array:
    """Return (n, 2) start and end of the spans of a kind, in order of start."""
    own = profile.spans.loc[profile.spans["kind"] == kind, ["start_ns", "end_ns"]]
    return own.to_numpy(dtype=np.int64).reshape(-1, 2)

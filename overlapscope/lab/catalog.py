"""The catalog of faults, with the expected diagnosis of each. Only data: the scripts are in ``examples/faults``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from overlapscope.diagnosis.verdict import FaultKind


FAULT_STEP: Final = 12
"""Step of faults that need not happen earlier or later."""
_SILENT_FAULT_TIMEOUT_S: Final = 60.0
"""Time for jobs whose replicas diverge: these continue to their end."""
DEFAULT_WORLD_SIZE: Final = 3
"""Smallest world size in which a minority can be distinguished from the others."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault script, and its expected diagnosis."""

    name: str
    """Name for ``overlapscope lab fault NAME``; its script has the same name, with underscores."""
    kinds: tuple[FaultKind, ...]
    """Kinds of fault that a correct verdict may have."""
    stock: str
    """What the user of stock PyTorch sees."""
    ranks: tuple[int, ...] = (1,)
    """Ranks at fault. With three ranks or more a verdict must name them."""
    is_known_with_two: bool = False
    """True if the rank is also named with two ranks, as this is no disagreement: it is gone, stopped, or hangs."""
    world_sizes: tuple[int, ...] = (2, 3, 4)
    step: int | None = FAULT_STEP
    """Step in which it happens; None before the first one."""
    bucket: int | None = None
    """Bucket that was never reduced, or that was next; None if buckets are irrelevant."""
    parameters: tuple[str, ...] = ()
    """Parameters that a verdict must name; empty if parameters are irrelevant."""
    has_line: bool = True
    """True if a line of the script is to blame and a process can know it."""
    patience_s: float = 8.0
    """How long a job may hang after the fault; by then the fault is reported, or never will be."""
    needs_instrumented_ddp: bool = False
    """True if only our wrapper can detect it, because stock DDP exposes too little."""

    @property
    def is_healthy(self) -> bool:
        """Return True if nothing is wrong, so that any report is a false alarm."""
        return self.kinds[0] == "healthy"

    @property
    def script(self) -> str:
        """Return the file name of the script in ``examples/faults``."""
        return self.name.replace("-", "_") + ".py"

    def blamed(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks that a correct verdict blames: none if two ranks disagree."""
        if self.is_healthy or (world_size == 2 and not self.is_known_with_two):
            return ()
        return tuple(rank for rank in self.ranks if rank < world_size)


def _healthy_job(name: str, *, may_be_slow: bool = False) -> Fault:
    kinds: tuple[FaultKind, ...] = ("healthy", "slow") if may_be_slow else ("healthy",)
    return Fault(name=name, kinds=kinds, stock="correct", step=None, has_line=False)


FAULTS: Final[tuple[Fault, ...]] = (
    # models
    Fault(
        name="reordered-parameters",
        kinds=("models differ",),
        stock="at DDP(): params[0] and its sizes on one rank, Connection closed on the others",
        step=None,
        parameters=("narrow.weight", "wide.weight"),
    ),
    Fault(
        name="swapped-layers",
        kinds=("models differ",),
        stock="silent: layers exchange gradients",
        step=None,
        parameters=("experts.left.weight", "experts.right.weight"),
    ),
    Fault(
        name="frozen-parameter",
        kinds=("models differ",),
        stock="at DDP(): 11 params against 12, not which",
        step=None,
        parameters=("head.bias",),
    ),
    # settings
    Fault(name="different-find-unused", kinds=("settings differ",), stock="SIGABRT, no cause", step=0),
    Fault(name="different-static-graph", kinds=("settings differ",), stock="SIGABRT, no cause", step=0),
    Fault(name="different-hooks", kinds=("settings differ",), stock="SIGABRT, no cause", step=0),
    Fault(name="different-broadcast-buffers", kinds=("settings differ",), stock="SIGABRT, no cause", step=None),
    # gradients
    Fault(
        name="missing-branch",
        kinds=("gradients never ready",),
        stock="at the next forward: indices 4 5 6 7",
        is_known_with_two=True,  # DDP requires all gradients, so this is not one rank's word against the other's
        bucket=1,
        parameters=("branch.0.weight", "branch.0.bias", "branch.2.weight", "branch.2.bias"),
    ),
    Fault(
        name="caught-in-backward",
        kinds=("gradients never ready",),
        stock="at the next forward: parameters that were not used",
        is_known_with_two=True,
        bucket=3,
        parameters=("layers.0.weight", "stem.weight", "stem.bias"),
    ),
    Fault(
        name="frozen-in-training",
        kinds=("gradients never ready",),
        stock="at the next forward: indices 0 1",
        is_known_with_two=True,
        bucket=4,
        parameters=("stem.weight", "stem.bias"),
    ),
    Fault(name="uneven-data", kinds=("uneven inputs",), stock="hangs in the last backward", has_line=False),
    Fault(name="no-sync-on-one-rank", kinds=("step behind",), stock="silent: averages two steps"),
    Fault(name="skipped-batch", kinds=("batch skipped",), stock="silent: averages two batches"),
    Fault(name="skipped-update", kinds=("step behind",), stock="silent: weights drift apart"),
    Fault(
        name="bypassed-ddp",
        kinds=("not reduced",),
        stock="silent: every rank trains alone",
        ranks=(0, 1, 2, 3),
        needs_instrumented_ddp=True,
    ),
    Fault(
        name="different-accumulation",
        kinds=("step behind",),
        stock="silent: averages gradients of different weights",
        step=3,
    ),
    # replicas
    Fault(
        name="other-weights",
        kinds=("replicas differ",),
        stock="silent: weights differ from the start",
        step=None,
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    Fault(
        name="other-learning-rate",
        kinds=("replicas differ",),
        stock="silent: weights drift apart",
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    Fault(
        name="other-optimizer-state",
        kinds=("replicas differ",),
        stock="silent: weights drift apart",
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    Fault(
        name="state-after-join",
        kinds=("replicas differ",),
        stock="silent: weights drift apart",
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    Fault(
        name="flipped-bit",
        kinds=("replicas differ",),
        stock="silent: a weight differs",
        parameters=("layers.1.bias",),
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    Fault(
        name="nan-gradient",
        kinds=("not finite",),
        stock="silent: the loss is NaN on all ranks",
        is_known_with_two=True,  # each rank says what its own gradients were
        bucket=0,
        has_line=False,
        patience_s=_SILENT_FAULT_TIMEOUT_S,
    ),
    # collectives
    Fault(
        name="extra-collective",
        kinds=("missing collective", "different collectives"),
        stock="SIGABRT, no cause",
    ),
    Fault(name="swapped-collectives", kinds=("swapped collectives",), stock="silent: wrong sums"),
    Fault(name="different-collectives", kinds=("different collectives",), stock="hangs"),
    Fault(name="different-sizes", kinds=("different collectives",), stock="SIGABRT, no cause"),
    Fault(name="different-dtypes", kinds=("different collectives",), stock="SIGABRT, no cause"),
    Fault(name="different-roots", kinds=("different collectives",), stock="hangs"),
    Fault(name="interleaved-groups", kinds=("groups interleaved",), stock="hangs"),
    Fault(name="missing-member", kinds=("missing collective",), stock="hangs", world_sizes=(3, 4)),
    Fault(name="send-without-receive", kinds=("missing collective", "stuck"), stock="hangs"),
    Fault(
        name="asynchronous-error",
        kinds=("missing collective", "different collectives"),
        stock="a timeout on the others, many steps later",
    ),
    Fault(
        name="evaluation-with-barrier",
        kinds=("missing collective", "different collectives"),
        stock="hangs",
        ranks=(0,),
    ),
    # ranks
    Fault(
        name="killed-in-backward",
        kinds=("killed",),
        stock="Connection reset, no rank or line",
        bucket=2,
        is_known_with_two=True,
    ),
    Fault(name="stopped-in-backward", kinds=("stopped",), stock="hangs", bucket=2, is_known_with_two=True),
    Fault(name="group-on-one-rank", kinds=("missing collective",), stock="hangs"),
    Fault(name="failed-rank", kinds=("failed",), stock="one traceback of several", is_known_with_two=True),
    Fault(
        name="caught-exception",
        kinds=("failed",),
        stock="Connection closed, on the others",
        is_known_with_two=True,
    ),
    Fault(name="hanging-data", kinds=("waits for data",), stock="hangs", is_known_with_two=True),
    Fault(
        name="dead-data-worker",
        kinds=("failed", "waits for data"),  # torch checks its workers every five seconds
        stock="one traceback of several",
        is_known_with_two=True,
    ),
    Fault(name="held-gil", kinds=("holds the GIL",), stock="hangs", is_known_with_two=True),
    Fault(name="out-of-memory", kinds=("out of memory",), stock="one traceback of several", is_known_with_two=True),
    Fault(
        name="killed-for-memory",
        kinds=("killed", "out of memory"),
        stock="Connection reset",
        is_known_with_two=True,
        has_line=False,
    ),
    Fault(
        name="never-started",
        kinds=("never started",),
        stock="hangs",
        step=None,
        is_known_with_two=True,
        patience_s=15.0,
    ),
    Fault(name="wrong-world-size", kinds=("wrong world size",), stock="hangs", step=None),
    # nothing is wrong
    _healthy_job("unused-branch"),
    _healthy_job("uneven-data-joined"),
    _healthy_job("different-bucket-caps"),
    _healthy_job("slow-step", may_be_slow=True),
    _healthy_job("slow-checkpoint", may_be_slow=True),
    _healthy_job("other-names"),
    _healthy_job("evaluation-alone"),
    _healthy_job("accumulated-gradients"),
    _healthy_job("closure"),
    _healthy_job("two-models"),
    _healthy_job("jitter"),
    _healthy_job("own-statistics"),
    _healthy_job("scaled-loss"),
    _healthy_job("sharded-optimizer"),
)

"""What a program knows a kind of verdict by, and what it may do about it without a person.

Codes are part of the JSON schema: a kind that gets another name in sentences keeps its code, and a code is never given
to another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from overlapscope.diagnosis.verdict import FaultKind

Restart = Literal["may-help", "cannot-help", "not-needed"]
"""Whether to start the same command again.

may-help: the cause may lie outside the program. cannot-help: the same program would do the same again, or its state is
already wrong and a checkpoint may hold it. not-needed: no fault.
"""


class KindHandling(NamedTuple):
    """How programs handle one kind of verdict."""

    code: str
    restart: Restart
    may_be_host: bool = False
    """Whether the host of the named ranks may be the cause, so that a restart does better without it."""


KINDS: Final[Mapping[FaultKind, KindHandling]] = {
    "healthy": KindHandling("healthy", "not-needed"),
    "models differ": KindHandling("models-differ", "cannot-help"),
    "settings differ": KindHandling("settings-differ", "cannot-help"),
    "different collectives": KindHandling("different-collectives", "cannot-help"),
    "missing collective": KindHandling("missing-collective", "cannot-help"),
    "swapped collectives": KindHandling("swapped-collectives", "cannot-help"),
    "step behind": KindHandling("step-behind", "cannot-help"),
    "batch skipped": KindHandling("batch-skipped", "cannot-help"),
    "gradients never ready": KindHandling("gradients-never-ready", "cannot-help"),
    "not reduced": KindHandling("not-reduced", "cannot-help"),
    "not finite": KindHandling("not-finite", "cannot-help"),
    "replicas differ": KindHandling("replicas-differ", "cannot-help", may_be_host=True),  # a flipped bit
    "uneven inputs": KindHandling("uneven-inputs", "cannot-help"),
    "groups interleaved": KindHandling("groups-interleaved", "cannot-help"),
    "waits for data": KindHandling("waits-for-data", "may-help", may_be_host=True),
    "stuck": KindHandling("stuck", "may-help", may_be_host=True),
    "stopped": KindHandling("stopped", "may-help"),
    "holds the GIL": KindHandling("holds-the-gil", "may-help"),
    "killed": KindHandling("killed", "may-help", may_be_host=True),
    "out of memory": KindHandling("out-of-memory", "may-help", may_be_host=True),  # another process on its device
    "failed": KindHandling("failed", "may-help"),
    "never started": KindHandling("never-started", "may-help", may_be_host=True),
    "wrong world size": KindHandling("wrong-world-size", "cannot-help"),
    "slow": KindHandling("slow", "not-needed"),
    "interrupted": KindHandling("interrupted", "may-help"),
    "cannot tell": KindHandling("cannot-tell", "may-help"),
}

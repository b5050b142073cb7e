"""Things that can be wrong with one rank: which rank, in which steps, how much."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

Pattern = Literal["persistent", "periodic", "transient", "shift"]


@dataclass(frozen=True)
class SlowCompute:
    """Forward and backward take longer, from some step on."""

    kind: ClassVar = "slow_compute"
    cause: ClassVar = "compute"
    rank: int
    share: float = 0.2
    """Of the healthy time, that is added."""
    from_step: int = 0

    @property
    def pattern(self) -> Pattern:
        """How it is spread over the run."""
        return "shift" if self.from_step else "persistent"

    def strikes(self, step: int) -> bool:
        """Whether this step is affected."""
        return step >= self.from_step


@dataclass(frozen=True)
class SlowData:
    """The data loader takes longer in some steps."""

    kind: ClassVar = "slow_data"
    cause: ClassVar = "data_wait"
    pattern: ClassVar[Pattern] = "periodic"
    rank: int
    extra_ms: float = 15
    every: int = 10

    def strikes(self, step: int) -> bool:
        """Whether this step is affected."""
        return step % self.every == self.every - 1


@dataclass(frozen=True)
class GcPauses:
    """Python's garbage collector walks a large heap in the forward of some steps."""

    kind: ClassVar = "gc_pauses"
    cause: ClassVar = "gc"
    pattern: ClassVar[Pattern] = "periodic"
    rank: int
    containers: int = 1_700_000
    """Live ones. To look at so many takes some 50 ms."""
    every: int = 7

    def strikes(self, step: int) -> bool:
        """Whether this step is affected."""
        return step % self.every == self.every - 1


@dataclass(frozen=True)
class Pause:
    """One forward takes seconds longer."""

    kind: ClassVar = "pause"
    cause: ClassVar = "compute"
    pattern: ClassVar[Pattern] = "transient"
    rank: int
    step: int = 70
    seconds: float = 2

    def strikes(self, step: int) -> bool:
        """Whether this step is affected."""
        return step == self.step


@dataclass(frozen=True)
class SlowLink:
    """What one rank sends goes through a slow link: nothing that the rank itself does."""

    kind: ClassVar = "slow_link"
    cause: ClassVar = "link"
    pattern: ClassVar[Pattern] = "persistent"
    rank: int
    rate: str = "200mbit"
    """As ``tc`` writes it."""

    def strikes(self, step: int) -> bool:
        """Whether this step is affected: all are."""
        return True


Delay = SlowCompute | SlowData | GcPauses | Pause
"""A fault that holds up its rank for a time that the rank can take."""
Fault = Delay | SlowLink

_KINDS: dict[str, type[Delay]] = {kind.kind: kind for kind in (SlowCompute, SlowData, GcPauses, Pause)}


def to_json(delays: Sequence[Delay]) -> str:
    """For a command line."""
    return json.dumps([{"kind": delay.kind} | asdict(delay) for delay in delays])


def from_json(text: str) -> list[Delay]:
    """What ``to_json`` wrote."""
    return [_KINDS[values.pop("kind")](**values) for values in json.loads(text)]

"""What each rank's training loop does with its gradients and its data, to be compared with the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RepeatedBy = Literal["user", "backwards"]
"""What reduces gradients that are averages already.

user: the user's own collective, beside DDP's reduction; backwards: a second backward, added to a gradient that the
first had reduced.
"""


@dataclass(frozen=True, kw_only=True)
class UserReducedUpdates:
    """How many updates of some parameters came after the user's own collectives had reduced their gradients."""

    model: int
    """Number that stands for these parameters, as they are in no DDP instance."""
    all: int = 0
    """Updates with all gradients reduced."""
    some: int = 0
    none: int = 0


@dataclass(frozen=True, kw_only=True)
class RepeatedReductions:
    """Updates with gradients of a model that were reduced more than once."""

    model: int
    by: RepeatedBy
    step: int
    """Step of the first of them."""
    updates: int = 1
    site: str = ""
    """Line of the user's collective, or of the backward."""
    backwards: int = 0
    """Number of backwards before the first of them, each of which was reduced."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How many backwards a model had before each update."""

    model: int
    changes: tuple[tuple[int, int], ...]
    """Step from which on, and the number of backwards; the latest changes."""
    last_step: int


@dataclass(frozen=True, kw_only=True)
class UnheldParameters:
    """Trained parameters of a model that no optimizer of this rank has updated, although it has updated others."""

    model: int
    names: tuple[str, ...]
    """The first of them."""
    count: int


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """All of that for one rank."""

    user_reduced: tuple[UserReducedUpdates, ...] = ()
    repeated: tuple[RepeatedReductions, ...] = ()
    micro_batches: tuple[MicroBatches, ...] = ()
    unheld: tuple[UnheldParameters, ...] = ()
    batches: tuple[tuple[int, str], ...] = ()
    """Number of a batch that the data loader has returned, from 0, and a hash of its first tensor."""


def is_usually_reduced(facts: Mapping[int, LoopFacts], model: int) -> bool:
    """Return whether the user's own collectives reduced the gradients of a model before most updates, on any rank."""
    return any(
        one.model == model and one.all + one.some > 2 * one.none
        for of_rank in facts.values()
        for one in of_rank.user_reduced
    )

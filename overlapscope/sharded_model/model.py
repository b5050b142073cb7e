"""A sharded model as its schedule sees it: parts with sizes, and the settings that decide when they are gathered.

A *part* is what a recording has compute and transfer times of: the parameter group of one ``fully_shard`` call, or a
piece of one. A *unit* is a list of consecutive parts that are gathered and reduced together. With the recorded settings
every unit is one part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Unit = tuple[int, ...]
"""Part numbers, in the order of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that are gathered together, and the module that they belong to."""

    name: str
    """Name of the module as in ``named_modules``; empty for the root."""
    gather_bytes: int
    """Bytes of the gathered parameters, in the precision that is sent; 0 if each rank has them all."""
    reduce_bytes: int
    """Bytes of the gradients, in the precision that is sent."""
    parent: int | None = None
    """Number of the part whose module holds this one's; None if that is the model itself."""
    is_late: bool = False
    """True if its gradients are reduced when the backward is over, as its input needs no gradient."""


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """The parts of a model, in the order in which the forward pass needs them, the root's own first."""

    parts: tuple[Part, ...]
    has_root: bool
    """True if the first part is the root's own: it is needed before and after all others, and stays gathered."""

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the numbers of the parts that are not the root's."""
        return tuple(range(int(self.has_root), len(self.parts)))

    @property
    def is_nested(self) -> bool:
        """Return whether there are units within units other than the model."""
        return any(part.parent is not None for part in self.parts)

    def gather_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gathered parameters."""
        return sum(self.parts[part].gather_bytes for part in unit)

    def reduce_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients."""
        return sum(self.parts[part].reduce_bytes for part in unit)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of ``fully_shard`` that decide about the schedule."""

    units: tuple[Unit, ...]
    """Units without the root's, in the order of the forward pass; without any, the root's unit holds all parts."""
    reshards: tuple[bool, ...]
    """Of each unit: whether its parameters are freed after its forward, and gathered again for its backward."""
    is_async: bool
    """Whether gathers are launched without waiting for them (``_set_unshard_async_op``); matters on hosts only."""
    forward_prefetch: tuple[tuple[int, ...], ...]
    """Of each unit: the units that are gathered before it computes, by number."""
    backward_prefetch: tuple[tuple[int, ...] | None, ...]
    """The same in backward; None for torch's default, which is the unit whose backward comes next."""
    root_forward_prefetch: tuple[int, ...] = ()
    """The same of the root."""
    root_backward_prefetch: tuple[int, ...] | None = None
    root_reshards: bool = False


def prefetch_settings(count: int, depth: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return whom each of some units prefetches in forward and in backward, if each prefetches as many as ``depth``.

    Example: of 3 units with depth 2, the first prefetches (1, 2), the second (2,) and the last () in forward, and ()
    (0,) and (1, 0) in backward.
    """
    forward = tuple(tuple(range(unit + 1, min(unit + 1 + depth, count))) for unit in range(count))
    backward = tuple(tuple(range(unit - 1, max(unit - 1 - depth, -1), -1)) for unit in range(count))
    return forward, backward


def with_prefetch(settings: Settings, depth: int) -> Settings:
    """Return settings in which every unit, and the root, prefetches as many units as ``depth``."""
    forward, backward = prefetch_settings(len(settings.units), depth)
    return replace(
        settings,
        forward_prefetch=forward,
        backward_prefetch=tuple(units or None for units in backward),
        root_forward_prefetch=tuple(range(min(depth, len(settings.units)))),
        root_backward_prefetch=None,
    )


def merge_units(settings: Settings, merged: int) -> Settings:
    """Return settings in which consecutive units are gathered together, from the first on; prefetch is torch's default.

    Example: units (1,), (2,), (3,) merged by 2 are (1, 2), (3,).
    """
    firsts = range(0, len(settings.units), merged)
    units = tuple(tuple(part for unit in settings.units[first : first + merged] for part in unit) for first in firsts)
    return replace(
        settings,
        units=units,
        reshards=tuple(all(settings.reshards[first : first + merged]) for first in firsts),
        forward_prefetch=((),) * len(units),
        backward_prefetch=(None,) * len(units),
        root_forward_prefetch=(),
        root_backward_prefetch=None,
    )


def merge_all(settings: Settings) -> Settings:
    """Return settings in which the root's unit holds all parameters."""
    return replace(
        settings,
        units=(),
        reshards=(),
        forward_prefetch=(),
        backward_prefetch=(),
        root_forward_prefetch=(),
        root_backward_prefetch=None,
    )

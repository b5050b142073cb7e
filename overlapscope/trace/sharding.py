"""What a recording says of models that ``fully_shard`` has sharded: which ranks share parameters, and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

RankGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ShardedUnit:
    """The parameter group of one call of ``fully_shard``, which is a bucket. Other units are named by bucket."""

    module: str
    """Name of the module; empty for the model itself."""
    is_root: bool
    reshards: bool
    """True if its parameters are freed after the forward."""
    is_async: bool
    """True if all-gathers are launched without waiting for them."""
    forward_prefetch: tuple[int, ...]
    backward_prefetch: tuple[int, ...] | None
    """None for torch's default."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the parameters of a model are sharded, at its first forward."""

    shard_groups: RankGroups
    """Ranks that gather and scatter among each other; empty if every rank has all parameters."""
    replica_groups: RankGroups
    """Ranks that have the same shards; empty if there is only one copy."""
    units: tuple[ShardedUnit, ...]
    """Units by bucket."""

    def get_groups(self, op: str) -> RankGroups:
        """Return the groups of ranks in which an operation is done."""
        return self.replica_groups if op == "all_reduce" else self.shard_groups


def find_sharding(run: Mapping[str, Any], model: int | None = None) -> Sharding | None:
    """Return how a model was sharded; None if that is not recorded.

    Args:
        run: Content of ``run.json``.
        model: Number of the model; None for what all models of the run agree in, None if they don't.
    """
    models = [each for each in run.get("models") or () if model is None or each.get("model") == model]
    with suppress(KeyError, TypeError, ValueError):  # damaged, or of another version
        found = [_parse(each["sharding"]) for each in models]
        if found and len({(each.shard_groups, each.replica_groups) for each in found}) == 1:
            return found[0]
    return None


def _parse(content: Mapping[str, Any]) -> Sharding:
    units = tuple(
        ShardedUnit(
            module=str(unit["module"]),
            is_root=bool(unit["is_root"]),
            reshards=bool(unit["reshards"]),
            is_async=bool(unit["is_async"]),
            forward_prefetch=tuple(map(int, unit["forward_prefetch"])),
            backward_prefetch=None if unit["backward_prefetch"] is None else tuple(map(int, unit["backward_prefetch"])),
        )
        for unit in content["units"]
    )
    groups = [tuple(tuple(map(int, ranks)) for ranks in content[name]) for name in ("shard_groups", "replica_groups")]
    return Sharding(shard_groups=groups[0], replica_groups=groups[1], units=units)

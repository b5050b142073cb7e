"""Hyperparameters of optimizers (learning rate, momentum ...) on each rank, and since when they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlapscope.trace.folders import read_json
from overlapscope.trace.format import HYPERPARAMETERS_FILE
from overlapscope.trace.log import Problem


@dataclass(frozen=True, kw_only=True)
class HyperparameterChange:
    """The values of an optimizer from some update on."""

    update: int
    """Number of the update of this optimizer, from 0."""
    step: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerHyperparameters:
    """The hyperparameters of one optimizer of one rank."""

    key: str
    """Identity of the optimizer: the same on all ranks where it updates the same parameters in the same way."""
    class_name: str
    names: tuple[str, ...]
    """Names of the values."""
    changes: tuple[HyperparameterChange, ...]
    """Changes in order; older ones may be missing."""
    updates: int
    """Number of updates so far."""


@dataclass(frozen=True, kw_only=True)
class HyperparameterDifference:
    """A hyperparameter that differs between ranks."""

    class_name: str
    name: str
    values: tuple[tuple[float, tuple[int, ...]], ...]
    """Values with the ranks that have them, the value of most ranks first."""
    step: int
    is_since_then: bool
    """True if the value was the same in the previous update, or there was none."""


def read_hyperparameters(folder: Path, problems: list[Problem]) -> tuple[OptimizerHyperparameters, ...]:
    """Read the hyperparameters that a rank recorded."""
    path = folder / HYPERPARAMETERS_FILE
    if not path.exists():
        return ()
    try:
        return tuple(
            OptimizerHyperparameters(
                key=str(one["key"]),
                class_name=str(one["class"]),
                names=tuple(map(str, one["names"])),
                changes=tuple(
                    HyperparameterChange(update=int(update), step=int(step), values=tuple(map(float, values)))
                    for update, step, values in one["changes"]
                ),
                updates=int(one["updates"]),
            )
            for one in read_json(path, problems).get("optimizers", ())
        )
    except (KeyError, TypeError, ValueError):
        problems.append(Problem("error", f"{path}: damaged; the settings of optimizers are not known"))
        return ()


def compare_hyperparameters(
    optimizers: Mapping[int, Sequence[OptimizerHyperparameters]],
) -> tuple[bool, tuple[HyperparameterDifference, ...]]:
    """Compare the optimizers that all ranks have in common.

    Args:
        optimizers: optimizers of each rank.

    Returns:
        Whether anything was compared; and the first hyperparameter known to differ of each optimizer.
    """
    by_rank = {rank: {one.key: one for one in known} for rank, known in optimizers.items()}
    common = set.intersection(*map(set, by_rank.values())) if len(by_rank) > 1 else set()
    found = [
        _first_hyperparameter_difference({rank: known[key] for rank, known in by_rank.items()})
        for key in sorted(common)
    ]
    return bool(common), tuple(one for one in found if one is not None)


def _first_hyperparameter_difference(
    optimizers: Mapping[int, OptimizerHyperparameters],
) -> HyperparameterDifference | None:
    known_from = max(one.changes[0].update for one in optimizers.values() if one.changes)
    known_to = min(one.updates for one in optimizers.values())
    moments = {change.update for one in optimizers.values() for change in one.changes}
    for update in sorted({known_from, *moments}):
        if not known_from <= update < known_to:
            continue
        now = {rank: _change_at(one, update) for rank, one in optimizers.items()}
        names = next(iter(optimizers.values())).names
        for index, name in enumerate(names):
            sides: dict[float, list[int]] = {}
            for rank, change in now.items():
                sides.setdefault(change.values[index], []).append(rank)
            if len(sides) > 1:
                ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
                return HyperparameterDifference(
                    class_name=next(iter(optimizers.values())).class_name,
                    name=name,
                    values=tuple((value, tuple(ranks)) for value, ranks in ordered),
                    step=max(change.step for change in now.values()),
                    is_since_then=update == 0 or update > known_from,
                )
    return None


def _change_at(one: OptimizerHyperparameters, update: int) -> HyperparameterChange:
    return [change for change in one.changes if change.update <= update][-1]

"""Comparison of the replicas of a model on all ranks, and since when they differ: one rule, live and for files.

Ranks are compared at the moments (numbers of reductions) at which both have taken the fingerprint of the same tensor.
A difference there is a fact: until parameters are made equal again, a tensor differs from the moment after which it was
last equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from overlapscope.errors import Problem
from overlapscope.trace.json_files import read_dataclasses
from overlapscope.trace.live_files import FingerprintPasses, fingerprint_pass_dtype
from overlapscope.trace.schema import HYPERPARAMETERS_FILE

# Comparison of the replicas of a model at the end of the recordings, after the last update and what follows it.


@dataclass(frozen=True, kw_only=True)
class EndComparison:
    """The parameters of ranks whose recordings ended after the same number of reductions."""

    differing: tuple[str, ...]
    """Names of the parameters that differ; empty if all are equal."""
    is_all_trained: bool = False
    """True if all trained parameters differ, as when one rank has loaded a checkpoint since."""
    equal_step: int | None = None
    """Step that began when all that differ were last equal; None if that was not observed for all."""
    sides: tuple[tuple[int, ...], ...]
    """Ranks with equal values of the first parameter that differs, largest side first; one side if all are equal."""


# Hyperparameters of optimizers (learning rate, momentum ...) on each rank, and since when they differ.


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
    return read_dataclasses(OptimizerHyperparameters, folder / HYPERPARAMETERS_FILE, problems)


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


OUTSIDE_MODELS: Final = 1_000_000
"""Numbers of models from here on stand for parameters that an optimizer updates and that are in no DDP instance."""

TensorKind = Literal["trained", "frozen", "buffer"]

_NEVER: Final = np.iinfo(np.int64).max
_MAX_FINGERPRINTS: Final = 4096
"""Maximum number of fingerprints in a snapshot."""
_MIN_PASSES: Final = 4
_STILL_PASSES: Final = 8
"""Number of passes without a change from which on parameters are said to stand still."""


@dataclass(frozen=True, kw_only=True)
class PassSummary:
    """A summary of a fingerprint pass."""

    first: int
    period: int
    count: int
    """Number of parameters whose fingerprints were taken."""
    digest: str


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One model on one rank."""

    model: int
    """Number of the model within the process."""
    key: str
    """Identity of the model: the same on all ranks that have replicas of it."""
    class_name: str
    ranks: tuple[int, ...]
    tensors: tuple[tuple[str, str], ...]
    """Name and ``TensorKind`` of each tensor."""
    numbers: tuple[int, ...]
    """Number of each tensor: what the number of reductions is congruent to, modulo the period, when it is taken."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Name of each tensor that can't be compared, and the reason."""
    processor: str = ""
    """Description of the processor: updates round alike where it is the same."""
    comm_hook: str | None = None
    """Communication hook that reduces its gradients instead of an all-reduce."""
    init_sync: bool = True
    """True if DDP made the replicas equal at construction."""
    buckets: dict[str, int] = field(default_factory=dict)
    """Buckets of parameters, by name."""
    passes: tuple[tuple[int, ...], ...] = ()
    """Period, first, steps and values of each fingerprint pass; only in a snapshot."""

    def table(self) -> FingerprintPasses:
        """Return the fingerprint passes of a snapshot as a table."""
        table = np.zeros(len(self.passes), fingerprint_pass_dtype(len(self.tensors)))
        count = len(self.tensors)
        for row, (period, first, *rest) in zip(table, self.passes, strict=True):
            row["period"], row["first"], row["steps"], row["values"] = period, first, rest[:count], rest[count:]
        return table


TableOf = Callable[[int], FingerprintPasses]
"""Function that returns the fingerprint passes of a rank."""


@dataclass(frozen=True, kw_only=True)
class ReplicaDifference:
    """Tensors that are not the same on all ranks."""

    names: tuple[str, ...]
    kind: TensorKind
    sides: tuple[tuple[int, ...], ...] = ()
    """Ranks with equal values, the largest side first, at the first moment at which all of them can be compared."""
    equal_at: int | None
    """Number of reductions at which they were last equal; None if they never were."""
    equal_step: int | None
    """Step that began at that moment."""
    differs_at: int
    """First number of reductions at which one is known to differ."""
    differs_step: int
    """Step that began at that moment."""
    is_at_once: bool
    """True if all of them may have begun to differ at the same moment."""
    was_made_equal: bool = False
    """True if they had differed before, and were equal in between."""
    uncompared: tuple[str, ...] = ()
    """Tensors of the same kind that have not been compared on all ranks since then, so that they may differ too."""


@dataclass(frozen=True, kw_only=True)
class StillParameters:
    """Trained parameters of one rank that do not change any more, while those of another rank do."""

    rank: int
    names: tuple[str, ...]
    step: int
    """Step that began when they had last changed, or were first looked at."""
    is_since_start: bool
    """True if they were never seen to change."""


@dataclass(frozen=True, kw_only=True)
class ComparedReplicas:
    """The comparison of the replicas of one model."""

    model: int
    class_name: str
    ranks: tuple[int, ...]
    """Ranks that were compared."""
    tensors: int
    """Number of parameters that were compared."""
    moments: int
    """Number of moments (numbers of reductions) at which they were compared."""
    latest_step: int | None
    """Step that began at the latest of them; None if nothing was compared."""
    difference: ReplicaDifference | None = None
    """Parameters that differ at the latest comparison."""
    buffers: ReplicaDifference | None = None
    """Buffers that differ at the latest comparison."""
    was_different: tuple[int, int] | None = None
    """First and last step at which parameters differed that are equal again."""
    buckets: dict[str, int] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()
    processors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by processor."""
    comm_hook: str | None = None
    init_sync: bool = True
    at_end: EndComparison | None = None
    """Comparison at the end of the recordings; None if not possible."""
    still: tuple[StillParameters, ...] = ()

    @property
    def is_outside(self) -> bool:
        """Return whether these are parameters in no DDP instance, which one optimizer updates."""
        return self.model >= OUTSIDE_MODELS


def summarize_latest_pass(
    latest: FingerprintPasses, numbers: Sequence[int], is_parameter: Sequence[bool]
) -> PassSummary | None:
    """Return the summary of a rank's latest fingerprint pass; None if there is none.

    Args:
        latest: the latest pass, or none.
        numbers: numbers of the tensors, as in ``Replica``.
        is_parameter: True for each parameter; buffers may differ.
    """
    if not len(latest):
        return None
    first, period = int(latest[-1]["first"]), int(latest[-1]["period"])
    return summarize_pass(latest, numbers, is_parameter, first, period)


def summarize_pass(
    table: FingerprintPasses, numbers: Sequence[int], is_parameter: Sequence[bool], first: int, period: int
) -> PassSummary | None:
    """Return a rank's values at the moments of a pass that it, or another rank, has taken; None if it has none."""
    moments = _moments(np.array([first]), np.array([period]), np.array(numbers))
    values = np.where(is_parameter, _values_at(table, moments, np.array(numbers))[0], 0)
    count = int(np.count_nonzero(values))
    if not count:
        return None
    digest = hashlib.blake2b(values.astype("<i8").tobytes(), digest_size=8).hexdigest()
    return PassSummary(first=first, period=period, count=count, digest=digest)


def replica_for_snapshot(replica: Replica, table: FingerprintPasses) -> Replica:
    """Return a replica for a snapshot: with its latest fingerprint passes, and a selection of earlier ones."""
    most = max(_MIN_PASSES, _MAX_FINGERPRINTS // max(1, len(replica.tensors)))
    indices = np.arange(len(table))[::-1]
    near = indices[: most // 2]
    far = indices[most // 2 :]
    if len(far) > most - len(near):
        far = far[np.unique(np.geomspace(1, len(far), most - len(near)).astype(int) - 1)]
    chosen = table[np.sort(np.concatenate([near, far]))]
    rows = tuple(
        (int(pass_["period"]), int(pass_["first"]), *pass_["steps"].tolist(), *pass_["values"].tolist())
        for pass_ in chosen
    )
    return replace(replica, passes=rows)


def compare_model_replicas(
    replicas: Mapping[int, Replica], table_of: TableOf, last_of: TableOf | None = None
) -> ComparedReplicas | None:
    """Compare the replicas of one model.

    Args:
        replicas: replica of each rank, all with the same key.
        table_of: returns the fingerprint passes of a rank; called as often as they are needed.
        last_of: returns the pass of a rank at its end, one or none; None while ranks run.

    Returns:
        None if there is only one replica.
    """
    if len(replicas) < 2:
        return None
    comparison = _Comparison(replicas, table_of)
    first, of_parameters = comparison.replica, comparison.compared & comparison.is_parameter
    moments = np.unique(comparison.moments[of_parameters])
    difference = comparison.find_difference("trained") or comparison.find_difference("frozen")
    at_end = None if last_of is None else comparison.compare_ends([last_of(rank) for rank in comparison.ranks])
    if difference is not None and at_end is not None:  # there all were compared once more
        names = {*difference.names, *(set(difference.uncompared) & set(at_end.differing))}
        ordered = tuple(name for name, _ in first.tensors if name in names)
        difference = replace(difference, names=ordered, uncompared=())
    return ComparedReplicas(
        model=first.model,
        class_name=first.class_name,
        ranks=comparison.ranks,
        tensors=int(of_parameters.any(axis=0).sum()),
        moments=len(moments),
        latest_step=comparison.find_step(int(moments[-1]), of_parameters) if len(moments) else None,
        difference=difference,
        buffers=comparison.find_difference("buffer"),
        was_different=None if difference else comparison.find_repaired_steps(),
        buckets=first.buckets,
        left_out=first.left_out,
        processors=_by_processor(replicas),
        comm_hook=next((one.comm_hook for one in replicas.values() if one.comm_hook), None),
        init_sync=all(one.init_sync for one in replicas.values()),
        at_end=at_end,
        still=_find_still(first, {rank: table_of(rank) for rank in comparison.ranks}),
    )


def _find_still(replica: Replica, tables: Mapping[int, FingerprintPasses]) -> tuple[StillParameters, ...]:
    """Return the parameters of each rank that do not change in its latest passes, while another rank's do."""
    is_trained = np.array([kind == "trained" for _, kind in replica.tensors])
    changes = {rank: _find_changes(table) for rank, table in tables.items()}
    passes = min(map(len, changes.values()))
    if passes < _STILL_PASSES:
        return ()
    recent = {rank: table[-passes:] for rank, table in changes.items()}
    found = []
    for rank, own in recent.items():
        still_for = np.where(own.any(axis=0), own[::-1].argmax(axis=0), passes)
        since = np.arange(passes)[:, None] >= passes - still_for
        moved = np.max([(since & other).sum(axis=0) for number, other in recent.items() if number != rank], axis=0)
        is_still = is_trained & (still_for >= _STILL_PASSES) & (2 * moved >= still_for)
        if is_still.any():
            first = int(np.where(is_still, still_for, -1).argmax())
            found.append(
                StillParameters(
                    rank=rank,
                    names=tuple(replica.tensors[index][0] for index in np.flatnonzero(is_still)),
                    step=int(tables[rank]["steps"][-1 - int(still_for[first]), first]),
                    is_since_start=not changes[rank][:, first].any(),
                )
            )
    return tuple(found)


def _find_changes(table: FingerprintPasses) -> npt.NDArray[np.bool_]:
    """Return where a fingerprint differs from that of the pass before, by pass from the second one, and tensor."""
    values = table["values"]
    changes: npt.NDArray[np.bool_] = (values[1:] != values[:-1]) & (values[1:] != 0) & (values[:-1] != 0)
    return changes


@dataclass(frozen=True)
class _ReplicaPair:
    """The comparison of another rank with the reference rank, by tensor."""

    is_common: npt.NDArray[np.bool_]
    """True where both have a fingerprint, by pass and tensor."""
    differs: npt.NDArray[np.bool_]
    """True where the fingerprints differ, by pass and tensor."""
    differs_at_end: npt.NDArray[np.bool_]
    """True where the latest fingerprints differ, by tensor."""

    @classmethod
    def of(cls, moments: npt.NDArray[np.int64], a: npt.NDArray[Any], b: npt.NDArray[Any]) -> _ReplicaPair:
        is_common = (a != 0) & (b != 0)
        differs = is_common & (a != b)
        latest = np.where(is_common, moments, -1).argmax(axis=0) if len(moments) else np.zeros(moments.shape[1], int)
        indices = np.arange(moments.shape[1])
        return cls(is_common, differs, differs[latest, indices] if len(moments) else np.zeros(moments.shape[1], bool))


class _Comparison:
    """The fingerprints of one model on all ranks, at the moments at which the first rank has taken them.

    Masks and moments are by pass of that rank and tensor.
    """

    def __init__(self, replicas: Mapping[int, Replica], table_of: TableOf) -> None:
        self.ranks = tuple(sorted(replicas))
        self.replica = replicas[self.ranks[0]]
        self._table_of = table_of
        self._kinds = np.array([kind for _, kind in self.replica.tensors])
        self.is_parameter = self._kinds != "buffer"
        self._numbers = np.array(self.replica.numbers)
        reference = table_of(self.ranks[0])
        self._steps = reference["steps"]
        self.moments = _moments(reference["first"], reference["period"], self._numbers)
        self.compared = reference["values"] != 0
        """True where all ranks have a fingerprint."""
        self._pairs = []
        for rank in self.ranks[1:]:
            values = _values_at(table_of(rank), self.moments, self._numbers)
            pair = _ReplicaPair.of(self.moments, reference["values"], values)
            self.compared &= pair.is_common
            if pair.differs.any():
                self._pairs.append(pair)

    def find_step(self, moment: int, of: npt.NDArray[np.bool_]) -> int:
        """Return the step that began at a moment at which any of some fingerprints was taken."""
        return int(self._steps[of & (self.moments == moment)][0])

    def find_difference(self, kind: TensorKind) -> ReplicaDifference | None:
        """Return how and since when tensors of a kind differ; None if none does."""
        found = self._locate_difference(self._kinds == kind)
        if found is None:
            return None
        difference, tensor = found
        return replace(difference, sides=self._find_sides(tensor, difference.differs_at))

    def _locate_difference(self, of: npt.NDArray[np.bool_]) -> tuple[ReplicaDifference, int] | None:
        """Return how and since when some tensors differ, without the sides, and the index of the first that does."""
        moments = self.moments
        begin = np.full(moments.shape[1], _NEVER)
        equal = np.full(moments.shape[1], -1)
        was_made_equal = False
        for pair in self._pairs:
            equal_at = np.where(pair.is_common & ~pair.differs, moments, -1).max(axis=0, initial=-1)
            since = np.where(pair.differs & (moments > equal_at), moments, _NEVER).min(axis=0, initial=_NEVER)
            since = np.where(of & pair.differs_at_end, since, _NEVER)
            was_made_equal |= bool((of & pair.differs_at_end & (pair.differs & (moments < equal_at)).any(axis=0)).any())
            equal = np.where(since < begin, equal_at, equal)
            begin = np.minimum(begin, since)
        differing = np.flatnonzero(begin < _NEVER)
        if not len(differing):
            return None
        earliest = int(begin.min())
        at_once = bool((equal[differing] < earliest).all())
        one = int(differing[np.lexsort((-equal[differing], begin[differing]))[0]])
        last = int(differing[equal[differing].argmax()]) if at_once else one
        equal_at = int(equal[last])
        difference = ReplicaDifference(
            names=tuple(self.replica.tensors[index][0] for index in differing),
            kind=self.replica.tensors[one][1],  # type: ignore[arg-type] # one of them
            equal_at=None if equal_at < 0 else equal_at,
            equal_step=None if equal_at < 0 else self._step_of(equal_at, last),
            differs_at=earliest,
            differs_step=self._step_of(earliest, one),
            is_at_once=at_once,
            was_made_equal=was_made_equal,
            uncompared=self._uncompared_since(earliest, of & (begin == _NEVER)),
        )
        return difference, one

    def _uncompared_since(self, moment: int, of: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        """Return which of some tensors have been compared on all ranks, but not since a moment."""
        latest = np.where(self.compared, self.moments, -1).max(axis=0, initial=-1)
        is_older = of & (latest >= 0) & (latest < moment)
        return tuple(self.replica.tensors[index][0] for index in np.flatnonzero(is_older))

    def _step_of(self, moment: int, tensor: int) -> int:
        """Return the step that began when a tensor's fingerprint was taken."""
        return int(self._steps[np.flatnonzero(self.moments[:, tensor] == moment)[-1], tensor])

    def _find_sides(self, tensor: int, differs_at: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with equal values of a tensor, when all can first be compared since it differs."""
        indices = np.flatnonzero(self.compared[:, tensor] & (self.moments[:, tensor] >= differs_at))
        if not len(indices):  # ranks took its fingerprint at different times
            indices = np.flatnonzero(self.moments[:, tensor] == differs_at)
        moments = self.moments[indices[:1]]
        values = (int(_values_at(self._table_of(rank), moments, self._numbers)[0, tensor]) for rank in self.ranks)
        return _group_ranks({rank: value for rank, value in zip(self.ranks, values, strict=True) if value})

    def find_repaired_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step at which parameters differed."""
        steps = [self._steps[pair.differs & self.is_parameter] for pair in self._pairs]
        found = np.concatenate(steps) if steps else np.empty(0, np.int64)
        return (int(found.min()), int(found.max())) if len(found) else None

    def compare_ends(self, last: Sequence[FingerprintPasses]) -> EndComparison | None:
        """Compare the values of ranks at their end; None if unknown for any, or if they ended after different steps.

        Args:
            last: fingerprint pass of each rank at its end, one or none.
        """
        if any(not len(one) for one in last) or len({int(one["first"][0]) for one in last}) > 1:
            return None
        values = np.stack([one["values"][0] for one in last])
        compared = self.is_parameter & (values != 0).all(axis=0)
        if not compared.any():
            return None
        differing = np.flatnonzero(compared & (values != values[0]).any(axis=0))
        if not len(differing):
            return EndComparison(differing=(), sides=(self.ranks,))
        trained = np.flatnonzero(compared & (self._kinds == "trained"))
        equal_step = int(self._last_equal_steps()[differing].min())
        return EndComparison(
            differing=tuple(self.replica.tensors[index][0] for index in differing.tolist()),
            sides=_group_ranks(dict(zip(self.ranks, values[:, differing[0]].tolist(), strict=True))),
            is_all_trained=set(trained) <= set(differing),
            equal_step=None if equal_step < 0 else equal_step,
        )

    def _last_equal_steps(self) -> npt.NDArray[np.int64]:
        """Return the step that began when each tensor was last compared; -1 if it never was."""
        if not len(self.moments):
            return np.full(self.moments.shape[1], -1)
        latest = np.where(self.compared, self.moments, -1).argmax(axis=0)
        steps = self._steps[latest, np.arange(self.moments.shape[1])].astype(np.int64)
        return np.where(self.compared.any(axis=0), steps, -1)


def _group_ranks(values: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by their value, the largest side first."""
    sides: dict[int, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, sides.values()), key=lambda side: (-len(side), side)))


def _by_processor(replicas: Mapping[int, Replica]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank, one in sorted(replicas.items()):
        found.setdefault(one.processor, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def _moments(
    first: npt.NDArray[np.int64], period: npt.NDArray[Any], numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the moments at which each tensor is taken in some passes, by pass and tensor.

    A pass that begins at reduction ``first`` takes tensor ``number`` at the first reduction from there on that equals
    ``number`` modulo ``period``. Example: first 10, period 4, numbers 0, 1, 2 and 3 give 12, 13, 10 and 11.
    """
    first, period = first.astype(np.int64)[:, None], period.astype(np.int64)[:, None]
    return first + (numbers - first) % period


def _values_at(
    table: FingerprintPasses, moments: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the fingerprints taken at some moments, 0 where there is none: by pass and tensor, like ``moments``.

    Example: of passes that begin at 10 and 14 with period 4, moment 13 is in the first (10 to 13), at which a tensor of
    number 1 is taken, since (13 - 1) % 4 == 0; moment 18 is in neither (14 to 17).
    """
    if not len(table):
        return np.zeros(moments.shape, dtype=np.int64)
    pass_index = np.searchsorted(table["first"], moments, side="right") - 1
    first, period = table["first"][pass_index], table["period"][pass_index].astype(np.int64)
    is_there = (pass_index >= 0) & (moments < first + period) & ((moments - numbers) % period == 0)
    return np.where(is_there, table["values"][pass_index, np.arange(moments.shape[1])], 0)

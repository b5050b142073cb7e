"""What other buckets would take: computed beside the pages that show it, once for a snapshot and each setting."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, Literal

import numpy as np

from dashboards.typical_step import TypicalStep
from overlapscope.analysis.advice import Advice, advise
from overlapscope.model.coarse import coarse
from overlapscope.model.partition import MB, Buckets, Float64Array, Gradients
from overlapscope.model.plan import UniformPlan, caps_mb_of, caps_setting, default_plan, uniform_plans
from overlapscope.model.plan_table import table_of
from overlapscope.model.recommend import Interval
from overlapscope.model.schedule import Costs, replay
from overlapscope.model.search import best_plan
from overlapscope.model.what_if import of_half_the_bytes
from overlapscope.trace.reader import Trace

_SIZES_TRIED: Final = 400
_MOST_BUCKETS: Final = 100
"""Sizes that give more of them never pay."""
_SIZES: Final = 48
"""As many partitions as can be told apart on the page."""
_THIN: Final = 1.01
"""Nobody sets a size that gives its buckets only within 1 %."""
_DRAWS: Final = 60
_INTERVAL: Final = (0.05, 0.95)

_BESIDE: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forecast")
"""Fits and draws take longer than a page may."""

Special = Literal["present", "default", "best"]
"""Plans that no stop of the slider need be."""
SPECIALS: Final[tuple[Special, ...]] = ("present", "default", "best")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What holds for all sizes."""

    first_mb: float | None = None
    """Limit of the first bucket, if it has one of its own."""
    is_compressed: bool = False
    """Whether gradients are sent as fp16."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """Predicted step times of Q distinct plans under some options, among them every partition that a cap gives."""

    options: Options
    sizes: tuple[UniformPlan, ...]
    """Small caps first; the first plans of all."""
    special: dict[Special, int]
    """Places of those that are more than a stop of the slider."""
    plans: tuple[Buckets, ...]
    predicted_ns: Float64Array
    """(Q,)"""
    exposed_ns: Float64Array
    """(Q,)"""
    draws_ns: Float64Array
    """(D, Q)"""

    @cached_property
    def interval_ns(self) -> Float64Array:
        """(2, Q) in which a step time lies nine times out of ten."""
        low, high = np.quantile(self.draws_ns, _INTERVAL, axis=0)
        return np.array([np.minimum(low, self.predicted_ns), np.maximum(high, self.predicted_ns)])

    @property
    def fastest(self) -> int:
        """Place of the best size."""
        return int(np.argmin(self.predicted_ns[: len(self.sizes)]))

    @property
    def is_default_best(self) -> bool:
        """Whether no size is better than what DDP does when nothing is set."""
        return bool(self.predicted_ns[self.special["default"]] <= self.predicted_ns[self.fastest])

    def size_at(self, cap_mb: float) -> int:
        """Place of the size that a cap gives."""
        highs = [size.high_bytes for size in self.sizes]
        return min(int(np.searchsorted(highs, int(cap_mb * MB))), len(highs) - 1)


class Forecast:
    """The model of a recording, and the curves that it gives.

    Args:
        advice: on the recording.
    """

    def __init__(self, advice: Advice) -> None:
        self.advice = advice
        self.fitted = advice.fitted
        self._present = advice.recommendation.now.buckets
        self._curves: dict[Options, Future[Curve]] = {}
        self.reference = self._curve(Options())
        """Of the job as it is."""
        self.step = TypicalStep(self.fitted, self._present)

    @classmethod
    def soon(cls, trace: Trace) -> Future[Forecast]:
        """That of a recording, made beside. Its exception is an OverlapScopeError if nothing can be predicted."""
        return _BESIDE.submit(lambda: cls(advise(trace)))

    @property
    def gradients(self) -> Gradients:
        """What is reduced."""
        return self.fitted.work.gradients

    def curve(self, options: Options) -> Future[Curve]:
        """The curve under some options, made beside if it is not yet known."""
        if options == self.reference.options:
            known: Future[Curve] = Future()
            known.set_result(self.reference)
            return known
        if options not in self._curves:
            self._curves[options] = _BESIDE.submit(self._curve, options)
        return self._curves[options]

    def costs(self, options: Options) -> Costs:
        """What a step is made of under some options."""
        return _costs_under(options, self.fitted.costs)

    def gain_of(self, curve: Curve, place: int) -> Interval:
        """Which share of the present step a plan saves."""
        present = self.reference.special["present"]
        value = float(1 - curve.predicted_ns[place] / self.reference.predicted_ns[present])
        low, high = np.quantile(1 - curve.draws_ns[:, place] / self.reference.draws_ns[:, present], _INTERVAL)
        return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))

    def code_of(self, curve: Curve, place: int, special: Special | None = None) -> str:
        """The arguments of DistributedDataParallel that give a plan of a curve.

        Args:
            special: as which of them it is meant, if it is one.
        """
        if special == "default" or (special == "present" and self._present == default_plan(self.gradients).buckets):
            return "bucket_cap_mb=None"
        if special is not None:
            return _setting_of(curve.plans[place], self.gradients)
        cap_mb, first_mb = curve.sizes[place].cap_mb, curve.options.first_mb
        return caps_setting([cap_mb] if first_mb is None else [first_mb, cap_mb])

    def _curve(self, options: Options) -> Curve:
        fitted, costs = self.fitted, self.costs(options)
        first_bytes = None if options.first_mb is None else int(options.first_mb * MB)
        smallest = max(1, self.gradients.total_bytes // _MOST_BUCKETS)
        tried = uniform_plans(self.gradients, first_bytes, at_most=_SIZES_TRIED, smallest_cap_bytes=smallest)
        sizes = self._shown(tried, costs)
        plans = [size.buckets for size in sizes]
        special: dict[Special, int] = {}
        default = default_plan(self.gradients).buckets
        for name, buckets in zip(SPECIALS, (self._present, default, self._best_plan(options)), strict=True):
            if buckets not in plans:
                plans.append(buckets)
            special[name] = plans.index(buckets)
        table = table_of(plans, self.gradients)
        replayed = replay(table, fitted.work, costs)
        return Curve(
            options=options,
            sizes=sizes,
            special=special,
            plans=tuple(plans),
            predicted_ns=replayed.typical_ns,
            exposed_ns=np.median(replayed.exposed_ns, axis=1),
            draws_ns=fitted.cycle_draws_ns(table, _DRAWS, under=partial(_costs_under, options)),
        )

    def _best_plan(self, options: Options) -> Buckets:
        """The best of all plans, which a limit of the first bucket does not touch."""
        if not options.is_compressed:
            return self.advice.recommendation.free.buckets
        work, costs = self.fitted.work, self.costs(options)
        joined = coarse(work)
        return best_plan(work, costs) if joined is None else joined.expanded(best_plan(joined.work, costs))

    def _shown(self, sizes: Sequence[UniformPlan], costs: Costs) -> tuple[UniformPlan, ...]:
        """The best of them, and of the others some that are as far apart as can be."""
        best = int(np.argmin(replay([size.buckets for size in sizes], self.fitted.work, costs).typical_ns))
        last = len(sizes) - 1
        wide = [at for at, size in enumerate(sizes) if size.high_bytes > _THIN * size.low_bytes or at == last]
        spread = np.linspace(0, len(wide) - 1, min(_SIZES, len(wide))).round().astype(np.int64)
        return tuple(sizes[place] for place in sorted({best, *(wide[at] for at in spread.tolist())}))


def _costs_under(options: Options, costs: Costs) -> Costs:
    return replace(costs, collective=of_half_the_bytes(costs.collective)) if options.is_compressed else costs


def _setting_of(buckets: Buckets, gradients: Gradients) -> str:
    caps_mb = caps_mb_of(buckets, gradients)
    return 'bucket_plan="plan.json"' if caps_mb is None else caps_setting(caps_mb)

"""Which settings of DDP to run: the most promising by the bucket model, and whether any of them can gain enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from overlapscope.advice.advice import Advice
from overlapscope.advice.observations import find_reduced_models
from overlapscope.analysis import Analysis
from overlapscope.breakdown.summary import Summary
from overlapscope.bucket_model.cost import ZERO_COST
from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.prediction import Curve
from overlapscope.bucket_model.recommend import Recommendation
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import SIZE_ARGUMENTS, VIEWS_ARGUMENT, Compression, DDPSetting
from overlapscope.trace.recording import Trace

_OTHER_SIZE_RATIO: Final = 1.5
"""Ratio of numbers of buckets from which a second size is another one."""
_COPIES: Final = 2
"""Copies that bucket views save: into buckets and out of them."""
_SLOWEST_COPY_NS_PER_BYTE: Final = 0.5
"""Copies are no slower, so that what else happens after the last bucket is not taken for a slow copy of a small one."""
_COLD_COPIES: Final = 2
"""How much longer a copy that isn't seen may take than one that is, as its data is no longer in a cache."""
_TORCH_WITH_CAP_LISTS: Final = (2, 13)

Kept = Literal["sizes: auto", "sizes: plan", "sizes: strategy", "views: on", "views: given", "compression: not allowed"]
"""What is not tried, and why: the script has chosen it, or it changes results and wasn't allowed."""


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """What the script itself sets of its model."""

    arguments: Mapping[str, Any]
    """Plain arguments of DDP, those it leaves at their defaults included."""
    given: frozenset[str]
    """Names of the arguments that it gives."""
    torch_version: tuple[int, ...]
    compression: Compression
    """Type of half the bytes: bfloat16, which keeps the range of float32, where torch can reduce it."""

    @classmethod
    def of(cls, trace: Trace) -> OwnSettings:
        """Read what the script sets of the model with the most bytes, which predictions are about."""
        reduced = find_reduced_models(trace)
        models = [model for model in trace.run.get("models") or () if model.get("model") in reduced[:1]]
        model = models[0] if models else {}
        version = str((trace.run.get("versions") or {}).get("torch", ""))
        return cls(
            arguments=model.get("ddp_arguments") or {},
            given=frozenset((model.get("trial") or {}).get("given", ())),
            torch_version=tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()),
            compression="bf16" if "nccl" in str(trace.run.get("backend", "")) else "fp16",
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the arguments by which the script sets bucket sizes; empty if it leaves them at DDP's default."""
        return {name: value for name in SIZE_ARGUMENTS if (value := self.arguments.get(name)) is not None}

    def list_kept(self, *, allows_compression: bool) -> Iterator[Kept]:
        """Yield what is not tried."""
        if self.arguments.get("bucket_cap_mb") == "auto":
            yield "sizes: auto"
        elif self.arguments.get("bucket_plan") is not None:
            yield "sizes: plan"
        elif self.arguments.get("strategy") is not None:
            yield "sizes: strategy"
        if self.arguments.get(VIEWS_ARGUMENT):
            yield "views: on"
        elif VIEWS_ARGUMENT in self.given:
            yield "views: given"
        if not allows_compression:
            yield "compression: not allowed"


@dataclass(frozen=True, kw_only=True)
class PromisingSetting:
    """A setting that may be run."""

    setting: DDPSetting
    gain: Interval
    """Predicted gain over the script's own settings, as a share of the step."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """A change that may be run on top of a setting."""

    kind: Literal["views", "compression"]
    gain: Interval
    """Predicted gain on top, as a share of the step."""
    compression: Compression = ""

    def on(self, setting: DDPSetting, gain: Interval) -> PromisingSetting:
        """Return a setting with this change.

        Args:
            gain: Predicted gain of the setting without it.
        """
        is_views = self.kind == "views"
        changed = replace(setting, bucket_views=True) if is_views else replace(setting, compression=self.compression)
        return PromisingSetting(
            setting=changed,
            gain=Interval(
                value=gain.value + self.gain.value, low=gain.low + self.gain.low, high=gain.high + self.gain.high
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is run, and why no more."""

    sizes: tuple[PromisingSetting, ...]
    """Bucket sizes to run, the most promising first."""
    additions: tuple[Addition, ...]
    """What is run next, each on top of the fastest so far."""
    reachable: float
    """Gain that no setting can exceed, as a share of the step."""
    kept: tuple[Kept, ...]
    own: OwnSettings

    @property
    def is_hopeless(self) -> bool:
        """Return True if nothing that can be set is worth a run."""
        return self.reachable < MIN_GAIN or not (self.sizes or self.additions)


def choose_candidates(analysis: Analysis, advice: Advice, *, allows_compression: bool) -> Choice:
    """Choose what to run after a recording with the script's own settings.

    Args:
        advice: What the bucket model says of the recording.
        allows_compression: True if gradients may be sent in half of their bytes, which rounds them.
    """
    own = OwnSettings.of(analysis.trace)
    kept = tuple(own.list_kept(allows_compression=allows_compression))
    found, summary = advice.recommendation, analysis.summary
    is_free = {what.partition(":")[0] for what in kept}
    sizes = [] if "sizes" in is_free else _choose_sizes(found, own)
    additions = [] if "views" in is_free else [Addition(kind="views", gain=_predict_views(advice, summary))]
    if allows_compression:
        gain = max(0.0, *(each.gain for each in found.what_ifs if each.kind == "compression"), 0.0)
        saved = Interval(value=gain, low=0.0, high=gain)
        additions.append(Addition(kind="compression", gain=saved, compression=own.compression))
    return Choice(
        sizes=tuple(sorted(filter(_is_promising, sizes), key=lambda size: -size.gain.value)),
        additions=tuple(filter(_is_promising, additions)),
        reachable=compute_reachable_gain(summary, _estimate_copies(advice, summary).high),
        kept=kept,
        own=own,
    )


def _is_promising(each: PromisingSetting | Addition) -> bool:
    return each.gain.high >= MIN_GAIN and each.gain.value > -MIN_GAIN


def compute_reachable_gain(summary: Summary, copies: float) -> float:
    """Compute the share of the step that no setting can exceed: exposed communication and copies of gradients.

    Waits for a later rank are no part of it, because they are as long with any buckets.

    Args:
        copies: Share of the step that copies of gradients take at most.
    """
    exposed_ns, waits_ns = summary.mean.blocks["exposed"].high, summary.exposed_for["straggler"].low
    known_ns = sum(part for part in (exposed_ns, -waits_ns) if math.isfinite(part))
    return max(0.0, known_ns / summary.mean.step.value + copies)


def _estimate_copies(advice: Advice, summary: Summary) -> Interval:
    """Estimate the share of the step that copies of gradients take, into buckets and out of them.

    Of torch's own DDP only the last bucket's copy back is seen, as the others are made while that bucket is still sent.
    """
    seen = summary.mean.blocks["bucket_copies"].times(1 / summary.mean.step.value)
    if ZERO_COST not in (advice.fitted.costs.copy_in, advice.fitted.costs.copy_out):
        return Interval(value=seen.value, low=0.0, high=seen.high)
    gradients, last = advice.fitted.work.gradients, advice.recommendation.now.buckets[-1]
    all_of_them = _COPIES * gradients.total_bytes / float(gradients.bytes[list(last)].sum())
    slowest = _COPIES * gradients.total_bytes * _SLOWEST_COPY_NS_PER_BYTE / summary.mean.step.value
    value = min(all_of_them * seen.value, slowest)
    return Interval(value=value, low=0.0, high=min(_COLD_COPIES * value, slowest))


def _choose_sizes(found: Recommendation, own: OwnSettings) -> Iterator[PromisingSetting]:
    """Yield the best size, another one that may be nearly as good, and the best plan if torch can express it."""
    curve = found.curve
    caps_mb: dict[Buckets, tuple[float, ...]] = {size.buckets: (size.cap_mb,) for size in curve.sizes}
    caps_mb[found.default.buckets] = ()
    present = curve.plans[curve.special["present"]]
    plans = sorted((plan for plan in caps_mb if plan != present), key=lambda plan: _step_ns(curve, plan))
    if not plans:
        return
    yield _of_size(curve, plans[0], caps_mb[plans[0]])
    count = len(plans[0])
    others = [plan for plan in plans[1:] if not 1 / _OTHER_SIZE_RATIO < len(plan) / count < _OTHER_SIZE_RATIO]
    if others and _step_ns(curve, others[0]) <= (1 + MIN_GAIN) * _step_ns(curve, present):
        yield _of_size(curve, others[0], caps_mb[others[0]])
    if found.is_free_faster and found.free_caps_mb is not None and own.torch_version >= _TORCH_WITH_CAP_LISTS:
        yield _of_size(curve, found.free.buckets, found.free_caps_mb)


def _of_size(curve: Curve, plan: Buckets, caps_mb: tuple[float, ...]) -> PromisingSetting:
    return PromisingSetting(
        setting=DDPSetting(caps_mb=caps_mb), gain=curve.compute_gain(curve.plans.index(plan), curve)
    )


def _step_ns(curve: Curve, plan: Buckets) -> float:
    return float(curve.predicted_ns[curve.plans.index(plan)])


def _predict_views(advice: Advice, summary: Summary) -> Interval:
    """Predict what bucket views gain: at most the copies that they save."""
    copies = _estimate_copies(advice, summary)
    known = [each.gain for each in advice.recommendation.what_ifs if each.kind == "bucket views"]
    value = max(0.0, known[0]) if known else copies.value
    return Interval(value=value, low=0.0, high=max(value, copies.high))

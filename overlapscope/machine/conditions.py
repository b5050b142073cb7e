"""Conditions of a machine that may hold up or end a rank: what each is, and how much of it there was in a span of time.

A condition is a share of the time (or of the scheduling periods) in which something held a rank back, or a number of
times that something happened. None of them proves that it was the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.machine.readings import (
    Amounts,
    Floats,
    MachineReadings,
    SourceReadings,
    Spans,
    moments_in,
    outside,
)
from overlapscope.trace import machine_facts as names
from overlapscope.trace.machine_facts import source_kind

_EACH_NS: Final = {"_ns": 1.0, "_us": 1e3}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """How much of a condition there was on a source, in the spans of time in question."""

    kind: str
    """One of ``KINDS``."""
    source: str
    label: str
    amount: float
    """Share of the time or of the periods, or the number of times."""
    elsewhere: float | None = None
    """The same for the rest of the recording, in as long a time; None if there is no rest."""
    values: dict[str, float] = field(default_factory=dict)
    """Levels meanwhile, by the names of their facts: the median; of temperatures the maximum; of events the latest."""


AmountsOf = Callable[[SourceReadings], Amounts]


@dataclass(frozen=True, kw_only=True)
class ConditionKind:
    """A kind of condition."""

    name: str
    source: str
    """Kind of its sources."""
    facts: tuple[str, ...]
    """Facts without which nothing is known of it."""
    amounts: AmountsOf
    """Returns how often it happened; of shares for how long, or in how many periods, it held."""
    of: AmountsOf | None = None
    """Of a share: returns what it is a share of; of the time if that is None."""
    is_share: bool = True
    least: float = 0.1
    """Amount below which it is not worth a word."""
    is_grave: bool = False
    """True if it is worth a word whatever happened, and whoever else has it."""
    levels: tuple[str, ...] = ()
    """Facts that say more about it."""
    bits: int = 0
    """Reasons for which a clock is held down, if that is what it is about."""

    def measure(self, source: SourceReadings, spans: Spans) -> float | None:
        """Return the amount in some spans together; None if it is unknown."""
        if not source.has(*self.facts) or not spans.size:
            return None
        amount = float(self.amounts(source).within(spans).sum())
        return min(1.0, amount / max(1.0, float(self._whole(source, spans).sum()))) if self.is_share else amount

    def measure_each(self, source: SourceReadings, spans: Spans) -> Floats:
        """Return the share in each of some spans; NaN where it is unknown."""
        if not source.has(*self.facts):
            return np.full(spans.shape[1], np.nan)
        clipped = np.clip(spans, source.begin_ns, source.end_ns)
        whole = self._whole(source, clipped)
        shares = np.minimum(1.0, self.amounts(source).within(clipped) / np.maximum(whole, 1e-9))
        return np.where(clipped[0] < clipped[1], np.where(whole > 0, shares, 0.0), np.nan)

    def _whole(self, source: SourceReadings, spans: Spans) -> Floats:
        found: Floats = (spans[1] - spans[0]).astype(np.float64) if self.of is None else self.of(source).within(spans)
        return found


def _time(name: str, source: str, fact: str) -> ConditionKind:
    """Return the kind of a share of the time that a counter of time counts."""
    each_ns = _EACH_NS[fact[-3:]]

    def amounts(readings: SourceReadings) -> Amounts:
        counted = readings.counted(fact)
        return replace(counted, amount=counted.amount * each_ns)

    return ConditionKind(name=name, source=source, facts=(fact,), amounts=amounts)


def _held_down(name: str, bits: int, *levels: str, but: int = 0) -> ConditionKind:
    """Return the kind of a share of the time in which the clock is held down for some reasons, and not for others."""

    def is_so(limits: Floats) -> npt.NDArray[np.bool_]:
        found = limits.astype(np.int64)
        return (found & bits != 0) & (found & but == 0)

    return ConditionKind(
        name=name,
        source=names.GPU,
        facts=("clock_limits",),
        amounts=lambda source: source.held(is_so, "clock_limits"),
        levels=("sm_clock_mhz", "max_sm_clock_mhz", *levels),
        bits=bits,
    )


def _level(name: str, source: str, fact: str, limit: str, share: float) -> ConditionKind:
    """Return the kind of a share of the time in which a level is near its limit; below it if the share is 1."""

    def is_so(level: Floats, bound: Floats) -> npt.NDArray[np.bool_]:
        return level < bound if share == 1 else level >= share * bound

    return ConditionKind(
        name=name,
        source=source,
        facts=(fact, limit),
        amounts=lambda readings: readings.held(is_so, fact, limit),
        levels=(fact, limit),
    )


def _count(name: str, source: str, fact: str, *levels: str, least: float = 1.0) -> ConditionKind:
    """Return the kind of a number of times."""
    known = names.find_fact(source, fact)
    assert known is not None
    is_event = known.kind == "event"
    return ConditionKind(
        name=name,
        source=source,
        facts=() if is_event else (fact,),
        amounts=lambda readings: readings.happened(fact) if is_event else readings.counted(fact),
        is_share=False,
        least=least,
        is_grave=known.is_rare,
        levels=levels,
    )


def _pressures(source: str, prefix: str = "") -> tuple[ConditionKind, ...]:
    named = (("CPU", "cpu"), ("memory", "memory"), ("I/O", "io"))
    return tuple(_time(f"{prefix}{what} pressure", source, f"{fact}_pressure_us") for what, fact in named)


_THERMAL: Final = names.SW_THERMAL | names.HW_THERMAL

KINDS: Final = (
    _held_down("thermal limit", _THERMAL, "temperature_c"),
    _held_down("hardware slowdown", names.HW_SLOWDOWN | names.HW_POWER_BRAKE, "power_w", but=_THERMAL),
    _held_down("power limit", names.SW_POWER_CAP, "power_cap_w", "default_power_cap_w"),
    _level("narrow PCIe", names.GPU, "pcie_width", "max_pcie_width", 1.0),
    _level("NVLink down", names.GPU, "nvlinks_active", "nvlinks", 1.0),
    _count("NVLink errors", names.GPU, "nvlink_errors"),
    _count("PCIe replays", names.GPU, "pcie_replays", least=100.0),
    _count("corrected memory errors", names.GPU, "ecc_corrected"),
    _count("uncorrected memory errors", names.GPU, "ecc_uncorrected"),
    _count("Xid", names.GPU, "xid", "xid"),
    _count("GPU lost", names.GPU, "lost"),
    ConditionKind(
        name="CPU quota",
        source=names.CONTROL_GROUP,
        facts=("cpu_periods", "cpu_throttled_periods"),
        amounts=lambda source: source.counted("cpu_throttled_periods"),
        of=lambda source: source.counted("cpu_periods"),
        levels=("cpu_quota",),
    ),
    _level("near the memory limit", names.CONTROL_GROUP, "memory_bytes", "memory_limit_bytes", 0.9),
    _count("memory limit", names.CONTROL_GROUP, "memory_limit_hits", "memory_limit_bytes"),
    _count("killed for memory", names.CONTROL_GROUP, "oom_kills"),
    *_pressures(names.CONTROL_GROUP),
    *_pressures(names.HOST, "host "),
    _count("swapping", names.HOST, "swapped_pages", least=1024.0),
    _time("no core", names.PROCESS, "queued_ns"),
    _count("interface errors", names.INTERFACE, "errors"),
    _count("interface drops", names.INTERFACE, "drops", least=100.0),
    _count("interface down", names.INTERFACE, "link_changes"),
    _count("InfiniBand errors", names.INFINIBAND, "errors"),
    _count("InfiniBand discards", names.INFINIBAND, "discards"),
    _count("InfiniBand retransmits", names.INFINIBAND, "retransmits", least=100.0),
    _count("InfiniBand down", names.INFINIBAND, "link_downs"),
)
"""All kinds, the most telling of each source first."""

KIND_OF: Final = {kind.name: kind for kind in KINDS}


def measure_conditions(readings: MachineReadings, spans: Spans) -> dict[str, tuple[Condition, ...]]:
    """Return the conditions of each source in some spans of time, also those that are not worth a word."""
    return {
        name: tuple(_measure_source(source, readings.labels.get(name, name), spans))
        for name, source in readings.sources.items()
    }


def _measure_source(source: SourceReadings, label: str, spans: Spans) -> Iterator[Condition]:
    rest = source.clip(outside(spans, source.begin_ns, source.end_ns))
    asked, spans = spans, source.clip(spans)
    length_ns, rest_ns = (float((each[1] - each[0]).sum()) for each in (spans, rest))
    for kind in KINDS:
        if kind.source != source_kind(source.name):
            continue
        # An event may be all that was ever read of a source.
        amount = kind.measure(source, spans if kind.facts else asked) if length_ns or not kind.facts else None
        if amount is None:
            continue
        elsewhere = kind.measure(source, rest) if rest_ns else None
        if elsewhere is not None and not kind.is_share:
            elsewhere *= length_ns / rest_ns
        yield Condition(
            kind=kind.name,
            source=source.name,
            label=label,
            amount=amount,
            elsewhere=elsewhere,
            values=_collect_levels(kind, source, spans),
        )


def _collect_levels(kind: ConditionKind, source: SourceReadings, spans: Spans) -> dict[str, float]:
    """Return the levels that say more; of a clock that is held down, while it is."""
    moments = moments_in(spans)
    if kind.bits:
        is_held = source.level_at("clock_limits", moments).astype(np.int64) & kind.bits != 0
        moments = moments[is_held] if is_held.any() else moments
    found = {}
    for fact in kind.levels:
        if not source.has(fact) or not len(moments):
            continue
        if not kind.is_share:
            found[fact] = source.latest(fact) or 0.0
            continue
        values = source.level_at(fact, moments)
        found[fact] = float(values.max() if fact == "temperature_c" else np.median(values))
    return found

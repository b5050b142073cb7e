"""Side-by-side comparison of the collectives that the ranks of a group have at one number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Entry
from overlapscope.diagnosis.wording import format_device_progress
from overlapscope.trace.group_log import SHADOW, UNEVEN_INPUTS
from overlapscope.trace.signature import Signature
from overlapscope.units import format_bytes, format_ns

_FLAG_TEXTS: Final = {
    UNEVEN_INPUTS: "inside join() or after it",
    SHADOW: "by a rank that has joined, in place of another's",
}


@dataclass(frozen=True, kw_only=True)
class OrderSide:
    """Ranks with the same collective at a number, launched by the same line, whose devices are at the same point."""

    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    """One entry per rank; none if they have nothing there."""

    @property
    def entry(self) -> Entry | None:
        """Return the entry that represents the side."""
        return self.entries[0] if self.entries else None


@dataclass(frozen=True, kw_only=True)
class ComparisonLine:
    """One line of the comparison: its name, and its value on each side."""

    label: str
    values: tuple[str, ...]
    differs: bool


def group_into_sides(entries: Mapping[int, Entry | None]) -> tuple[OrderSide, ...]:
    """Group ranks into sides, the largest first, and last the ranks that have nothing there.

    Args:
        entries: entry of each rank.
    """
    same: dict[Hashable, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        what = entry and (
            entry.signature.hash,
            entry.signature.names,
            entry.step,
            entry.call_site,
            format_device_progress(entry),
        )
        same.setdefault(what, []).append(rank)
    largest_first = sorted(same.items(), key=lambda item: (item[0] is None, -len(item[1])))
    return tuple(
        OrderSide(ranks=tuple(ranks), entries=tuple(entry for rank in ranks if (entry := entries[rank]) is not None))
        for _, ranks in largest_first
    )


_TRAITS: Final[tuple[tuple[str, Callable[[Entry], str]], ...]] = (
    ("call site", lambda entry: str(entry.call_site or "unknown")),
    ("operation", lambda entry: _operation(entry.signature)),
    ("elements", lambda entry: f"{entry.signature.elements:,}" if entry.signature.elements else ""),
    ("type", lambda entry: entry.signature.dtype),
    ("shapes", lambda entry: _shapes(entry.signature.shapes)),
    ("size", lambda entry: format_bytes(entry.signature.bytes) if entry.signature.bytes else ""),
    ("root or peer", lambda entry: "" if entry.signature.peer is None else f"rank {entry.signature.peer}"),
    ("tensors", lambda entry: _listed(entry.signature.names)),
    ("launched by", lambda entry: _launcher(entry)),
    ("step", lambda entry: "" if entry.step == UNKNOWN_STEP else str(entry.loop_step)),
    ("batch", lambda entry: "" if entry.batch is None else str(entry.batch)),
    ("phase", lambda entry: (entry.phase or "").replace("_", " ")),
    ("note", lambda entry: ", ".join(_notes(entry))),
)


def _notes(entry: Entry) -> Iterator[str]:
    yield from (text for flag, text in _FLAG_TEXTS.items() if entry.flags & flag)
    if where := format_device_progress(entry):
        yield where


def compare_sides(sides: Sequence[OrderSide], offsets_ns: Mapping[int, float]) -> tuple[ComparisonLine, ...]:
    """Return the lines of the comparison: call site, what differs, what does not; lines without values are omitted.

    Args:
        offsets_ns: added to each rank's times to make them comparable; ranks without one are left out.
    """
    traits = []
    for label, text in _TRAITS:
        values = tuple("" if side.entry is None else text(side.entry) for side in sides)
        of_entries = {value for value, side in zip(values, sides, strict=True) if side.entry is not None}
        traits.append(ComparisonLine(label=label, values=values, differs=len(of_entries) > 1))
    given = [trait for trait in traits if any(trait.values)]
    by_interest = sorted(given, key=lambda trait: (trait.label != "call site", not trait.differs))
    return (*by_interest, *_times(sides, offsets_ns))


def _times(sides: Sequence[OrderSide], offsets_ns: Mapping[int, float]) -> list[ComparisonLine]:
    """Return when each side announced, launched and completed it, relative to the first announcement."""

    def moments(side: OrderSide, state: str) -> list[float | None]:
        pairs = [(offsets_ns.get(rank), entry) for rank, entry in zip(side.ranks, side.entries, strict=False)]
        times_ns = [(offset_ns, getattr(entry, f"{state}_ns")) for offset_ns, entry in pairs if offset_ns is not None]
        return [None if time_ns is None else time_ns + offset_ns for offset_ns, time_ns in times_ns]

    announced = [time_ns for side in sides for time_ns in moments(side, "announced") if time_ns]
    if not announced:
        return []
    begin_ns = min(announced)
    return [
        ComparisonLine(
            label=state,
            values=tuple(_span(moments(side, state), begin_ns) if side.entries else "" for side in sides),
            differs=False,
        )
        for state in ("announced", "launched", "completed")
    ]


def _span(times_ns: Sequence[float | None], begin_ns: float) -> str:
    known = sorted(time_ns - begin_ns for time_ns in times_ns if time_ns is not None)
    if not times_ns:
        return "clock unknown"
    if not known:
        return "never"
    never = f", {len(times_ns) - len(known)} never" if len(known) < len(times_ns) else ""
    first, last = (f"+{format_ns(time_ns)}" if time_ns else "+0" for time_ns in (known[0], known[-1]))
    return (first if first == last else f"{first} to {last}") + never


def _operation(signature: Signature) -> str:
    return f"{signature.op} ({signature.reduce_op})" if signature.reduce_op else signature.op


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return _listed(["×".join(map(str, shape)) or "scalar" for shape in shapes])


def _listed(texts: Sequence[str], most: int = 6) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


_LAUNCHERS: Final = {
    "bucket": "DDP, gradients",
    "buffers": "DDP, buffers",
    "bitmap": "DDP, which parameters were used",
    "construction": "DDP, at construction",
    "join": "join()",
    "hook": "a communication hook",
    "user": "your code",
}


def _launcher(entry: Entry) -> str:
    signature = entry.signature
    if signature.role == "user" and entry.step == UNKNOWN_STEP:
        return ""  # dumps of another tool don't say who launched it
    who = _LAUNCHERS.get(signature.role, signature.role)
    return f"{who}: bucket {signature.bucket}" if signature.role == "bucket" else who

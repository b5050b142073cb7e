"""Details of one collective number on all ranks, as markup: the sides next to each other, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.pages.shell import render_fragment
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.evidence import Entry
from overlapscope.diagnosis.order_view import OrderLanes, OrderSide, compare_sides, group_into_sides
from overlapscope.text import format_bytes, rank_list
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.recording import Trace

_MAX_SIDES: Final = 8

_Parameters = list[tuple[str, str, str]]
"""Name, shape and size of each parameter."""


def render_number_details(trace: Trace | None, diagnosis: Diagnosis, lanes: OrderLanes, number: int) -> str:
    """Return the markup of what all ranks have at a number."""
    sides = group_into_sides(lanes.entries_at(number))
    shown = sides[:_MAX_SIDES]
    return render_fragment(
        "order_details.html",
        number=number,
        has_timeline=trace is not None and len(trace.steps) > 0,
        sides=[_build_heading(side) for side in shown],
        more_sides=len(sides) - len(shown),
        traits=compare_sides(shown, diagnosis.offsets_ns),
        buckets=_list_buckets(trace, shown),
    )


@dataclass(frozen=True, kw_only=True)
class SideHeading:
    """The heading of a side."""

    title: str
    ranks: str
    """Its ranks, for the page's script."""
    state: str
    link: str
    """Link to the same step on the timeline."""


def _build_heading(side: OrderSide) -> SideHeading:
    states = sorted({entry.state for entry in side.entries})
    return SideHeading(
        title=rank_list(side.ranks),
        ranks=" ".join(map(str, side.ranks)),
        state=" or ".join(states) if states else "nothing in its log",
        link=f"timeline?step={side.entry.step}&rank={side.ranks[0]}" if side.entry else "",
    )


def _list_buckets(trace: Trace | None, sides: Sequence[OrderSide]) -> list[tuple[str, _Parameters]]:
    """Return the parameters of each bucket that a side has, once if they are the same."""
    found: dict[tuple[tuple[str, str, str], ...], tuple[str, _Parameters]] = {}
    for side in sides:
        if side.entry is None or side.entry.signature.role != "bucket":
            continue
        parameters = _list_parameters(trace, side.entry)
        title = f"Bucket {side.entry.signature.bucket}"
        found.setdefault(tuple(parameters), (f"{title} of {rank_list(side.ranks)}", parameters))
        if len(sides) == 1:
            return [(title, parameters)]
    return list(found.values())


def _list_parameters(trace: Trace | None, entry: Entry) -> _Parameters:
    signature = entry.signature
    planned = [] if trace is None else _find_plan_parameters(trace, signature)
    return planned or [(name, "", "") for name in signature.names]


def _find_plan_parameters(trace: Trace, signature: Signature) -> _Parameters:
    plans = trace.plans
    rows = plans[
        (plans["model"] == signature.model)
        & (plans["plan_epoch"] == signature.plan_epoch)
        & (plans["bucket"] == signature.bucket)
    ]
    of_hash = rows[rows["plan_hash"].str[: len(signature.plan_hash)] == signature.plan_hash]
    rows = (of_hash if len(of_hash) else rows).drop_duplicates("position").sort_values("position")
    return [
        (str(name), str(shape), format_bytes(int(size)))
        for name, shape, size in zip(rows["name"], rows["shape"], rows["bytes"], strict=True)
    ]

"""The ranks that the timeline shows: those that the address asks for, in its order, as many as can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import pandas as pd

from dashboards.pages.shell import Arguments
from overlapscope.analysis.rank_numbers import format_ranks, parse_ranks

MAX_RANKS: Final = 16
"""As many as a window can show readably and draw quickly."""

Order = Literal["rank", "lateness", "host"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
"""``host``: of each host its latest rank, and all others of hosts that have been opened."""


@dataclass(frozen=True, kw_only=True)
class RankChoice:
    """The ranks that are shown, and a note on them."""

    shown: tuple[int, ...]
    """The ranks from top to bottom."""
    marked: int | None
    """The one that the address is about."""
    ranks: int
    """How many ranks the recording has."""
    note: str
    """What was asked for and is not shown; empty if everything is."""
    order: Order
    pinned: frozenset[int]
    """Those that stay on top."""
    folded: Mapping[int, tuple[str, int]]
    """By rank that stands for its host the name of that and how many ranks it has; only in the order ``host``."""
    opened: frozenset[str]
    """Hosts of which all ranks are shown."""

    @property
    def is_part(self) -> bool:
        """Whether there are ranks that are not shown."""
        return len(self.shown) < self.ranks


def choose_ranks(ranks: pd.DataFrame, arguments: Arguments, lateness_ns: Mapping[int, int] | None = None) -> RankChoice:
    """The ranks of ``?ranks=0-7,12`` in that order, with that of ``?rank=5`` first; invalid values are ignored.

    Without ``ranks`` those on the host of ``rank`` follow it, which share its hardware, and then the others.
    ``?order=lateness`` puts the latest first, ``?order=host`` shows one of each host and all of ``?open=node1,node7``;
    those of ``?pin=3,9`` are on top of all.

    Args:
        ranks: of the trace.
        lateness_ns: of each rank in the step that is shown, as far as it is known.
    """
    host_of = dict(sorted(zip(ranks["rank"].tolist(), ranks["host"].tolist(), strict=True)))
    asked, unknown = parse_ranks(_text(arguments, "ranks"), list(host_of))
    first, _ = parse_ranks(_text(arguments, "rank"), list(host_of))
    pinned, _ = parse_ranks(_text(arguments, "pin"), list(host_of))
    marked = first[0] if len(first) == 1 else None
    order: Order = next((each for each in ORDERS if each == _text(arguments, "order")), "rank")
    opened = frozenset(_text(arguments, "open").split(",")) & frozenset(host_of.values())
    wanted = asked or sorted(host_of, key=lambda rank: marked is not None and host_of[rank] != host_of[marked])
    notes = [f"there is no rank {', '.join(unknown)}"] if unknown else []
    if len(asked) > MAX_RANKS:
        notes.append(f"{len(asked):,} were chosen, but only {MAX_RANKS} can be shown at a time")
    late_ns = lateness_ns or {}
    if order != "rank":
        if not late_ns:
            notes.append("who is late in this step is not known")
        wanted = sorted(wanted, key=lambda rank: (rank not in late_ns, -late_ns.get(rank, 0), rank))
    folded: dict[int, tuple[str, int]] = {}
    if order == "host":
        wanted, folded = _by_host(wanted, host_of, opened)
    shown = dict.fromkeys([*([] if marked is None else [marked]), *pinned, *wanted])
    return RankChoice(
        shown=tuple(shown)[:MAX_RANKS],
        marked=marked,
        ranks=len(host_of),
        note="; ".join(notes),
        order=order,
        pinned=frozenset(pinned),
        folded=folded,
        opened=opened,
    )


def _by_host(
    ranks: Sequence[int], host_of: Mapping[int, str], opened: frozenset[str]
) -> tuple[list[int], dict[int, tuple[str, int]]]:
    """The first rank of each host, followed by its others if it is open; and the host and its size by that rank."""
    of_host: dict[str, list[int]] = {}
    for rank in ranks:
        of_host.setdefault(host_of[rank], []).append(rank)
    shown = [rank for host, own in of_host.items() for rank in (own if host in opened else own[:1])]
    return shown, {own[0]: (host, len(own)) for host, own in of_host.items() if len(own) > 1}


def suggest_ranks(ranks: pd.DataFrame) -> list[tuple[str, str]]:
    """Choices and their names: the ranks of each host, or if there is only one, as many at a time as can be shown."""
    if ranks["host"].nunique() > 1:
        by_host = ranks.sort_values("rank").groupby("host", sort=False)["rank"]
        return [(format_ranks(of_host.tolist()), str(host)) for host, of_host in by_host]
    known = sorted(ranks["rank"])
    return [(format_ranks(known[at : at + MAX_RANKS]), "") for at in range(0, len(known), MAX_RANKS)]


def _text(arguments: Arguments, name: str) -> str:
    return b",".join(arguments.get(name, [])).decode(errors="replace")

"""Choice of the ranks that the timeline shows, in which order, and which of them are expanded, from the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import pandas as pd

from dashboards.pages.shell import QueryArguments, get_argument
from overlapscope.text import format_ranks, parse_ranks

RankOrder = Literal["rank", "lateness", "host"]
RANK_ORDERS: Final[tuple[RankOrder, ...]] = get_args(RankOrder)
"""Orders of ranks; ``host`` shows the last-arriving rank of each host, and all other ranks of opened hosts."""


@dataclass(frozen=True, kw_only=True)
class RankChoice:
    """The ranks that are shown, and a note on them."""

    shown: tuple[int, ...]
    """Ranks from top to bottom."""
    marked: int | None
    """Rank that the query is about."""
    ranks: int
    """Number of ranks in the recording."""
    note: str
    """What was requested and is not shown; empty if everything is."""
    order: RankOrder
    pinned: frozenset[int]
    """Ranks that stay on top."""
    folded: Mapping[int, tuple[str, int]]
    """Host name and its number of ranks, by the rank that represents the host; only in the order ``host``."""
    opened: frozenset[str]
    """Hosts of which all ranks are shown."""
    expanded: frozenset[int] | None
    """Ranks that show all their lanes; None if the reader has not chosen."""

    @property
    def is_part(self) -> bool:
        """Return whether there are ranks that are not shown."""
        return len(self.shown) < self.ranks


def choose_ranks(
    ranks: pd.DataFrame, arguments: QueryArguments, lateness_ns: Mapping[int, int] | None = None
) -> RankChoice:
    """Parse ``?ranks=0-7,12`` in that order, with the rank of ``?rank=5`` first; invalid values are ignored.

    Without ``ranks`` those on the host of ``rank`` follow it, which share its hardware, and then all others.
    ``?order=lateness`` puts the last-arriving first, ``?order=host`` shows one of each host and all of
    ``?open=node1,node7``; those of ``?pin=3,9`` are on top of all. ``?expanded=0-3``, ``all`` or ``none`` says which
    show all their lanes.

    Args:
        ranks: table of the ranks of the trace.
        arguments: query of the address.
        lateness_ns: lateness of each rank in the step that is shown, as far as it is known.
    """
    host_of = dict(sorted(zip(ranks["rank"].tolist(), ranks["host"].tolist(), strict=True)))
    asked, unknown = parse_ranks(get_argument(arguments, "ranks"), list(host_of))
    first, _ = parse_ranks(get_argument(arguments, "rank"), list(host_of))
    pinned, _ = parse_ranks(get_argument(arguments, "pin"), list(host_of))
    marked = first[0] if len(first) == 1 else None
    order: RankOrder = next((each for each in RANK_ORDERS if each == get_argument(arguments, "order")), "rank")
    opened = frozenset(get_argument(arguments, "open").split(",")) & frozenset(host_of.values())
    wanted = asked or sorted(host_of, key=lambda rank: marked is not None and host_of[rank] != host_of[marked])
    notes = [f"there is no rank {', '.join(unknown)}"] if unknown else []
    late_ns = lateness_ns or {}
    if order != "rank":
        if not late_ns:
            notes.append("who is late in this step is not known")
        wanted = sorted(wanted, key=lambda rank: (rank not in late_ns, -late_ns.get(rank, 0), rank))
    folded: dict[int, tuple[str, int]] = {}
    if order == "host":
        wanted, folded = _fold_by_host(wanted, host_of, opened)
    shown = dict.fromkeys([*([] if marked is None else [marked]), *pinned, *wanted])
    return RankChoice(
        shown=tuple(shown),
        marked=marked,
        ranks=len(host_of),
        note="; ".join(notes),
        order=order,
        pinned=frozenset(pinned),
        folded=folded,
        opened=opened,
        expanded=_parse_expanded(get_argument(arguments, "expanded"), list(host_of)),
    )


def _parse_expanded(text: str, known: Sequence[int]) -> frozenset[int] | None:
    return frozenset(known if text == "all" else parse_ranks(text, known)[0]) if text else None


def _fold_by_host(
    ranks: Sequence[int], host_of: Mapping[int, str], opened: frozenset[str]
) -> tuple[list[int], dict[int, tuple[str, int]]]:
    """Return the first rank of each host and all of opened hosts, and by first rank the host and its size.

    With ranks 3, 2, 1, 0 of which 0 and 1 are on host a, 2 and 3 on host b, and a opened: ``[3, 1, 0]`` and
    ``{3: ("b", 2), 1: ("a", 2)}``.
    """
    of_host: dict[str, list[int]] = {}
    for rank in ranks:
        of_host.setdefault(host_of[rank], []).append(rank)
    shown = [rank for host, own in of_host.items() for rank in (own if host in opened else own[:1])]
    return shown, {own[0]: (host, len(own)) for host, own in of_host.items() if len(own) > 1}


def suggest_ranks(ranks: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the ranks of each host and its name, if there are several."""
    by_host = ranks.sort_values("rank").groupby("host", sort=False)["rank"]
    return [(format_ranks(of_host.tolist()), str(host)) for host, of_host in by_host] if len(by_host) > 1 else []

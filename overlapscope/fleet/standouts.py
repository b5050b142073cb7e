"""Hosts, devices, ranks and links that stand out over many runs: late, or named by faults, more often than by chance.

A host, its devices and the ranks on it are not independent: a slow GPU makes its host stand out, and where a host has
the same ranks in all runs, so do these. So whoever is significant is tested again without the others. A host that is
late only by one of its devices is that device; a rank that is late only on one host is that host; and if neither is
late without the other, both are named, because these runs can't tell them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from overlapscope.fleet.chance import Count, Draw, compute_group_chances, compute_touching_chance, count_named

LEVEL: Final = 0.01
"""Maximum probability that anything is named in a fleet in which nothing but chance decides."""
_KINDS_OF_TESTS: Final = 8
"""Host, device and rank of late ranks and of faults, link and end of a link: each has its share of the level."""
_LEVEL_OF_KIND: Final = LEVEL / _KINDS_OF_TESTS

Kind = Literal["host", "device", "rank", "link", "end"]
"""What may stand out. ``end``: a host at an end of links."""
PLACES: Final[tuple[Kind, ...]] = ("host", "device", "rank")
"""Kinds that ranks belong to."""


class Place(NamedTuple):
    """Where a rank ran."""

    host: str
    """Empty if unknown."""
    device: str
    """Empty if it is none of its own, as on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """A run: the ranks that were compared, and those of them that were named. Without named ranks, nobody was."""

    places: Mapping[int, Place]
    """Place of each rank."""
    named: frozenset[int]

    def without(self, dropped: Iterable[int]) -> Occasion:
        """Return the occasion as if some ranks had taken no part."""
        gone = {*dropped}
        left = {rank: place for rank, place in self.places.items() if rank not in gone}
        return Occasion(places=left, named=self.named & left.keys())

    @property
    def has_hosts(self) -> bool:
        """Return whether the hosts of all ranks are known."""
        return all(place.host for place in self.places.values())


@dataclass(frozen=True, kw_only=True)
class LinkOccasion:
    """A run: the links between hosts that were measured, and those of them that were slow."""

    links: Mapping[tuple[str, str], int]
    """Number of links by the hosts that send and receive."""
    slow: Mapping[tuple[str, str], int]
    """Number of slow links, likewise."""


@dataclass(frozen=True, kw_only=True)
class Standout:
    """One host, device, rank or link that is named more often than by chance."""

    kind: Kind
    count: Count
    or_ranks: tuple[int, ...] = ()
    """Ranks that these runs can't tell it from, because they ran there."""

    @property
    def name(self) -> str:
        """Return what it is called."""
        return self.count.name


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How often each was named, and who stands out."""

    counts: Mapping[Kind, tuple[Count, ...]]
    """The most improbable first."""
    standouts: tuple[Standout, ...] = ()
    explained: tuple[tuple[Kind, str], ...] = ()
    """Those that are significant, but only through one that stands out."""


def name_device(place: Place) -> str:
    """Name the device of a rank: ``cuda:3 of node7``."""
    return f"{place.device} of {place.host}"


def name_place(kind: Kind, rank: int, place: Place) -> str:
    """Name the host or device of a rank, or the rank itself; empty if it is unknown."""
    if kind == "rank":
        return str(rank)
    if kind == "host":
        return place.host
    return name_device(place) if place.host and place.device else ""


def rank_occasions(occasions: Sequence[Occasion]) -> Ranking:
    """Find the hosts, devices and ranks that are named more often than by chance."""
    counts: dict[Kind, tuple[Count, ...]] = {kind: _count(occasions, kind) for kind in PLACES}
    significant = {kind: [count for count in of_kind if _is_significant(count)] for kind, of_kind in counts.items()}
    places = _choose_places(occasions, significant["host"], significant["device"])
    standouts = tuple(_separate(occasions, places, significant["rank"]))
    return Ranking(counts=counts, standouts=standouts, explained=_list_explained(significant, standouts))


def rank_links(occasions: Sequence[LinkOccasion]) -> Ranking:
    """Find the links, and the hosts at their ends, that are slow more often than by chance."""
    counts: dict[Kind, tuple[Count, ...]] = {
        "end": count_named(_draw_ends(occasions), _LEVEL_OF_KIND),
        "link": count_named(_draw_links(occasions), _LEVEL_OF_KIND),
    }
    significant = {kind: [count for count in of_kind if _is_significant(count)] for kind, of_kind in counts.items()}
    links = {count.name for count in significant["link"]}
    rest = [_without_links(occasion, links) for occasion in occasions]
    alone = {*_names(filter(_is_significant, count_named(_draw_ends(rest), _LEVEL_OF_KIND)))}
    ends = [count for count in significant["end"] if count.name in alone]
    # An end with several slow links explains each of them.
    of_ends = {name_link(pair) for occasion in occasions for pair in occasion.links if {*pair} & {*_names(ends)}}
    found = [Standout(kind="end", count=count) for count in ends]
    found += [Standout(kind="link", count=count) for count in significant["link"] if count.name not in of_ends]
    return Ranking(counts=counts, standouts=tuple(found), explained=_list_explained(significant, found))


def name_link(hosts: tuple[str, str]) -> str:
    """Name a link by its hosts: ``node2 → node3``, ``within node2``."""
    return f"within {hosts[0]}" if hosts[0] == hosts[1] else f"{hosts[0]} → {hosts[1]}"


def _is_significant(count: Count) -> bool:
    return count.chance <= _LEVEL_OF_KIND


def _names(counts: Iterable[Count]) -> list[str]:
    return [count.name for count in counts]


def _list_explained(
    significant: Mapping[Kind, Sequence[Count]], standouts: Sequence[Standout]
) -> tuple[tuple[Kind, str], ...]:
    known = {(each.kind, each.name) for each in standouts}
    known |= {("rank", str(rank)) for each in standouts for rank in each.or_ranks}
    return tuple(
        (kind, each.name) for kind, found in significant.items() for each in found if (kind, each.name) not in known
    )


def _count(occasions: Iterable[Occasion], kind: Kind) -> tuple[Count, ...]:
    """Count how often each host, device or rank is named; a run in which some have no key is left out."""
    draws = []
    for occasion in occasions:
        keys = {rank: name_place(kind, rank, place) for rank, place in occasion.places.items()}
        if occasion.named and all(keys.values()):
            named = frozenset(keys[rank] for rank in occasion.named)
            draws.append(Draw(named=named, chances=compute_group_chances(Counter(keys.values()), len(named))))
    return count_named(draws, _LEVEL_OF_KIND)


def _find_significant(occasions: Iterable[Occasion], kind: Kind) -> set[str]:
    return {count.name for count in _count(occasions, kind) if _is_significant(count)}


def _choose_places(
    occasions: Sequence[Occasion], hosts: Sequence[Count], devices: Sequence[Count]
) -> list[tuple[Kind, Count]]:
    """Return hosts and devices, but of each host that is named only through devices of it, these.

    A slow host makes its devices late, too. So a device on a host that is significant has to be named more often than
    the others of that host.
    """
    of_host = _map_devices_to_hosts(occasions)
    names = {*_names(hosts)}
    worse = {name for host in names for name in _find_significant(_only_on(occasions, host), "device")}
    kept = [count for count in devices if count.name in worse or of_host[count.name] not in names]
    with_device = {of_host[count.name] for count in kept}
    alone = (
        _find_significant([_without_places(each, {*_names(kept)}) for each in occasions], "host") if hosts else set()
    )
    chosen: list[tuple[Kind, Count]] = [
        ("host", count) for count in hosts if count.name in alone or count.name not in with_device
    ]
    covered = {count.name for _, count in chosen}
    return chosen + [("device", count) for count in kept if of_host[count.name] not in covered]


def _map_devices_to_hosts(occasions: Iterable[Occasion]) -> dict[str, str]:
    places = {place for occasion in occasions for place in occasion.places.values()}
    return {name_device(place): place.host for place in places if place.device}


def _only_on(occasions: Iterable[Occasion], host: str) -> list[Occasion]:
    """Return the runs as if no other host had taken part."""
    return [
        occasion.without(rank for rank, place in occasion.places.items() if place.host != host)
        for occasion in occasions
    ]


def _without_places(occasion: Occasion, names: Collection[str]) -> Occasion:
    """Return an occasion without the ranks on some hosts and devices."""
    return occasion.without(
        rank for rank, place in occasion.places.items() if place.host in names or name_device(place) in names
    )


def _separate(
    occasions: Sequence[Occasion], places: Sequence[tuple[Kind, Count]], ranks: Sequence[Count]
) -> Iterable[Standout]:
    """Tell hosts and devices from the ranks that ran there."""
    numbers, names = {int(count.name) for count in ranks}, {count.name for _, count in places}
    without_ranks = [occasion.without(numbers) for occasion in occasions]
    without_places = [_without_places(occasion, names) for occasion in occasions]
    alone = {kind: _find_significant(without_ranks, kind) for kind in dict.fromkeys(kind for kind, _ in places)}
    ranks_alone = _find_significant(without_places, "rank") if ranks else set()
    for kind, count in places:
        doubtful = _find_ranks_at(
            occasions, count.name, {number for number in numbers if str(number) not in ranks_alone}
        )
        if count.name in alone[kind]:
            yield Standout(kind=kind, count=count)
        elif doubtful:
            yield Standout(kind=kind, count=count, or_ranks=doubtful)
    yield from (Standout(kind="rank", count=count) for count in ranks if count.name in ranks_alone)


def _find_ranks_at(occasions: Iterable[Occasion], name: str, numbers: Collection[int]) -> tuple[int, ...]:
    """Return those of some ranks that were named while they ran on a host or device."""
    found = {
        rank
        for occasion in occasions
        for rank in occasion.named & set(numbers)
        if name in (occasion.places[rank].host, name_device(occasion.places[rank]))
    }
    return tuple(sorted(found))


def _draw_links(occasions: Iterable[LinkOccasion]) -> list[Draw]:
    draws = []
    for occasion in occasions:
        if occasion.slow:
            sizes = {name_link(pair): number for pair, number in occasion.links.items()}
            named = frozenset(map(name_link, occasion.slow))
            draws.append(Draw(named=named, chances=compute_group_chances(sizes, len(named))))
    return draws


def _draw_ends(occasions: Iterable[LinkOccasion]) -> list[Draw]:
    draws = []
    for occasion in occasions:
        total, slow = sum(occasion.links.values()), sum(occasion.slow.values())
        if not slow:
            continue
        touching: Counter[str] = Counter()
        for pair, number in occasion.links.items():
            touching.update(dict.fromkeys({*pair}, number))
        draws.append(
            Draw(
                named=frozenset(host for pair in occasion.slow for host in pair),
                chances={host: compute_touching_chance(number, total, slow) for host, number in touching.items()},
            )
        )
    return draws


def _without_links(occasion: LinkOccasion, names: Collection[str]) -> LinkOccasion:
    return LinkOccasion(
        links={pair: number for pair, number in occasion.links.items() if name_link(pair) not in names},
        slow={pair: number for pair, number in occasion.slow.items() if name_link(pair) not in names},
    )

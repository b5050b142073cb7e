"""Fleets that are made up: runs on hosts of some size, with late ranks by chance, by a host, a device or a rank."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from overlapscope.fleet.fleet_run import FleetRun, LateRanks
from overlapscope.fleet.run_figures import RunFigures
from overlapscope.fleet.standouts import Occasion, Place

MONDAY_NS = 1_788_134_400_000_000_000
"""The 31st of August 2026."""
WEEK_NS = 7 * 24 * 3600 * 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class MadeUpFleet:
    """How runs of a fleet come about."""

    runs: int = 120
    hosts: int = 24
    hosts_of_run: int = 8
    sizes: tuple[int, ...] = (8,)
    """Numbers of ranks on a host, one of which each host has."""
    by_chance: float = 0.3
    """Share of runs in which ranks are late by chance."""
    most_by_chance: int = 1
    """Maximum number of these."""
    slow: dict[str, float] = field(default_factory=dict)
    """Share of its runs in which a host, a device or a rank is late: of ``host3``, ``cuda:1 of host3``, ``0``."""
    shuffled: bool = True
    """Whether hosts take part in any order; else always the same ones have the same ranks."""

    def occasions(self, seed: int) -> list[Occasion]:
        """What happens, which depends on the seed alone."""
        chance = random.Random(seed)
        size_of = {f"host{number}": chance.choice(self.sizes) for number in range(self.hosts)}
        return [self._occasion(chance, size_of) for _ in range(self.runs)]

    def _occasion(self, chance: random.Random, size_of: dict[str, int]) -> Occasion:
        hosts = chance.sample([*size_of], self.hosts_of_run) if self.shuffled else [*size_of][: self.hosts_of_run]
        places = [Place(host, f"cuda:{device}") for host in hosts for device in range(size_of[host])]
        late = {
            chance.choice(found)
            for name, share in self.slow.items()
            if (found := _ranks_of(name, places)) and chance.random() < share
        }
        if chance.random() < self.by_chance:
            late |= {*chance.sample(range(len(places)), chance.randint(1, self.most_by_chance))}
        return Occasion(places=dict(enumerate(places)), named=frozenset(late))


def _ranks_of(name: str, places: list[Place]) -> list[int]:
    if name.isdecimal():
        return [int(name)] if int(name) < len(places) else []
    return [rank for rank, place in enumerate(places) if name in (place.host, f"{place.device} of {place.host}")]


def fleet_run(occasion: Occasion, number: int = 0, *, kind: str = "healthy", step_ms: float = 100) -> FleetRun:
    """A run in which that happened."""
    ranks = tuple(occasion.places)
    return FleetRun(
        name=f"run{number}",
        path=f"traces/run{number}",
        state="read",
        figures=RunFigures(
            kind=kind, line="", is_fault=kind != "healthy", step_ns=step_ms * 1e6, exposed_ns=step_ms * 1e5
        ),
        code=kind.replace(" ", "-"),
        started_unix_ns=MONDAY_NS + number % 4 * WEEK_NS,
        world_size=len(ranks),
        model="GPT",
        model_digest="12345678",
        ranks=ranks,
        hosts=tuple(place.host for place in occasion.places.values()),
        devices=tuple(place.device for place in occasion.places.values()),
        compared=ranks,
        late=(LateRanks(ranks=tuple(sorted(occasion.named)), cause="compute", saving_ns=2e6),) * bool(occasion.named),
    )

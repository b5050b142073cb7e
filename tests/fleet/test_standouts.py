"""Who stands out over many runs: nobody by chance, and of host, device and rank the one that is the cause."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapscope.fleet.standouts import LinkOccasion, Occasion, Place, Standout, rank_links, rank_occasions
from tests.fleet.made_up_fleet import MadeUpFleet

NOBODY = (
    MadeUpFleet(),
    MadeUpFleet(sizes=(1, 4, 8), by_chance=0.8, most_by_chance=3),
    MadeUpFleet(runs=400, hosts=6, hosts_of_run=2, by_chance=1.0),
    MadeUpFleet(shuffled=False, by_chance=1.0),
)
FLEETS = 6


def named(standouts: tuple[Standout, ...]) -> dict[str, tuple[int, ...]]:
    return {each.name: each.or_ranks for each in standouts}


@pytest.mark.parametrize("fleet", NOBODY)
def test_by_chance_nobody_is_named(fleet: MadeUpFleet) -> None:
    """With less than 1 % of fleets each, one of all is already improbable; benchmarks/fleet_chance.py has thousands."""
    assert sum(bool(rank_occasions(fleet.occasions(seed)).standouts) for seed in range(FLEETS)) <= 1


@pytest.mark.parametrize("slow", ["host3", "cuda:1 of host3", "5"])
def test_the_cause_is_named_and_not_what_it_makes_late_with_it(slow: str) -> None:
    fleet = MadeUpFleet(slow={slow: 0.7})
    found = [named(rank_occasions(fleet.occasions(seed)).standouts) for seed in range(4)]
    assert found.count({slow: ()}) >= 3, found


def test_a_host_and_a_rank_that_are_both_slow_are_both_named() -> None:
    found = rank_occasions(MadeUpFleet(runs=300, slow={"host3": 0.7, "0": 0.5}).occasions(1)).standouts
    assert named(found) == {"host3": (), "0": ()}


def test_a_device_and_the_rank_that_always_runs_on_it_can_not_be_told_apart() -> None:
    fleet = MadeUpFleet(shuffled=False, slow={"cuda:1 of host3": 0.7}, by_chance=0.1)
    (found,) = rank_occasions(fleet.occasions(1)).standouts
    assert (found.kind, found.name, found.or_ranks) == ("device", "cuda:1 of host3", (25,))


@pytest.mark.parametrize(("late", "is_named"), [(7, True), (3, False)])
def test_a_host_that_is_late_in_seven_of_nine_runs_is_named_and_in_three_is_not(late: int, *, is_named: bool) -> None:
    occasions = []
    for number in range(9):
        hosts = [f"host{(number + place) % 8}" for place in range(8)]  # in another order each time
        where = hosts.index("host3") if number < late else hosts.index(f"host{4 + number % 2}")
        places = {rank: Place(hosts[rank // 8], f"cuda:{rank % 8}") for rank in range(64)}
        occasions.append(Occasion(places=places, named=frozenset({8 * where + number % 8})))
    assert named(rank_occasions(occasions).standouts) == ({"host3": ()} if is_named else {})


@given(st.integers(0, 10_000), st.permutations(range(24)))
@settings(max_examples=4)
def test_names_of_hosts_and_the_order_of_runs_do_not_matter(seed: int, order: list[int]) -> None:
    occasions = MadeUpFleet(runs=40, slow={"host3": 0.9}).occasions(seed)
    renamed = [
        Occasion(
            places={
                rank: Place(f"host{order[int(place.host.removeprefix('host'))]}", place.device)
                for rank, place in occasion.places.items()
            },
            named=occasion.named,
        )
        for occasion in reversed(occasions)
    ]
    before, after = rank_occasions(occasions), rank_occasions(renamed)
    of_kind = {each.name: each.p_value for each in before.counts["host"]}
    assert {each.name: pytest.approx(each.p_value) for each in after.counts["host"]} == {
        f"host{order[int(name.removeprefix('host'))]}": value for name, value in of_kind.items()
    }
    assert len(before.standouts) == len(after.standouts)


def test_runs_of_unknown_hosts_count_for_ranks_only() -> None:
    unknown = [Occasion(places={rank: Place("", "") for rank in range(8)}, named=frozenset({3})) for _ in range(12)]
    found = rank_occasions(unknown)
    assert found.counts["host"] == found.counts["device"] == ()
    assert named(found.standouts) == {"3": ()}


RING = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "a")]


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ([("b", "c")] * 8, [("link", "b → c")]),
        ([("b", "c"), ("a", "b")] * 5, [("end", "b")]),
        (RING * 3, []),
        ([], []),
    ],
)
def test_a_slow_link_is_named_and_a_host_only_if_several_of_its_links_are(
    slow: list[tuple[str, str]], expected: list[tuple[str, str]]
) -> None:
    occasions = [LinkOccasion(links=dict.fromkeys(RING, 2), slow={pair: 1}) for pair in slow]
    assert [(each.kind, each.name) for each in rank_links(occasions).standouts] == expected

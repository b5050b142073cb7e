"""Many runs together: what is counted, by model and week, by verdict, and how often each host could have been late."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from overlapscope.fleet.fleet import Fleet, select_since
from overlapscope.fleet.fleet_run import FleetRun, HostLink
from overlapscope.fleet.run_figures import NO_VERDICT
from overlapscope.fleet.standouts import Occasion, Place
from overlapscope.fleet.text import describe_standouts
from overlapscope.interop.fleet_metrics import FAMILIES, format_fleet_metrics
from overlapscope.report.fleet import build_fleet_report
from tests.fleet.made_up_fleet import MadeUpFleet, fleet_run
from tests.interop.test_open_metrics import values_in

QUIET = Occasion(places={rank: Place(f"host{rank // 2}", f"cuda:{rank % 2}") for rank in range(4)}, named=frozenset())


def quiet(number: int, **changes: object) -> FleetRun:
    return replace(fleet_run(QUIET, number), **changes)


def test_runs_that_do_not_count_everywhere_are_counted() -> None:
    figures = quiet(0).figures
    assert figures is not None
    runs = [
        quiet(0),
        quiet(1, hosts=("", "host0", "host1", "host1")),
        quiet(2, compared=()),
        quiet(3, errors=2),
        quiet(4, started_unix_ns=None),
        quiet(5, figures=replace(figures, kind=NO_VERDICT, has_enough_evidence=False, step_ns=None)),
        quiet(6, figures=replace(figures, kind="cannot tell", has_enough_evidence=False, is_fault=True)),
        FleetRun(name="broken", path="traces/broken", state="unreadable", reason="empty"),
        FleetRun(name="live", path="traces/live", state="running"),
    ]
    counted = Fleet(runs, copies=3).coverage
    assert (counted.found, counted.read, counted.copies) == (12, 7, 3)
    assert (counted.unreadable, counted.running, counted.damaged) == (1, 1, 1)
    assert (counted.not_judged, counted.undecided, counted.without_steps) == (1, 1, 1)
    assert (counted.not_compared, counted.without_hosts, counted.without_date) == (1, 1, 1)
    assert len(build_fleet_report(Fleet(runs, copies=3), ["traces"]).facts) == 11


def test_step_time_is_the_mean_of_runs_by_model_number_of_ranks_and_week() -> None:
    steps_ms = {0: 100.0, 1: 120.0, 4: 140.0}  # the first and the last in one week
    runs = [fleet_run(QUIET, number, step_ms=step_ms) for number, step_ms in steps_ms.items()]
    other = [quiet(0, model_digest="other"), quiet(1, world_size=8)]
    models = Fleet([*runs, *other]).models
    assert [(each.key.digest, each.key.ranks, each.runs) for each in models] == [
        *(("12345678", 4, 2), ("12345678", 4, 1)),
        *(("12345678", 8, 1), ("other", 4, 1)),
    ]
    assert [each.step_ns / 1e6 for each in models[:2]] == [pytest.approx(120), pytest.approx(120)]
    assert (models[0].lowest_ns, models[0].highest_ns) == (100e6, 140e6)
    assert models[0].exposed_share == pytest.approx(0.1)
    assert models[0].week is not None
    assert models[0].week.weekday() == 0
    assert {row["model"] for row in build_fleet_report(Fleet([*runs, *other]), []).sections[1].tables[0].rows} == {
        "GPT (12345678)",
        "GPT (other)",
    }


def test_verdicts_are_counted_by_kind_and_week() -> None:
    runs = [fleet_run(QUIET, number, kind="killed" if number % 4 == 1 else "healthy") for number in range(12)]
    healthy, killed = Fleet(runs).verdicts
    assert (healthy.kind, healthy.runs, healthy.is_fault) == ("healthy", 9, False)
    assert (killed.code, killed.runs, killed.is_fault) == ("killed", 3, True)
    assert [*killed.by_week.values()] == [3]


def test_how_often_a_host_could_have_been_late_and_was_and_what_it_costs() -> None:
    late = replace(QUIET, named=frozenset({3}))
    fleet = Fleet([fleet_run(QUIET, 0), fleet_run(late, 1), fleet_run(late, 2), quiet(3, compared=(0, 1))])
    seen = fleet.appearances
    assert (seen["host", "host1"].runs, seen["host", "host1"].late) == (3, 2)
    assert (seen["host", "host0"].runs, seen["host", "host0"].late) == (4, 0)
    assert (seen["device", "cuda:1 of host1"].late, seen["rank", "3"].late) == (2, 2)
    assert seen["host", "host1"].saving_ns == 2e6
    assert math.isnan(seen["host", "host0"].saving_ns)
    assert fleet.with_late_ranks == 2


def test_the_host_that_stands_out_is_the_same_in_sentences_tables_json_and_metrics() -> None:
    made_up = MadeUpFleet(runs=60, slow={"host3": 0.8}, by_chance=0.1)
    fleet = Fleet([fleet_run(occasion, number) for number, occasion in enumerate(made_up.occasions(3))])
    report = build_fleet_report(fleet, ["traces"])
    (standout,) = fleet.late.standouts
    count = fleet.appearances["host", "host3"]
    assert standout.name == "host3"
    assert f"host3 is late in {count.late} of its {count.runs} runs" in report.sections[0].headline
    row = report.sections[0].table("late_hosts").rows[0]
    assert (row["name"], row["named"], row["runs"], row["is_standout"]) == ("host3", count.late, count.runs, 1)
    (told,) = report.content["late"]["standouts"]
    assert (told["kind"], told["name"], told["named"]) == ("host", "host3", standout.count.named)
    metrics = values_in(format_fleet_metrics(fleet), FAMILIES)
    assert metrics["overlapscope_fleet_late_runs"][(("host", "host3"),)] == count.late
    assert metrics["overlapscope_fleet_standout"] == {(("kind", "host"), ("name", "host3"), ("what", "late")): 1}
    assert metrics["overlapscope_fleet_verdicts"][(("kind", "healthy"),)] == 60


def test_faults_that_a_host_may_cause_and_slow_links_name_hosts_too() -> None:
    places = MadeUpFleet(hosts_of_run=8).occasions(0)[0].places
    runs = [replace(fleet_run(Occasion(places=places, named=frozenset()), n), at_fault=(8 + n % 8,)) for n in range(8)]
    links = tuple(HostLink(sender=f"h{n}", receiver=f"h{(n + 1) % 8}", links=1, slow=int(n == 2)) for n in range(8))
    fleet = Fleet([replace(run, host_links=links) for run in runs])
    assert [(each.kind, each.name) for each in fleet.faults.standouts] == [("host", places[8].host)]
    assert [(each.kind, each.name) for each in fleet.links.standouts] == [("link", "h2 → h3")]
    told = describe_standouts(fleet)
    subjects = ["h2 → h3", places[8].host, "No rank is late"]
    assert [subject in sentence for subject, sentence in zip(subjects, told, strict=True)] == [True] * 3


def test_a_rank_that_faults_name_has_a_row() -> None:
    fleet = Fleet([quiet(n, at_fault=(1,)) for n in range(12)])
    assert [(each.name, each.or_ranks) for each in fleet.faults.standouts] == [("cuda:1 of host0", (1,))]
    (row,) = build_fleet_report(fleet, []).sections[0].table("named_ranks").rows
    assert (row["name"], row["named"], row["runs"], row["is_standout"]) == ("rank 1", 12, 12, 1)


def test_runs_are_selected_by_day_and_those_without_one_stay() -> None:
    runs = [quiet(0), quiet(1), quiet(2, started_unix_ns=None)]
    day = runs[1].day
    assert day is not None
    assert select_since(runs, day) == runs[1:]
    assert select_since(runs, None) == runs

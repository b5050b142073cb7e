"""``overlapscope fleet``: what it prints, in which form, what it writes, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapscope.interop.fleet_metrics import FAMILIES
from overlapscope.lab.synth import SyntheticRun, write_recording
from overlapscope.trace.schema import TABLES_FOLDER
from tests.cli.command_line import Ran, overlapscope
from tests.cli.test_json import documented
from tests.interop.test_open_metrics import values_in

Fleet = Callable[..., Ran]

NOVEMBER_NS = 1_794_182_400_000_000_000
DAY_NS = 24 * 3600 * 1_000_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two hosts, ten days apart, in the second of which a rank is late; and one that can't be read."""
    folder = tmp_path_factory.mktemp("fleet") / "traces"
    for number, slow_rank in enumerate((None, 3)):
        run = SyntheticRun(
            slow_rank=slow_rank,
            hosts=("left", "right"),
            started_unix_ns=NOVEMBER_NS + number * 10 * DAY_NS,
            model="Net",
            seed=number,
        )
        write_recording(folder / f"run-{number}", 16, 80, 3, run=run)
    (folder / "broken" / "rank_0").mkdir(parents=True)
    return folder


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return lambda *arguments: overlapscope("fleet", *arguments, XDG_CACHE_HOME=str(tmp_path / "cache"))


def test_it_reads_as_its_golden_file(folder: Path, fleet: Fleet, golden: Callable[[str, str], None]) -> None:
    ran = fleet(folder)
    assert ran.returncode == 0
    golden("cli/fleet", (ran.stdout + ran.stderr).replace(str(folder), "traces"))
    assert not [*folder.rglob(TABLES_FOLDER)]


def test_json_is_what_the_document_says(folder: Path, fleet: Fleet) -> None:
    content = json.loads(fleet(folder, "--json").stdout)
    heading = "`overlapscope fleet`"
    assert set(content) == set(documented(heading, 0))
    assert set(content["late"]) == set(documented(heading, 1))
    assert set(content["late"]["counts"]["host"][0]) == set(documented(heading, 2))
    assert set(content["runs"][1]) == set(documented(heading, 3))
    assert content["coverage"]["read"] == 2
    assert [each["week"] for each in content["models"]] == ["2026-11-09", "2026-11-16"]
    assert content["runs"][2]["late"][0]["ranks"] == [3]


def test_only_runs_since_a_day_are_compared(folder: Path, fleet: Fleet) -> None:
    content = json.loads(fleet(folder, "--json", "--since", "2026-11-12").stdout)
    assert [run["name"] for run in content["runs"]] == ["broken", "run-1"]
    assert fleet(folder / "run-0", "--since", "2026-12-24").returncode == 1


def test_a_page_and_metrics_are_written_beside_what_is_printed(folder: Path, fleet: Fleet, tmp_path: Path) -> None:
    page, metrics = tmp_path / "fleet.html", tmp_path / "fleet.prom"
    ran = fleet(folder, "--html", page, "--metrics", metrics)
    assert ran.returncode == 0
    values = values_in(metrics.read_text(), FAMILIES)
    assert values["overlapscope_fleet_late_runs"] == {(("host", "left"),): 1, (("host", "right"),): 0}
    assert values["overlapscope_fleet_runs"][(("state", "unreadable"),)] == 1
    text = re.sub(r"<[^>]*>", "", page.read_text().partition("<main")[2])
    assert "right" not in text.partition("Hosts that are late")[2].partition("Devices")[0]
    assert "left" in text
    assert not re.search(r"(?:src|href)=\"https?:", page.read_text())
    assert "already exists" in fleet(folder, "--html", page).stderr
    assert fleet(folder, "--metrics", metrics).returncode == 0  # its own is replaced
    metrics.write_text("of another")
    assert fleet(folder, "--metrics", metrics).returncode == 1
    assert metrics.read_text() == "of another"


def test_if_nothing_can_be_read_that_is_said(folder: Path, fleet: Fleet) -> None:
    ran = fleet(folder / "broken")
    assert ran.returncode == 1
    assert "could not be read" in ran.stdout
    assert ran.stderr.startswith("note: ")

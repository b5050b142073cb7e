"""The page of experiments, and its pictures and results as files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dashboards.pages.experiments import build_experiment_section, find_experiments
from dashboards.runs import RunIndex
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.lab.experiments.results import RESULTS_FILE, Results, read_results
from tests.dashboards.running import Running, running
from tests.lab.experiments.rows import CONDITIONS, MS, trial
from tests.synthetic import write_recording


def write_breakdown(folder: Path) -> Path:
    """Three repetitions of two settings, one trial with its recording, and one that failed."""
    results = Results(folder)
    for repetition in range(3):
        for strategy, step_ns in (("bucketed", 100 * MS), ("overlapped", 80 * MS)):
            blocks = dict.fromkeys((f"{name}_ns" for name in BLOCKS), 0.0) | {"backward_ns": step_ns}
            results.add(trial(repetition, strategy=strategy), CONDITIONS, {**blocks, "step_ns": step_ns})
    results.add(trial(0, strategy="sharded"), CONDITIONS, {}, "<b>needs</b> an optimizer")
    write_recording(results.recording(trial(0, strategy="bucketed")), ranks=2, steps=5)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments") / "lab"
    write_breakdown(folder / "breakdown")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(RunIndex([folder])) as server:
        yield server


def test_a_section_says_what_the_paper_found_and_what_holds_here(folder: Path):
    (found,) = find_experiments([folder])
    section = build_experiment_section(found, {})
    assert section.figure == "Figure 6"
    assert section.paper.startswith("On 32 GPUs")
    assert "20.0 %" in section.here[0]
    assert section.left_out == ("convnet, 2 ranks, sharded: <b>needs</b> an optimizer",)
    for condition in ("2 ranks on 2 hosts", "114 MB/s", "100 µs", "torch 2.9"):
        assert condition in section.conditions
    assert [row.outcome for row in section.trials][-1] == "failed: <b>needs</b> an optimizer"


def test_the_page_leads_to_the_recording_of_a_trial(server: Running, folder: Path):
    server.get("/")  # which looks for runs
    page = server.get("/experiments").text
    name = trial(0, strategy="bucketed").folder_name
    assert f'href="runs/breakdown/recordings/{name}/-/"' in page
    assert server.get(f"/runs/breakdown/recordings/{name}/-/").status == 200


def test_what_a_failure_says_is_text_and_no_markup(server: Running):
    page = server.get("/experiments").text
    assert "&lt;b&gt;needs&lt;/b&gt; an optimizer" in page
    assert "<b>needs</b>" not in page


def test_all_pages_lead_to_experiments_if_there_are_some(server: Running, tmp_path: Path):
    assert 'href="experiments"' in server.get("/").text
    assert 'href="experiments"' in server.get("/compare").text
    with running(RunIndex([tmp_path])) as without:
        assert "Experiments" not in without.get("/").text
        assert "overlapscope lab run breakdown" in without.get("/experiments").text


def test_pictures_and_results_can_be_saved(server: Running, folder: Path):
    assert "<svg" in server.get("/experiments/breakdown.svg").text
    assert server.get("/experiments/breakdown.png").data.startswith(b"\x89PNG")
    own = read_results(folder / "breakdown")
    saved = pd.read_parquet(io.BytesIO(server.get("/experiments/breakdown.parquet").data))
    pd.testing.assert_frame_equal(saved, own)
    assert len(pd.read_csv(io.BytesIO(server.get("/experiments/breakdown.csv").data))) == len(own)


@pytest.mark.parametrize("name", ["other", "..%2Fbreakdown", "%2Fetc%2Fpasswd"])
def test_there_is_nothing_at_other_names(server: Running, name: str):
    assert server.get(f"/experiments/{name}.csv").status == 404


def test_damaged_results_are_said_and_the_others_shown(tmp_path: Path):
    write_breakdown(tmp_path / "breakdown")
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling" / RESULTS_FILE).write_bytes(b"damaged")
    with running(RunIndex([tmp_path])) as server:
        page = server.get("/experiments").text
        assert "can&#39;t be read" in page
        assert "20.0 %" in page.replace("\N{NO-BREAK SPACE}", " ")
        assert server.get("/experiments/scaling.svg").status == 404


def test_two_folders_of_one_name_are_told_apart(tmp_path: Path):
    for name in ("one", "two"):
        Results(tmp_path / name / "breakdown").add(trial(0), replace(CONDITIONS), {"step_ns": 1.0})
    found = find_experiments([tmp_path / "one", tmp_path / "two"])
    assert [each.name for each in found] == ["one/breakdown", "two/breakdown"]
    with running(RunIndex([tmp_path / "one", tmp_path / "two"])) as server:
        assert server.get("/experiments/two%2Fbreakdown.parquet").status == 200

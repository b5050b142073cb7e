"""A recording in a notebook: the figures that commands print, as tables, and drawings."""

from __future__ import annotations

import json
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

import pandas as pd
import pytest

import overlapscope as ov
from dashboards.notebook import OpenedRecording
from dashboards.report.figures import load_bokeh_js
from overlapscope.cli.main import main
from overlapscope.errors import OverlapScopeError
from tests.dashboards.test_order_page import faulty
from tests.synthetic import write_recording, write_straggling_recording

EXAMPLE = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_straggling_recording(
        tmp_path / "traces", late_us=lambda rank, _: 3_000 * (rank == 1), ranks=4, steps=40
    )


@pytest.fixture
def run(folder: Path) -> OpenedRecording:
    return ov.open(folder)


def said(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    main([command, str(folder), "--json"])
    content: dict[str, object] = json.loads(capsys.readouterr().out)
    return content


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "pandas", "numpy", "bokeh", "panel", "dashboards")
    program = f"import sys, overlapscope; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_the_breakdown_is_that_of_the_summary_and_adds_up(
    run: OpenedRecording, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, breakdown = said("summary", folder, capsys), run.breakdown()
    assert breakdown.sentence == summary["sentence"]
    blocks = breakdown.table[breakdown.table["part_of"] == ""]
    assert blocks["mean_ns"].sum() == pytest.approx(summary["breakdown"]["step_ns"]["value"])  # type: ignore[index]
    assert blocks["share"].sum() == pytest.approx(1)
    parts = breakdown.table[breakdown.table["part_of"] == "exposed communication"]
    assert parts["mean_ns"].sum() == pytest.approx(blocks.set_index("block")["mean_ns"]["exposed communication"])
    assert len(run.steps) == len(summary["steps"])  # type: ignore[arg-type]
    assert run.steps["is_counted"].tolist() == [row["is_counted"] for row in summary["steps"]]  # type: ignore[attr-defined]
    assert len(run.collectives) == 4 * 40 * 3
    assert run.ranks["rank"].tolist() == [0, 1, 2, 3]


def test_findings_and_sizes_are_those_of_the_commands(
    run: OpenedRecording, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = said("stragglers", folder, capsys)["findings"]  # type: ignore[misc]
    row = run.stragglers().table.iloc[0]
    assert list(row["ranks"]) == finding["ranks"] == [1]
    assert row["saving_ns"] == pytest.approx(finding["saving"]["step_ns"]["value"])
    assert row["sentence"] == finding["sentence"]
    sizes = said("recommend", folder, capsys)["sizes"]
    table = run.recommend().table
    assert table["step_ns"].tolist()[: len(sizes)] == pytest.approx([size["step_ns"]["value"] for size in sizes])  # type: ignore[attr-defined]
    assert (table["step_low_ns"] <= table["step_high_ns"]).all()
    assert table["is_best"].sum() >= 1


def test_answers_have_their_sentence_as_text_and_as_markup(run: OpenedRecording) -> None:
    for answer in (run.breakdown(), run.stragglers(), run.recommend()):
        assert isinstance(answer.table, pd.DataFrame)
        assert repr(answer).startswith(answer.sentence)
        assert "<table" in answer._repr_html_()


@pytest.mark.parametrize("name", ["overview", "timeline", "straggler_map", "buckets", "order"])
def test_every_drawing_is_a_page_of_its_own_in_a_frame(run: OpenedRecording, name: str) -> None:
    drawing = getattr(run, name)()
    assert drawing.html.count('class="chapter"') == 1
    assert "<header>" not in drawing.html
    assert "https://" not in drawing.html.replace(load_bokeh_js(), "")
    frame = drawing._repr_html_()
    assert unescape(frame.partition('srcdoc="')[2].removesuffix('"></iframe>')) == drawing.html
    assert repr(drawing).endswith("a notebook shows it>")


def test_some_steps_can_be_opened_alone(folder: Path) -> None:
    some = ov.open(folder, steps=(10, 20))
    assert some.steps["step"].unique().tolist() == [*range(10, 20)]
    assert repr(some).startswith(f"{folder} (steps 10 to 19): ")


def test_without_steps_there_is_an_order_and_a_reason(tmp_path: Path) -> None:
    run = ov.open(faulty(tmp_path / "traces"))
    verdict = run.diagnose()
    assert verdict is not None
    assert verdict.kind == "missing collective"
    assert escape(verdict.sentence, quote=False) in run.order().html
    with pytest.raises(OverlapScopeError, match="has no steps to be shown"):
        run.timeline()
    with pytest.raises(OverlapScopeError, match="it has no steps"):
        run.recommend()


def test_what_can_not_be_compared_is_an_error_with_a_reason(tmp_path: Path) -> None:
    run = ov.open(write_recording(tmp_path / "traces", ranks=1))
    with pytest.raises(OverlapScopeError, match="this recording has only one rank"):
        run.stragglers()


def test_every_cell_of_the_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a recording is in the folder ``traces``."""
    monkeypatch.chdir(folder.parent)
    cells = json.loads(EXAMPLE.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    names: dict[str, object] = {}
    for cell in code:
        exec(cell, names)


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlapScopeError, match="empty; record a run"):
        ov.open(tmp_path)

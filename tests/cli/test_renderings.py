"""All renderings of one recording carry the same numbers."""

from __future__ import annotations

import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from overlapscope import pages
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.compare.comparison import compare
from overlapscope.compare.side import ComparisonSide, StepChoice
from overlapscope.diagnosis.attempts import read_attempt
from overlapscope.errors import Problem
from overlapscope.interval import Interval
from overlapscope.report.buckets import build_buckets_report
from overlapscope.report.compare import build_comparison_report
from overlapscope.report.diagnosis import build_diagnosis_report
from overlapscope.report.problems import merge_problems
from overlapscope.report.render_frames import render_frame
from overlapscope.report.render_json import render_json
from overlapscope.report.render_markdown import escape_markdown, render_markdown
from overlapscope.report.render_text import print_report
from overlapscope.report.report import INDENT, Report, Table
from overlapscope.report.stragglers import build_stragglers_report
from overlapscope.report.summary import build_summary_report
from overlapscope.trace.recording import read_trace
from tests.ordered import steps as steps_of
from tests.ordered import write_order
from tests.synthetic import write_straggling_recording

STEPS = 24
HALVES = StepChoice(end=STEPS // 2), StepChoice(first=STEPS // 2)
PARTS = ("step",)


def content_of(report: Report) -> Any:
    """Check that text, Markdown and frames have the same sentences and cells, and return the JSON."""
    text, markdown = StringIO(), render_markdown(report, "A run")
    with redirect_stdout(text):
        print_report(report)
    words = " ".join(text.getvalue().split())
    for section in report.sections:
        for sentence in (section.headline, *section.notes, *section.actions):
            assert " ".join(sentence.split()) in words
            assert escape_markdown(sentence) in markdown
        assert " ".join(section.preformatted.split()) in words
        assert section.preformatted.strip("\n") in markdown
        for number in section.numbers:
            assert f"**{escape_markdown(number.text)}**" in markdown
        for table in section.tables:
            rows = table.format_rows()
            for row in rows[: table.shown]:
                assert " ".join(" ".join(row).replace(INDENT, "").split()) in words
            for row in rows[:16]:
                cells = (escape_markdown(cell.replace(INDENT, "↳ ")) for cell in row)
                assert f"| {' | '.join(cells)} |" in markdown
        for table in (*section.tables, *(figure.table for figure in section.figures)):
            check_frame(table)
    return json.loads(render_json(report))


def check_frame(table: Table) -> None:
    """Check that a frame has the raw values of a table, and the bounds of intervals in columns of their own."""
    frame = render_frame(table)
    assert len(frame) == len(table.rows)
    for row, cells in zip(table.rows, frame.to_dict("records"), strict=True):
        for column in table.columns:
            value, name = row.get(column.key), column.key.removesuffix("_ns")
            unit = "_ns" if column.unit[:2] in ("ns", "ms") else ""
            if isinstance(value, Interval):
                bounds = [cells[f"{name}{end}{unit}"] for end in ("", "_low", "_high")]
                assert bounds == pytest.approx([value.value, value.low, value.high], nan_ok=True)
            elif value is not None and not pd.isna(value):
                assert cells[f"{name}{unit}"] == value


def cells_of(report: Report, name: str, key: str) -> dict[Any, Any]:
    """Return the raw values of one column of a table, by its first one."""
    (section,) = report.sections
    table = section.table(name)
    values = {row[table.columns[0].key]: row.get(key) for row in table.rows}
    return {label: value.value if isinstance(value, Interval) else value for label, value in values.items()}


@settings(max_examples=2)
@given(ranks=st.integers(2, 4), late_us=st.integers(0, 5_000), late_rank=st.integers(0, 1), drift_us=st.integers(0, 50))
def test_renderings_of_steps_have_the_same_numbers(ranks: int, late_us: int, late_rank: int, drift_us: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        late = lambda rank, step: late_us * (rank == late_rank) + drift_us * (step % 7)  # noqa: E731
        write_straggling_recording(Path(folder), late_us=late, ranks=ranks, steps=STEPS)
        trace = read_trace(folder)
    analysis = Analysis(trace)

    summary = build_summary_report(analysis)
    breakdown = content_of(summary)["breakdown"]
    means = cells_of(summary, "breakdown", "mean")
    assert means["step"] == breakdown["step_ns"]["value"]
    for name, block in breakdown["blocks_ns"].items():
        assert means.get(BLOCK_LABELS[name], 0) == block["value"]

    stragglers = build_stragglers_report(analysis)
    content = content_of(stragglers)
    assert cells_of(stragglers, "by_rank", "saving_ns") == {row["rank"]: row["saving_ns"] for row in content["by_rank"]}
    assert cells_of(stragglers, "what_if", "step")["as recorded"] == content["step_ns"]["value"]

    buckets = build_buckets_report(trace, advise(analysis))
    content = content_of(buckets)
    predicted = {each["step_ns"]["value"] for each in (*content["sizes"], content["default"], content["now"])}
    assert set(cells_of(buckets, "sizes", "step").values()) == predicted

    found = compare(*(ComparisonSide.of(analysis, half) for half in HALVES))
    comparison = build_comparison_report(found, PARTS, 0.0)
    content = content_of(comparison)
    differences = cells_of(comparison, "breakdown", "difference")
    assert differences["step"] == content["parts"]["step"]["mean"]["difference_ns"]["value"]
    *blocks, step = comparison.sections[0].figures[0].table.rows
    assert {row["label"]: row["difference"].value for row in (*blocks, step)}.items() <= differences.items()
    assert sum(row["difference"].value for row in blocks) == pytest.approx(differences["step"], abs=1e-3)
    page = pages.render_comparison(found, PARTS, 0.0).replace("\N{NO-BREAK SPACE}", " ")
    for table in comparison.sections[0].tables:
        for cell in (cell for row in table.format_rows() for cell in row):
            assert str(escape(cell.removeprefix(INDENT))) in page


@settings(max_examples=10)
@given(counts=st.lists(st.integers(0, 4), min_size=2, max_size=3))
def test_renderings_of_a_diagnosis_have_the_same_sentences(counts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_order(Path(folder), {rank: steps_of(count) for rank, count in enumerate(counts)}, close=False)
        attempt = read_attempt(Path(folder))
    report = build_diagnosis_report(attempt, ())
    content = content_of(report)
    assert report.sections[0].headline == content["verdict"]["sentence"]
    for sentence in (*content["verdict"]["evidence"], *content["verdict"]["advice"]):
        assert sentence in report.sections[0].preformatted


def test_what_is_so_of_many_ranks_is_one_line() -> None:
    def note(text: str) -> Problem:
        return Problem("note", text)

    full = [
        note(f"t/rank_{rank}/events.bin: at its size limit; {rank + 999:,} records overwritten") for rank in (0, 1, 2)
    ]
    damaged = [Problem("error", f"t/rank_1/plans.jsonl: line {line} is damaged") for line in (3, 9)]
    other = [note("t: recording was off in steps 2-4"), note("u/rank_0/events.bin: not closed")]
    merged = merge_problems([full[0], other[0], *damaged, full[1], other[1], full[2], full[0]])
    assert merged == [
        note("t: ranks 0-2: events.bin: at its size limit; 999 to 1,001 records overwritten"),
        other[0],
        *damaged,  # two lines of one rank are no range
        other[1],
    ]

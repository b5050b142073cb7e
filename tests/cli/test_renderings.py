"""All renderings of one recording carry the same numbers."""

from __future__ import annotations

import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapscope.analysis import Analysis
from overlapscope.report.render_frames import render_frame
from overlapscope.report.render_json import render_json
from overlapscope.report.render_markdown import escape_markdown, render_markdown
from overlapscope.report.render_text import print_report
from overlapscope.report.report import INDENT
from overlapscope.report.stragglers import build_stragglers_report
from overlapscope.report.summary import build_summary_report
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_straggling_recording


@settings(max_examples=6)
@given(ranks=st.integers(2, 4), steps=st.integers(6, 14), late_us=st.integers(0, 5_000), late_rank=st.integers(0, 1))
def test_all_renderings_have_the_same_numbers(ranks: int, steps: int, late_us: int, late_rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_straggling_recording(
            Path(folder), late_us=lambda rank, step: late_us * (rank == late_rank) + step, ranks=ranks, steps=steps
        )
        analysis = Analysis(read_trace(folder))
        reports = build_summary_report(analysis), build_stragglers_report(analysis)
        for report in reports:
            text, markdown = StringIO(), render_markdown(report, "A run")
            with redirect_stdout(text):
                print_report(report)
            words = " ".join(text.getvalue().split())
            for section in report.sections:
                assert " ".join(section.headline.split()) in words
                assert escape_markdown(section.headline) in markdown
                for table in section.tables:
                    frame = render_frame(table)
                    assert len(frame) == len(table.rows)
                    for row in table.format_rows():
                        assert " ".join(" ".join(row).replace(INDENT, "").split()) in words
                        if row in table.format_rows()[:16]:
                            cells = (escape_markdown(cell.replace(INDENT, "↳ ")) for cell in row)
                            assert f"| {' | '.join(cells)} |" in markdown
        content = json.loads(render_json(reports[0]))
        blocks = render_frame(reports[0].sections[0].tables[0]).set_index("label")
        assert blocks.loc["step", "mean"] == pytest.approx(content["breakdown"]["step_ns"]["value"])
        assert blocks.loc["forward", "mean"] == pytest.approx(content["breakdown"]["blocks_ns"]["forward"]["value"])

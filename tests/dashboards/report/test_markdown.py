"""The report as Markdown: the same figures, and text that no renderer takes for markup."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dashboards.recording import RecordingCache
from dashboards.report.markdown import render_markdown_report
from overlapscope.breakdown.text import describe_summary
from overlapscope.report.render_markdown import escape_markdown, render_markdown_table
from overlapscope.report.report import Column, Table
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import RUN_FILE, rank_folder
from tests.dashboards.report.test_html import NOW, RECORDINGS
from tests.dashboards.test_order_page import faulty
from tests.synthetic import write_recording

RENDER = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render
MARKS = st.text(st.sampled_from("ab1 \\`*_{}[]()<>#|~$@&;!+-.\n/:\t"), max_size=30)


def read(markdown: str) -> str:
    """What a reader sees of rendered Markdown that has no markup but code."""
    seen = re.sub(r"</?(p|code|h1|strong|em)>", "", RENDER(markdown))
    assert "<" not in seen
    return " ".join(unescape(seen).replace("\N{ZERO WIDTH SPACE}", "").split())


@given(text=MARKS)
def test_any_text_is_shown_as_it_is(text: str) -> None:
    shown = " ".join(text.split())
    # In front of it stands what it is about, as in all lines of a report.
    said, meant = (each.replace("`", "").split() for each in (read(f"x {escape_markdown(text)}"), f"x {shown}"))
    assert said == meant


@given(cells=st.lists(MARKS, min_size=2, max_size=4))
def test_any_text_stays_in_its_cell(cells: list[str]) -> None:
    columns, row = [Column(str(at), "a", "text") for at in range(len(cells))], dict(zip("0123", cells, strict=False))
    table = Table(name="any", title="Any", columns=tuple(columns), rows=(row,))
    page = RENDER("\n".join(render_markdown_table(table)))
    found = [unescape(re.sub(r"</?code>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page)]
    assert [cell.replace("\N{ZERO WIDTH SPACE}", "").replace("`", "").strip() for cell in found] == [
        " ".join(cell.split()).replace("`", "").strip() for cell in cells
    ]


def test_github_takes_nothing_for_a_person_or_an_issue() -> None:
    assert re.search(r"[@#]\w", escape_markdown("collective #53 of @someone")) is None


def test_it_has_the_figures_of_the_pages_in_a_table_that_renders(tmp_path: Path) -> None:
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=30)).latest()
    text = render_markdown_report(snapshot, NOW)
    page = RENDER(text)
    assert f"<strong>{describe_summary(snapshot.summary)}</strong>" in page
    for number in snapshot.breakdown_section.numbers:
        assert f"<li>{number.label}: <strong>{number.text}</strong>" in page
    assert page.count("<table>") == 9, "blocks, changes, ranks, four on stragglers, two on bucket sizes"
    assert '<td>backward</td>\n<td style="text-align:right">3.88</td>' in page
    assert str(tmp_path) not in text


@pytest.mark.parametrize("kind", RECORDINGS)
def test_every_recording_has_one(kind: str, tmp_path: Path) -> None:
    text = render_markdown_report(RecordingCache(RECORDINGS[kind](tmp_path / "traces")).latest(), NOW)
    assert "## Order" in text
    assert text.endswith("\n")
    assert len(text) < 20_000, "an issue takes 65,536 characters"


def test_a_fault_comes_first_with_what_to_try(tmp_path: Path) -> None:
    text = render_markdown_report(RecordingCache(faulty(tmp_path / "traces")).latest(), NOW)
    assert text.index("## Order") < text.index("train.py:120") < text.index("What to try:")


def test_names_in_a_recording_are_text(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "traces")
    for rank in range(2):
        run = rank_folder(folder, rank) / RUN_FILE
        content = json.loads(run.read_text())
        content["models"][0]["class"] = "<img src=x>|**GPT**"
        write_json(run, content)
    page = RENDER(render_markdown_report(RecordingCache(folder).latest(), NOW))
    assert "model: &lt;img src=x&gt;|**GPT**" in page

"""What pages say, read from the documents that the server would send."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE

from dashboards.app import ROUTES, open_page
from dashboards.glossary import _ALIASES, explain_term
from dashboards.pages import documents, overview, shell, timeline
from dashboards.plots.timeline import compute_step_view
from dashboards.recording import RecordingCache, Snapshot
from dashboards.runs import RunIndex
from overlapscope.breakdown.text import describe_summary
from overlapscope.cli.main import main
from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.recording import read_trace
from overlapscope.trace.recording_modes import OFF, BegunMode
from overlapscope.trace.schema import MODES_FILE, Kind, pack_body
from tests.simulated_job import Job
from tests.synthetic import make_rank, write_recording


def html(document: Document) -> str:
    if not document.roots:
        return str(document.template.render(roots=[], plot_script="", **document.template_variables))
    return str(file_html(document, INLINE, template=document.template, template_variables=document.template_variables))


def words(document: Document) -> str:
    return html(document).partition("<body")[2].replace("\N{NO-BREAK SPACE}", " ")


def test_the_overview_shows_the_verdict_and_the_means(snapshot):
    document = Document()
    overview.build(document, snapshot, {})
    page = words(document)
    assert describe_summary(snapshot.summary) in page
    assert [number.text for number in snapshot.breakdown_section.numbers] == ["10.0 ms", "7.38 ms", "1.30 ms", "65 %"]
    for number in snapshot.breakdown_section.numbers:
        assert f"{number.text}</dd>" in page
    assert "GPT" in page
    assert "gloo" in page


def test_the_table_of_ranks_has_a_row_for_each(snapshot):
    table = overview.build_ranks_table(snapshot.trace, snapshot.breakdown_section)
    assert [row["rank"] for row in table.rows] == [0, 1]
    assert table.format_rows()[0][3:] == ("10.00", "7.38", "3.70", "2.40", "1.30", "0.65")
    assert [name for name, _, _ in overview.build_rank_bar(table.rows[0], 10_000_000)] == [
        *("data_wait", "forward", "inter_phase", "backward", "exposed", "bucket_copies", "optimizer")
    ]


@pytest.mark.parametrize("route", ["/", "/timeline", "/stragglers"])
def test_every_page_says_what_went_wrong(tmp_path, route):
    snapshot = Snapshot(Job(steps=12).run())
    verdict = Verdict(kind="stuck", sentence="Rank 1 waits in data.py:3 (load).", step=7)
    snapshot.diagnosis = Mock(
        verdict=verdict, is_incident=True, evidence=Evidence(expected_ranks=(), ranks={}, groups=())
    )
    said, other = Document(), Document()
    ROUTES[route](said, snapshot, {})
    assert verdict.sentence in words(said)
    snapshot.diagnosis = None
    ROUTES[route](other, snapshot, {})
    assert verdict.sentence not in words(other)


def test_a_fault_comes_before_the_overlap_and_recommendations_come_last():
    snapshot = Snapshot(Job(steps=12).run())
    sentence = "Rank 1 has been stuck in its data loader."
    snapshot.diagnosis = Mock(verdict=Verdict(kind="waits for data", sentence=sentence), is_incident=True)
    document = Document()
    overview.build(document, snapshot, {})
    page = words(document)
    told = (">Stuck in the data loader<", sentence, "is hidden", "<dl", "Recommended changes")
    places = [page.index(each) for each in told]
    assert places == sorted(places)
    assert "Waits for data" not in page
    assert "No straggler found" not in page


@pytest.mark.parametrize(("step", "goes_on"), [(10, True), (4, False)])
def test_the_timeline_opens_where_the_job_failed(step, goes_on):
    """Up to the end if training ended there, else at that step."""
    snapshot = Snapshot(Job(steps=12).run())
    verdict = Verdict(kind="stuck", sentence="Rank 1 waits.", step=step)
    whole = snapshot.lanes.timeline([0])
    begin, end = compute_step_view(whole, step)
    snapshot.diagnosis = Mock(
        verdict=verdict, is_incident=True, evidence=Evidence(expected_ranks=(), ranks={}, groups=())
    )
    document = Document()
    timeline.build(document, snapshot, {})
    shown = document.get_model_by_name("axis").x_range
    assert shown.start == begin
    assert shown.end > whole.length_ns if goes_on else shown.end == end


@pytest.mark.parametrize(("is_live", "last_step"), [(False, 11), (True, 10)])
def test_the_timeline_has_the_step_that_no_rank_finished_once_none_will(is_live, last_step):
    trace = Job(steps=12).run()
    snapshot = Snapshot(replace(trace, steps=trace.steps[trace.steps["step"] < 11].reset_index(drop=True)))
    snapshot.diagnosis, snapshot.is_live = None, is_live
    document = Document()
    timeline.build(document, snapshot, {"step": [b"11"]})
    assert document.template_variables["last_step"] == last_step
    assert ("Step 11, unfinished" in document.template_variables["breakdown"]) == (not is_live)


@pytest.mark.parametrize("route", ["/", "/timeline"])
def test_what_plots_refer_to_is_looked_up_once_for_all_of_a_page(snapshot, route, monkeypatch):
    document = Document()
    look = Mock(wraps=document.models.recompute)
    monkeypatch.setattr(document.models, "recompute", look)
    ROUTES[route](document, snapshot, {})
    assert len(document.roots) > 1
    look.assert_called_once_with()


def test_problems_of_the_recording_are_shown_errors_first(tmp_path):
    snapshot = RecordingCache(write_recording(tmp_path / "traces", ranks=2, world_size=4)).latest()
    document = Document()
    overview.build(document, snapshot, {})
    for problem in snapshot.trace.problems:
        assert problem.message in words(document)
    assert 'class="banner error"' in words(document)


def test_names_from_a_recording_are_text_and_never_markup(snapshot):
    trace = replace(snapshot.trace, run={"models": [{"class": "<script>alert(1)</script>"}]})
    document = Document()
    shell.render(document, "problem.html", title="t", trace=trace, headline="h", message="m", advice="")
    assert "<script>alert" not in words(document)


MARKUP = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def hostile(snapshot: Snapshot) -> Snapshot:
    """A recording whose hosts, devices and parameters have names that are markup."""
    trace = snapshot.trace
    named = replace(
        trace,
        run=trace.run | {"backend": MARKUP, "models": [{"model": 0, "class": MARKUP}]},
        ranks=trace.ranks.assign(host=MARKUP, device=MARKUP),
        plans=trace.plans.assign(name=MARKUP),
    )
    return Snapshot(named)


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_every_page_shows_names_as_text_and_loads_nothing_from_elsewhere(hostile, route):
    document = Document()
    ROUTES[route](document, hostile, {})
    page = html(document)
    assert "<img src=x" not in page
    head = page.partition("<body")[0]
    assert "http://" not in head.replace("http://www.w3.org", "")
    assert "https://" not in head


def test_a_run_that_goes_on_is_read_again_and_one_that_does_not_is_not(tmp_path):
    folder = write_recording(tmp_path / "traces", steps=2, close=False)
    recording = RecordingCache(folder)
    first = recording.latest()
    assert recording.latest() is first
    write_recording(tmp_path / "more", ranks=1, steps=4)
    (folder / "rank_1" / "events.log").write_bytes((tmp_path / "more" / "rank_0" / "events.log").read_bytes())
    assert len(recording.latest().trace.steps) > len(first.trace.steps)


def test_the_verdict_on_the_page_is_that_of_the_summary(tmp_path, capsys):
    folder = write_recording(tmp_path / "traces", steps=7)
    assert main(["summary", "--json", str(folder)]) == 0
    verdict = json.loads(capsys.readouterr().out)["sentence"]
    document = Document()
    overview.build(document, RecordingCache(folder).latest(), {})
    assert verdict in words(document)


def test_a_folder_that_turned_bad_gives_the_problem_page(tmp_path, monkeypatch):
    document = Document()
    monkeypatch.setattr("dashboards.app.curdoc", lambda: document)
    open_page(overview.build, RecordingCache(tmp_path))
    assert document.title.startswith("Nothing to show")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"detail": "buckets"}, "gradients: only with record --detail parameters"),
        ({"detail": "parameters"}, "gradients: none recorded"),
        ({"detail": "buckets", "imported": {"from": "torch.profiler"}}, "gradients: not in the imported traces"),
    ],
)
def test_empty_lanes_of_gradients_say_why(snapshot, run, said):
    document = Document()
    timeline.build(document, snapshot, {})
    assert "gradient ready" in words(document)
    trace = replace(snapshot.trace, gradients=snapshot.trace.gradients.iloc[:0], run=run)
    document = Document()
    timeline.build(document, Snapshot(trace), {})
    assert said in words(document)
    assert "gradient ready" not in words(document)


def test_a_launch_without_end_is_drawn_to_the_end_and_marked(tmp_path):
    folder: Path = tmp_path / "traces"
    log = make_rank(folder, 0, world_size=1)
    begin = 1_000_000_000
    log.append(pack_body(Kind.GRADIENT_READY, index=0), 0, begin, begin)
    log.append(pack_body(Kind.LAUNCH, op="all_reduce", index=0, dtype="float32", elements=8), 0, begin + 10, begin + 10)
    log.append(pack_body(Kind.GRADIENT_READY, index=1), 0, begin + 1000, begin + 1000)
    log.close()
    snapshot = RecordingCache(folder).latest()
    plot = timeline.TimelinePlot(snapshot, snapshot.lanes.timeline([0]))
    assert plot.unfinished.data["left"] == [10]
    assert plot.unfinished.data["right"] == [1000]
    plot.pointed.data = {"id": [1], "lane": [3], "row": [0], "round": [-1]}
    assert "never seen: launched but not completed" in plot.tooltip.data["value"]


def test_the_glossary_explains_the_words_of_the_documents_without_leading_out(tmp_path):
    document = Document()
    documents.build(document, RunIndex([tmp_path]), "glossary")
    page = words(document)
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    for term in re.findall(r"\*\*([^*]+)\*\*", text):
        assert f"<strong>{term}</strong>" in page
    assert ".md" not in page


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_documents_lead_to_others_that_are_served_and_nowhere_else(name):
    page = documents.render_document(name)
    links = re.findall(r'href="([^"]*)"', page)
    assert set(links) <= set(documents.DOCUMENTS)
    assert "<img" not in page
    assert "<h1>" in page


def test_words_of_pages_are_explained_as_in_the_glossary():
    assert explain_term("Exposed communication") == explain_term("exposed")
    assert "does nothing else" in explain_term("exposed")
    assert explain_term("overlap ratio").startswith("Overlap ratio")
    assert explain_term("no such word") == ""
    assert all(explain_term(word) for word in _ALIASES)


def test_of_one_step_there_is_no_empty_chart(tmp_path):
    for steps, charts in ((1, 0), (2, 3)):
        document = Document()
        overview.build(document, Snapshot(read_trace(write_recording(tmp_path / str(steps), steps=steps))), {})
        assert len(document.roots) == words(document).count('class="trend"') == charts


def test_what_is_normal_while_a_job_runs_is_no_note(tmp_path, monkeypatch):
    trace = read_trace(write_recording(tmp_path, steps=2, close=False))
    assert len(trace.problems) == 2
    assert all("not closed" in problem.message for problem in trace.problems)
    for is_live, notes in ((False, 1), (True, 0)):
        monkeypatch.setattr(shell, "is_running", lambda _, is_live=is_live: is_live)
        assert len(shell.build_shell_context("Overview", trace)["problems"]) == notes


def test_the_strip_of_all_steps_says_where_recording_was_off(tmp_path):
    starts_ns = read_trace(write_recording(tmp_path, steps=5)).steps.groupby("step")["start_ns"].min()
    for rank in (0, 1):
        modes = [
            BegunMode(step=step, agreed_step=step, every=every, detail="buckets", time_ns=int(starts_ns[step]))
            for step, every in ((1, OFF), (3, 1))
        ]
        (tmp_path / f"rank_{rank}" / MODES_FILE).write_text("".join(mode.to_json() for mode in modes))
    document = Document()
    timeline.build(document, Snapshot(read_trace(tmp_path)), {})
    assert re.search(r'class="off"[^>]* title="recording was off in steps 1-2"', words(document))

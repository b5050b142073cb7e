"""The stragglers page, driven as the browser drives it: by writing into its sources and reading them."""

from __future__ import annotations

import html

import numpy as np
import pytest
from bokeh.document import Document

from dashboards.pages import overview, stragglers
from dashboards.plots.heatmap import HeatmapPlot
from dashboards.recording import RecordingCache, Snapshot
from dashboards.theme import LATENESS_SHADES
from overlapscope.breakdown.text import describe_summary
from overlapscope.report.report import Section
from overlapscope.report.stragglers import build_stragglers_section, tabulate_findings
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.stragglers.text import describe_delay, describe_headline, describe_verdict
from overlapscope.trace.recording import Trace
from tests.dashboards.test_pages import words
from tests.simulated_job import BUCKET_BYTES, Job
from tests.synthetic import write_straggling_recording


def late_us(rank: int, step: int) -> int:
    """Rank 2 is 3 ms late in every step, and rank 5 now and then."""
    return 3_000 if rank == 2 else 1_000 if rank == 5 and step % 7 == 3 else 20 * ((rank + step) % 3)


@pytest.fixture(scope="module")
def straggling(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Eight ranks on two hosts, 40 steps."""
    folder = tmp_path_factory.mktemp("straggling") / "traces"
    return RecordingCache(write_straggling_recording(folder, late_us=late_us, ranks=8, steps=40)).latest()


@pytest.fixture
def plot(straggling: Snapshot) -> HeatmapPlot:
    assert straggling.heatmap is not None
    return HeatmapPlot(straggling.heatmap)


def found_in(snapshot: Snapshot) -> Stragglers:
    assert snapshot.stragglers is not None
    return snapshot.stragglers


def section_of(snapshot: Snapshot) -> Section:
    return build_stragglers_section(found_in(snapshot))


def page_of(snapshot: Snapshot, **arguments: bytes) -> str:
    document = Document()
    stragglers.build(document, snapshot, {name: [value] for name, value in arguments.items()})
    return words(document)


def picture(plot: HeatmapPlot) -> np.ndarray:
    (image,) = plot.cells.data["image"]
    return image


def choose(plot: HeatmapPlot, figure: str, grouping: str, columns: int = 1000) -> None:
    plot.choice.data = {"figure": [figure], "grouping": [grouping], "columns": [columns]}


def point(plot: HeatmapPlot, row: int, column: int, number: int = 1) -> dict[str, str]:
    plot.pointed.data = {"id": [number], "row": [row], "column": [column]}
    return dict(zip(plot.response.data["label"], plot.response.data["value"], strict=True))


def test_the_verdict_names_the_late_rank_and_what_it_costs(straggling):
    page = page_of(straggling)
    assert describe_verdict(found_in(straggling)) in page
    assert "Means of 37 steps of 8 ranks. Findings compare 36 steps of 8 ranks on one clock, 4 steps left out" in page


def test_headlines_say_what_would_be_gained(straggling):
    step, rank, ideal, links = section_of(straggling).numbers
    assert step.text == "13.0 ms"
    assert rank.label == "Rank 2 at the median"
    assert ideal.text == "10.0 ms"
    assert ideal.note == "saves 2.98 ms, 23 %"
    assert links.note == "saves nothing"


def test_a_finding_leads_to_its_worst_step_on_the_timeline(straggling):
    table, finding = tabulate_findings(found_in(straggling)), found_in(straggling).findings[0]
    assert table.format_rows()[0][:3] == ("Rank 2", "Compute in every step", "2.98 ms")
    assert finding.saving_share == pytest.approx(2.83 / 13.0, abs=0.005)
    page = page_of(straggling)
    assert f"<small>{html.escape(finding.pattern.statistic)}</small>" in page
    assert f'href="timeline?step={finding.worst_step}&rank=2"' in page


def test_the_error_of_the_clocks_is_on_the_page(straggling, monkeypatch):
    monkeypatch.setattr(Trace, "clock_error_ns", property(lambda _: 2_500.0))
    page = page_of(Snapshot(straggling.trace))
    assert "on clocks within 2.50 µs" in page


def test_what_if_tables_begin_with_the_most_expensive(straggling):
    _, ranks, hosts, phases, buckets = section_of(straggling).tables
    assert ranks.format_rows()[0][:2] == ("rank 2", "node0")
    assert ranks.rows[0]["critical_share"] > 0.8, "the rest are transfers"
    assert hosts.format_rows()[0][:2] == ("node0", "4")
    assert phases.rows[0]["label"] == "forward"
    assert {row["bucket"] for row in buckets.rows} == {0, 1, 2}
    assert "16 MB" in {row[1] for row in buckets.format_rows()}


def test_long_tables_are_folded(tmp_path):
    folder = write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: rank, ranks=20, steps=6)
    snapshot = RecordingCache(folder).latest()
    page = page_of(snapshot)
    assert "and 4 more" in page
    assert page.count("<tbody hidden>") == 1
    document = Document()
    overview.build(document, snapshot, {})
    assert "and 4 more" in words(document)


def test_many_ranks_are_listed_by_how_much_their_compute_differs(tmp_path):
    folder = write_straggling_recording(
        tmp_path / "traces", late_us=lambda rank, _: 2_000 if rank == 18 else 0, ranks=20, steps=6
    )
    snapshot = RecordingCache(folder).latest()
    rows = overview.build_ranks_table(snapshot.trace, snapshot.breakdown_section).rows
    assert rows[0]["rank"] == 18
    assert len(rows) == 20


def test_the_overview_begins_with_the_straggler_and_says_below_if_there_is_none(straggling, snapshot):
    document = Document()
    overview.build(document, straggling, {})
    first = words(document).partition("<h1")[2].partition("</h1>")[0]
    assert describe_headline(found_in(straggling)) in first
    assert describe_summary(straggling.summary) in first
    assert describe_delay(found_in(straggling).findings[0]) in words(document)
    without = Document()
    overview.build(without, snapshot, {})
    first, _, below = words(without).partition("<h1")[2].partition("</h1>")
    assert "Stragglers" not in first
    assert describe_verdict(found_in(snapshot)) in below


def test_the_map_opens_with_lateness_and_the_late_rank_is_the_darkest(plot):
    assert plot.figure == "lateness"
    assert plot.grouping == "ranks"
    assert picture(plot).shape == (8, 36)
    assert picture(plot)[2].min() > 0.98 * LATENESS_SHADES
    assert picture(plot)[0].max() < LATENESS_SHADES / 8
    assert plot.names.data["name"][:2] == ["rank 0", "rank 1"]
    assert plot.cells.data["x"] == [3.5]
    assert plot.cells.data["dw"] == [36]


def test_the_one_that_all_wait_for_does_not_wait(plot):
    choose(plot, "wait", "ranks")
    assert np.all(picture(plot)[2] == 0)
    assert picture(plot)[[0, 1, 3]].min() > LATENESS_SHADES / 3
    assert plot.scale.data["low"] == ["0"]


def test_hosts_take_the_place_of_ranks(plot):
    choose(plot, "lateness", "hosts")
    assert picture(plot).shape == (2, 36)
    assert plot.names.data["name"] == ["node0", "node1"]
    assert plot.row_range.start == 1.5
    assert picture(plot)[0].min() > 0.98 * LATENESS_SHADES
    choose(plot, "compute", "ranks")
    assert picture(plot).shape == (8, 36)


def test_a_narrow_window_gets_fewer_columns_and_the_right_tooltips(plot):
    choose(plot, "lateness", "ranks", columns=20)
    assert picture(plot).shape == (8, 18)
    assert plot.cells.data["dw"] == [36]
    assert point(plot, row=5, column=3)["arrives latest"] == "rank 5 in step 10"
    assert plot.response.data["title"][0] == "Rank 5 · steps 10 to 11"


def test_pointing_at_a_cell_reads_all_three_figures(plot):
    lines = point(plot, row=2, column=6, number=3)
    assert plot.response.data["id"][0] == 3
    assert plot.response.data["title"][0] == "Rank 2 · step 10"
    assert lines["host"] == "node0"
    assert lines["compute"] == "10.4 ms"
    assert lines["arrives"] == "2.96 ms after the median rank"
    assert lines["waits"] == "for no later rank"
    assert (plot.response.data["rank"][0], plot.response.data["step"][0]) == (2, 10)


def test_pointing_at_a_host_names_its_rank_that_is_shown(plot):
    choose(plot, "lateness", "hosts")
    lines = point(plot, row=0, column=0)
    assert plot.response.data["title"][0] == "Ranks 0-3 · step 4"
    assert lines["arrives latest"] == "rank 2 in step 4"
    choose(plot, "wait", "hosts")
    assert point(plot, row=0, column=0, number=2)["waits longest"] != "rank 2 in step 4"


def test_the_address_chooses_the_figure_and_nonsense_is_ignored(straggling):
    assert 'value="wait" checked' in page_of(straggling, figure=b"wait", grouping=b"hosts")
    assert 'value="hosts" checked' in page_of(straggling, figure=b"wait", grouping=b"hosts")
    page = page_of(straggling, figure=b"\xff", grouping=b"planets")
    assert 'value="lateness" checked' in page
    assert 'value="ranks" checked' in page


def test_many_ranks_are_first_shown_by_host(straggling, monkeypatch):
    monkeypatch.setattr("dashboards.plots.heatmap.MAX_UNGROUPED_RANKS", 7)
    assert straggling.heatmap is not None
    assert HeatmapPlot(straggling.heatmap).grouping == "hosts"


def test_a_gap_in_the_steps_is_empty_and_says_why(tmp_path):
    folder = write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: 500 * rank, ranks=3, steps=12)
    trace = RecordingCache(folder).latest().trace
    collectives = trace.collectives
    lost = (collectives["rank"] == 1) & (collectives["step"] == 7)
    snapshot = Snapshot(Trace(**{**vars(trace), "collectives": collectives[~lost].reset_index(drop=True)}))
    assert snapshot.heatmap is not None
    plot = HeatmapPlot(snapshot.heatmap)
    assert np.flatnonzero(~picture(plot).any(axis=0)).tolist() == [3, 4]
    assert "left out" in point(plot, row=0, column=3)[""]
    assert plot.response.data["step"][0] == -1


def test_when_nobody_stands_out_the_page_says_so_and_what_jitter_costs(tmp_path):
    folder = write_straggling_recording(
        tmp_path / "traces", late_us=lambda rank, step: 10 * ((rank * 7 + step * 3) % 4), steps=20
    )
    snapshot = RecordingCache(folder).latest()
    assert found_in(snapshot).findings == ()
    page = page_of(snapshot)
    assert describe_verdict(found_in(snapshot)) in page
    assert 'class="nobody"' in page


def test_a_slow_link_is_named_by_its_ends_and_mending_it_is_among_the_big_numbers():
    job = Job(steps=40)
    job.transfer_ns[:] = [round(1.5 * size / 0.1) for size in BUCKET_BYTES]  # at 0.1 GB/s
    job.measure_links({0: 4e9, 1: 4e9, 2: 0.1e9, 3: 4e9})
    snapshot = Snapshot(job.run())
    snapshot.diagnosis = None
    page = page_of(snapshot)
    assert "Link 2 → 3" in page
    assert "Link 2 → 3 like the others" in page

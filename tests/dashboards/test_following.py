"""A page that follows gets the new steps in its plots, and the markup of both states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bokeh.document import Document
from bokeh.model import collect_models
from bokeh.models import Range1d

from dashboards.following import PageFollower
from dashboards.pages import order, overview, stragglers, timeline
from dashboards.pages.shell import PageBuilder
from dashboards.plots.browser_rpc import is_request
from dashboards.recording import RecordingCache, Snapshot
from dashboards.urls import RunUrl
from overlapscope.trace.recording import read_trace
from tests.ordered import steps, write_order
from tests.synthetic import write_recording


def state(folder: Path, steps: int, ranks: int = 2) -> Snapshot:
    snapshot = Snapshot(read_trace(write_recording(folder / f"{ranks} {steps}", ranks=ranks, steps=steps, close=False)))
    snapshot.is_live = True
    return snapshot


def opened(build: PageBuilder, states: list[Snapshot]) -> tuple[Document, PageFollower]:
    """A page of the first state, which later finds the last of them."""
    document = Document()
    document.template_variables["place"] = RunUrl(run="job", top_url="../../", has_table=True)
    build(document, states[0], {})
    return document, PageFollower(document, build, lambda _: states[-1])


def ask(follower: PageFollower, asked: int) -> tuple[str, str]:
    follower.wanted.data = {"id": [asked], "query": ["read=all"]}
    answer: Any = follower.response.data
    assert answer["id"] == [asked]
    return answer["before"][0], answer["after"][0]


@pytest.mark.parametrize("build", [overview.build, stragglers.build, timeline.build])
def test_a_page_gets_all_that_one_of_the_later_state_has_in_the_same_plots(tmp_path, build):
    states = [state(tmp_path, 30)]
    document, follower = opened(build, states)
    models = {model.id for model in document.models}
    before, after = ask(follower, 1)
    assert before == after != ""
    states.append(state(tmp_path, 60))
    before, after = ask(follower, 2)
    assert before != after
    assert 'data-root-id="' in after
    assert "../../docs/" in after  # the address of the page is kept
    assert {model.id for model in document.models} == models
    fresh, _ = opened(build, states[1:])
    assert drawn_in(document) == drawn_in(fresh)
    assert ask(follower, 3)[0] == after  # what is on the page now


def test_the_order_gets_later_collectives(tmp_path):
    def state_of(count: int) -> Snapshot:
        folder = tmp_path / str(count)
        write_order(folder, dict.fromkeys(range(3), steps(count)))
        return RecordingCache(folder).latest()

    states = [state_of(4), state_of(9)]
    document, follower = opened(order.build, states)
    ask(follower, 1)
    fresh, _ = opened(order.build, states[1:])
    assert drawn_in(document) == drawn_in(fresh)
    assert (
        source_in(document, "facts").data["latest"]
        > source_in(opened(order.build, states[:1])[0], "facts").data["latest"]
    )


def drawn_in(document: Document) -> list[Any]:
    """All that is drawn, apart from what is in view."""
    models = [each for each in collect_models(*document.roots) if not (isinstance(each, Range1d) and each.bounds)]
    own = [each for each in models if not is_request(each) and "before" not in getattr(each, "data", ())]
    return [
        (type(each), name, repr(value))
        for each in own
        for name, value in sorted(each.properties_with_values().items())
        if not each.lookup(name).has_ref
    ]


def source_in(document: Document, name: str) -> Any:
    return next(each for each in collect_models(*document.roots) if each.name == name)


def test_requests_are_answered_from_the_later_state_and_the_view_stays(tmp_path):
    states = [state(tmp_path, 30)]
    document, follower = opened(timeline.build, states)
    lanes = document.roots[0]
    view, answer = source_in(document, "view"), source_in(document, "answer")
    lanes.x_range.update(start=1e7, end=3e7)

    def look() -> tuple[Any, list[float]]:
        view.data = {
            "id": [len(answer.data["id"])],
            "from_ns": [0],
            "to_ns": [10**9],
            "width_px": [1000],
            "top_px": [0],
            "bottom_px": [600],
            "is_ideal": [False],
            "is_path": [False],
        }
        return answer.data["spans"], source_in(document, "extent").data["last_end_ns"]

    seen = [look()]
    for count in (60, 90):
        states.append(state(tmp_path, count))
        ask(follower, count)
        seen.append(look())
    assert seen[0] < seen[1] < seen[2]
    assert (lanes.x_range.start, lanes.x_range.end) == (1e7, 3e7)


def test_a_selected_span_stays_selected_in_the_later_state(tmp_path):
    states = [state(tmp_path, 30), state(tmp_path, 60)]
    document, follower = opened(timeline.build, states)
    selection = source_in(document, "selection")
    source_in(document, "sought").data = {"text": ["bucket 1"], "from_ns": [0]}
    before = dict(selection.data)
    follower.wanted.data = {"id": [1], "query": [f"span={before['name'][0]}"]}
    assert selection.data["from_ns"] == before["from_ns"]
    assert selection.data["name"] == before["name"]


def test_a_selected_area_stays_in_the_later_state_and_may_be_of_its_steps(tmp_path):
    states = [state(tmp_path, 30), state(tmp_path, 60)]
    document, follower = opened(timeline.build, states)
    asked, area = source_in(document, "asked_area"), source_in(document, "area")
    asked.data = {"id": [1], "from_ns": [10**8], "to_ns": [5 * 10**8], "ranks": ["1"]}
    first = dict(area.data)
    assert first["to_ns"] < [31 * 10**7], "until the end of the recording"
    follower.wanted.data = {"id": [1], "query": [f"area={10**8}-{first['to_ns'][0]}&area_ranks=1"]}
    assert (area.data["to_ns"], area.data["ranks"]) == (first["to_ns"], ["1"])
    asked.data = {"id": [2], "from_ns": [10**8], "to_ns": [5 * 10**8], "ranks": ["1"]}
    assert area.data["to_ns"] == [5 * 10**8]
    assert "400 ms on rank 1" in source_in(document, "panel").data["markup"][0]
    assert source_in(document, "frames").data["right"] == [5 * 10**8]


def test_the_steps_in_view_stay_unless_all_were_in_view(tmp_path):
    states = [state(tmp_path, 30), state(tmp_path, 60)]
    document, follower = opened(stragglers.build, states)
    steps = document.roots[0].x_range
    steps.update(start=10, end=20)
    ask(follower, 1)
    assert (steps.start, steps.end, steps.bounds[1]) == (10, 20, 59.5)
    document, follower = opened(stragglers.build, states)
    ask(follower, 1)
    assert document.roots[0].x_range.end == 59.5


def test_a_page_that_has_got_other_plots_or_cannot_be_read_is_opened_again(tmp_path):
    one = state(tmp_path, 2)
    document, follower = opened(overview.build, [one, state(tmp_path, 1)])
    assert ask(follower, 1) == ("", "")
    before = [each.data_source.data for each in document.roots[0].renderers]
    broken = PageFollower(document, overview.build, lambda _: 1 / 0)
    assert ask(broken, 1) == ("", "")
    assert [each.data_source.data for each in document.roots[0].renderers] == before

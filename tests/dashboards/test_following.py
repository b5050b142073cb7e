"""A page that follows gets the new steps in its plots, and the markup of both states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bokeh.document import Document

from dashboards.following import PageFollower
from dashboards.pages import overview, stragglers
from dashboards.pages.shell import PageBuilder
from dashboards.recording import Snapshot
from dashboards.urls import RunUrl
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording


def state(folder: Path, steps: int, ranks: int = 2) -> Snapshot:
    snapshot = Snapshot(read_trace(write_recording(folder / f"{ranks} {steps}", ranks=ranks, steps=steps, close=False)))
    snapshot.is_live = True
    return snapshot


def opened(build: PageBuilder, states: list[Snapshot]) -> tuple[Document, PageFollower]:
    """A page of the first state, which later finds the last of them."""
    document = Document()
    document.template_variables["place"] = RunUrl(run="job", top_url="../../", has_table=True)
    update = build(document, states[0], {})
    assert update is not None
    return document, PageFollower(document, build, update, lambda _: states[-1])


def ask(follower: PageFollower, asked: int) -> tuple[str, str]:
    follower.wanted.data = {"id": [asked], "query": ["read=all"]}
    answer: Any = follower.response.data
    assert answer["id"] == [asked]
    return answer["before"][0], answer["after"][0]


@pytest.mark.parametrize("build", [overview.build, stragglers.build])
def test_plots_get_the_new_steps_and_markup_differs_only_where_the_page_does(tmp_path, build):
    states = [state(tmp_path, 30)]
    document, follower = opened(build, states)
    models = {model.id for model in document.models}
    before, after = ask(follower, 1)
    assert before == after != ""
    states.append(state(tmp_path, 60))
    before, after = ask(follower, 2)
    assert "Means of 27 steps" in before
    assert "Means of 57 steps" in after
    assert 'data-root-id="' in after
    assert "../../docs/" in after  # the address of the page is kept
    assert {model.id for model in document.models} == models
    fresh = Document()
    fresh.template_variables["place"] = document.template_variables["place"]
    build(fresh, states[1], {})
    shown, expected = ([repr(source.data) for source in sources_of(each)] for each in (document, fresh))
    assert shown == expected
    assert ask(follower, 3)[0] == after  # what is on the page now


def sources_of(document: Document) -> list[Any]:
    """The sources of what is drawn."""
    return [each.data_source for root in document.roots for each in root.renderers]


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
    before = [source.data for source in sources_of(document)]
    broken = PageFollower(document, overview.build, lambda _: None, lambda _: 1 / 0)
    assert ask(broken, 1) == ("", "")
    assert [source.data for source in sources_of(document)] == before

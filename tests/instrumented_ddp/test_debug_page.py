"""The page for torch's debug server, shown by torch's own server."""

from __future__ import annotations

import html
import pickle
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from instrumented_ddp.debug_page import VerdictPage
from overlapscope.trace.environment import TRACE_VARIABLE
from tests.ordered import Collective, all_reduce, end, steps, write_order

frontend = pytest.importorskip("torch.distributed.debug._frontend", reason="this torch has no debug server")


@contextmanager
def shown(page: VerdictPage) -> Iterator[str]:
    server = frontend.FrontendServer(port=0, handlers=[page])
    try:
        yield f"http://localhost:{server._server.server_port}"
    finally:
        server._server.shutdown()
        server._server.server_close()


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A recording in which rank 1 launches a collective that no other rank does."""
    extra = Collective(signature=all_reduce("<script>alert(1)</script>"), step=2, batch=2, line=120)
    write_order(tmp_path, {0: steps(4), 1: [*steps(2), extra, *steps(2, first=2)], 2: steps(4)})
    end(tmp_path, range(3))
    return tmp_path


def test_the_page_has_the_verdict_as_text_and_a_link_in_the_head(faulty: Path) -> None:
    page = VerdictPage(faulty)
    with shown(page) as address:
        markup = read(f"{address}/overlapscope")
    assert '<a href="/overlapscope">' in markup
    assert "<script>" not in markup
    assert page.dump() in html.unescape(markup)
    assert "rank 1 launched" in page.dump()


def test_the_folder_is_that_of_the_recorded_job(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(faulty))
    assert VerdictPage().dump() == VerdictPage(faulty).dump()
    monkeypatch.delenv(TRACE_VARIABLE)
    assert "not recorded" in VerdictPage().dump()


def test_without_a_recording_the_page_says_why_and_the_server_goes_on(tmp_path: Path) -> None:
    with shown(VerdictPage(tmp_path / "none")) as address:
        for _ in range(2):
            assert "no such folder" in html.unescape(read(f"{address}/overlapscope"))


def test_the_page_goes_to_a_process_of_its_own_that_is_spawned(faulty: Path) -> None:
    assert pickle.loads(pickle.dumps(VerdictPage(faulty))).dump() == VerdictPage(faulty).dump()

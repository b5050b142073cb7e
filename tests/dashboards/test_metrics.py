"""What Prometheus gets when it scrapes the server."""

from __future__ import annotations

import time
from base64 import b64encode
from pathlib import Path

import pytest

from dashboards.access import Access
from dashboards.runs import RunIndex
from tests.dashboards.running import Running, running
from tests.interop.test_open_metrics import Values, values_in
from tests.synthetic import write_recording

TIME_LIMIT_S = 60
TOKEN = "a token that nobody guesses"


def scraped(server: Running, runs: int) -> Values:
    """What is answered as soon as all runs are judged."""
    until_s = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < until_s:
        answer = server.get("/metrics")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        values = values_in(answer.text)
        if len(values.get("overlapscope_step_seconds", ())) == runs:
            return values
        time.sleep(0.1)
    raise TimeoutError("the runs were not judged")


def test_each_run_has_its_figures(tmp_path: Path) -> None:
    for name, steps in (("night", 6), ("nested/day", 9)):
        write_recording(tmp_path / name, steps=steps)
    with running(RunIndex([tmp_path]), metrics=True) as server:
        values = scraped(server, 2)
    assert values["overlapscope_latest_step"] == {(("run", "night"),): 5, (("run", "nested/day"),): 8}
    assert set(values["overlapscope_live"].values()) == {0}
    assert set(values["overlapscope_step_seconds"].values()) == {0.01}


def test_a_run_that_is_served_alone_has_the_name_of_its_folder(tmp_path: Path) -> None:
    with running(RunIndex([write_recording(tmp_path / "alone")]), metrics=True) as server:
        assert scraped(server, 1)["overlapscope_ranks"] == {(("run", "alone"),): 2}


def test_nothing_is_answered_unasked(tmp_path: Path) -> None:
    with running(RunIndex([write_recording(tmp_path / "alone")])) as server:
        assert server.get("/metrics").status == 404


@pytest.mark.parametrize(
    ("access", "right", "wrong"),
    [
        (Access(token=TOKEN), f"Bearer {TOKEN}", "Bearer guessed"),
        (
            Access(passwords={"ada": "engine"}),
            f"Basic {b64encode(b'ada:engine').decode()}",
            f"Basic {b64encode(b'ada:guessed').decode()}",
        ),
    ],
    ids=["token", "password"],
)
def test_a_scraper_logs_in_by_a_header(tmp_path: Path, access: Access, right: str, wrong: str) -> None:
    with running(RunIndex([write_recording(tmp_path / "alone")]), access, metrics=True) as server:
        assert server.get("/metrics", Authorization=right).status == 200
        for header in (wrong, "", "Bearer ", "Basic ", "Basic \xe1", "Basic //8=", right[:-1]):
            assert server.get("/metrics", Authorization=header).status == 403

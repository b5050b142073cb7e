"""How much of a recording is read, and how often."""

from __future__ import annotations

import gc
import re
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest

from dashboards import recording as recording_module
from dashboards.forecast import Forecast
from dashboards.recording import LiveStatus, RecordingCache, RecordingStatus, Snapshot
from dashboards.runs import RunIndex
from overlapscope.bucket_model.prediction import Options
from overlapscope.trace.recording_modes import OFF, BegunMode
from overlapscope.trace.schema import EVENTS_FILE, MODES_FILE, rank_folder
from tests.dashboards.running import running
from tests.synthetic import write_recording


@pytest.fixture
def is_live(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Its last item is whether recordings go on; 300 records of each rank are as much as is read of them then."""
    states = [True]
    monkeypatch.setattr(LiveStatus, "latest", lambda _: RecordingStatus(is_live=states[-1]))
    monkeypatch.setattr(recording_module, "live_record_limit", lambda ranks: 600 // ranks)
    return states


def test_of_a_long_recording_that_goes_on_the_newest_steps_are_read_and_all_when_asked_for(
    tmp_path: Path, is_live: list[bool]
) -> None:
    recording = RecordingCache(write_recording(tmp_path, steps=100))
    latest, whole = recording.latest(), recording.latest(which="all")
    assert latest.trace.extent == "latest"
    assert 0 < len(latest.trace.steps) < len(whole.trace.steps) == 200
    assert recording.latest() is latest, "nothing has changed"
    is_live.append(False)
    assert recording.latest() is whole, "it is over, and all of it was read before"


def test_of_a_short_recording_that_goes_on_all_steps_are_read(tmp_path: Path, is_live: list[bool]) -> None:
    recording = RecordingCache(write_recording(tmp_path, steps=5))
    assert recording.latest().trace.extent == "all"


def test_what_goes_on_is_not_read_again_before_reading_it_has_cost_a_share_of_the_time(
    tmp_path: Path, is_live: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_recording(tmp_path, steps=100)
    recording = RecordingCache(folder)
    monkeypatch.setattr(recording_module, "_READING_SHARE", 1e-9)
    first = recording.latest()
    (folder / "rank_0" / "new.json").write_text("{}")
    assert recording.latest() is first
    assert recording.latest(which="all") is not first


def test_all_steps_of_what_goes_on_are_let_go_of_when_they_are_outdated(
    tmp_path: Path, is_live: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = RecordingCache(write_recording(tmp_path, steps=100))
    monkeypatch.setattr(recording_module, "_READING_SHARE", 1e-9)
    whole = weakref.ref(recording.latest(which="all"))
    recording.latest()
    gc.collect()
    assert whole() is not None, "others may ask for them"
    monkeypatch.setattr(recording_module, "_READING_SHARE", 1e9)
    recording = RecordingCache(tmp_path)
    whole = weakref.ref(recording.latest(which="all"))
    time.sleep(0.01)
    recording.latest()
    gc.collect()
    assert whole() is None


def test_a_page_says_which_steps_it_is_of_and_offers_all(tmp_path: Path, is_live: list[bool]) -> None:
    with running(RunIndex([write_recording(tmp_path, steps=100)])) as server:
        latest, whole = server.get("/").text, server.get("/?read=all").text
    assert re.search(r'steps <input value="\d\d:100" [^>]*></label> <button[^>]*>All steps', latest)
    assert "All steps" not in whole


def test_of_a_recording_that_is_over_and_does_not_fit_the_newest_steps_are_read(
    tmp_path: Path, is_live: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_live.append(False)
    folder = write_recording(tmp_path, steps=100)
    fitting = RecordingCache(folder)
    whole = fitting.latest()
    monkeypatch.setattr(recording_module, "free_bytes", lambda: 1000)
    latest = RecordingCache(folder).latest()
    assert latest.trace.extent == "latest"
    assert latest.trace.steps["step"].max() == 99
    assert fitting.latest() is whole, "it is there already"


def test_steps_that_are_chosen_are_kept_until_others_are(tmp_path: Path) -> None:
    recording = RecordingCache(write_recording(tmp_path, steps=100))
    some = recording.latest(which=(20, 30))
    assert some.trace.steps["step"].unique().tolist() == [*range(20, 30)]
    whole = recording.latest()
    assert recording.latest(which=(20, 30)) is some
    known = weakref.ref(some)
    del some
    recording.latest(which=(30, 40))
    gc.collect()
    assert known() is None
    assert recording.latest() is whole


def test_an_address_asks_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(RunIndex([write_recording(tmp_path, steps=100)])) as server:
        some = server.get("/?read=20:30").text
        assert re.search(r'steps <input value="20:30" [^>]*></label> <button[^>]*>All steps', some)
        assert "Means of 10 steps of 2 ranks" in some
        assert server.get("/tables/steps.csv?read=20:30").text.count("\n") == 1 + 2 * 10
        assert 'href="compare?base_steps=20:30&amp;new_steps=20:30"' in some
        missing = server.get("/?read=500:").text
        monkeypatch.setattr("overlapscope.trace.table_file.free_bytes", lambda: 1000)
        too_many = server.get("/?read=all").text
        monkeypatch.undo()
        assert 'class="extent"' not in server.get("/?read=sideways").text
    for page, why in ((missing, "has no step from 500 on; it has 0 to 99."), (too_many, " of memory, and ")):
        assert "<title>No such steps" in page
        assert why in page
        assert '<a href="?">' in page


def test_while_a_forecast_of_a_recording_that_goes_on_is_made_the_one_before_is_shown(
    tmp_path: Path, is_live: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboards.forecast._PATIENCE_S", 0.0)
    monkeypatch.setattr(recording_module, "_READING_SHARE", 1e9)
    recording = RecordingCache(write_recording(tmp_path, steps=30))
    first = recording.latest()
    made = first.forecast.result()
    assert first.latest_forecast(Options()) is first

    def later() -> Snapshot:
        with (tmp_path / "rank_0" / "new.json").open("a") as file:
            file.write(" ")
        return recording.latest()

    monkeypatch.setattr(Forecast, "soon", lambda _: Future())
    second = later()
    assert second.latest_forecast(Options()) is first
    third = later()
    assert third.latest_forecast(Options()) is first
    assert "forecast" not in vars(third), "one at a time"
    second.forecast.set_result(made)
    assert third.latest_forecast(Options()) is second
    third.forecast.set_result(made)
    assert third.latest_forecast(Options()) is third


def test_the_live_status_says_that_recording_is_off_and_since_when(tmp_path: Path) -> None:
    write_recording(tmp_path)
    off, on = (
        BegunMode(step=step, agreed_step=step, every=every, detail="buckets", time_ns=0)
        for step, every in ((3, OFF), (9, 1))
    )
    notes = tmp_path / "rank_0" / MODES_FILE
    notes.write_text(off.to_json())
    assert LiveStatus(tmp_path).latest().off_since == 3
    notes.write_text(off.to_json() + on.to_json())
    assert LiveStatus(tmp_path).latest().off_since is None


def test_a_recording_of_another_host_is_live_while_its_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "_CACHED_S", 0.0)
    folder, later = (write_recording(tmp_path / str(steps), steps=steps) for steps in (5, 9))
    status = LiveStatus(folder)
    assert [(status.latest().is_live, status.latest().latest_step) for _ in range(2)] == [(False, 4)] * 2
    log, grown = (rank_folder(each, 0) / EVENTS_FILE for each in (folder, later))
    log.write_bytes(grown.read_bytes())
    assert (status.latest().is_live, status.latest().latest_step) == (True, 8)

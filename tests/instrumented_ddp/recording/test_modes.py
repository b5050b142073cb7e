"""Which mode each step is recorded in, given what was asked for."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.recording import modes
from instrumented_ddp.recording.modes import ModeFollower
from overlapscope.trace.environment import DEFAULT_EVERY
from overlapscope.trace.recording_modes import (
    OFF,
    RecordingMode,
    is_full_step,
    read_begun_modes,
    read_control,
    write_control,
)
from overlapscope.trace.schema import CONTROL_FILE

STEPS = 30
EVERY = st.sampled_from([OFF, 1, 3, 10])


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "LOOK_INTERVAL_NS", 0)


def make_follower(folder: Path, *, every: int = DEFAULT_EVERY) -> ModeFollower:
    (folder / "rank_0").mkdir(parents=True)
    return ModeFollower(folder / "rank_0", every=every, detail="buckets")


def ask(folder: Path, *asked: RecordingMode) -> None:
    for number, mode in enumerate(asked):
        write_control(folder, asked[:number], mode)


def noted(folder: Path) -> list[tuple[int, int, int]]:
    return [(mode.step, mode.agreed_step, mode.every) for mode in read_begun_modes(folder / "rank_0", [])]


@given(st.dictionaries(st.integers(0, STEPS), EVERY, max_size=6), EVERY)
def test_a_step_is_in_the_latest_mode_that_was_asked_for(asked: dict[int, int], every: int) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        patch.setattr(modes, "LOOK_INTERVAL_NS", 0)
        folder = Path(name)
        follower = make_follower(folder, every=every)
        ask(folder, *(RecordingMode(from_step=step, every=asked[step]) for step in sorted(asked)))
        after = [every := asked.get(step, every) for step in range(STEPS + 1)]
        for step in range(STEPS):
            follower.on_step_start(step)
            assert follower.is_on == (after[step] != OFF)
            assert follower.is_full == is_full_step(step, after[step])
            assert follower.is_marked == (follower.is_on or after[step + 1] != OFF)
        assert all(step == agreed for step, agreed, _ in noted(folder))


def test_a_request_that_is_seen_late_is_followed_at_once_and_noted_with_both_steps(tmp_path: Path) -> None:
    follower = make_follower(tmp_path)
    follower.on_step_start(0)
    ask(tmp_path, RecordingMode(from_step=3, every=OFF))
    follower.on_step_start(5)
    assert not follower.is_on
    assert noted(tmp_path) == [(5, 3, OFF)]


def test_steps_that_are_measured_are_recorded_in_full_and_nobody_is_late_by_that(tmp_path: Path) -> None:
    follower = make_follower(tmp_path, every=OFF)
    for step in range(9):
        follower.is_held = 3 <= step < 6
        follower.on_step_start(step)
        assert follower.is_full == (3 <= step < 6)
    assert noted(tmp_path) == [(0, 0, OFF), (3, 3, 1), (6, 6, OFF)]


def test_a_request_replaces_those_that_were_to_begin_later(tmp_path: Path) -> None:
    ask(tmp_path, *(RecordingMode(from_step=step, every=every) for step, every in ((3, OFF), (9, 1), (5, 2))))
    assert [(mode.from_step, mode.every) for mode in read_control(tmp_path / CONTROL_FILE)] == [(3, OFF), (5, 2)]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"modes": [{}]}', '{"modes": [{"from_step": 1, "every": -1}]}'])
def test_a_damaged_request_leaves_everything_as_it_is(tmp_path: Path, content: str) -> None:
    follower = make_follower(tmp_path)
    (tmp_path / CONTROL_FILE).write_text(content)
    follower.on_step_start(1)
    assert follower.is_full
    assert noted(tmp_path) == []


@given(st.integers(0, 10**6), st.integers(2, 50))
def test_one_step_in_each_block_of_a_sample_is_full(block: int, every: int) -> None:
    first = block * every
    assert sum(is_full_step(first + position, every) for position in range(every)) == 1
    assert not is_full_step(first, OFF)


@given(st.integers(2, 20), st.integers(2, 200))
def test_what_a_loop_does_every_so_many_steps_is_in_a_sample_as_often_as_in_all_steps(every: int, period: int) -> None:
    logged = range(0, 4000 * period, period)
    share = sum(is_full_step(step, every) for step in logged) / len(logged)
    assert share == pytest.approx(1 / every, abs=0.03)

"""Scalars by step are the breakdown's, step by step, and each is handed over once."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlapscope as ov
from tests.synthetic import make_rank, write_recording, write_step


class Curves:
    """What was logged, as the tools keep it."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def __call__(self, scalars: dict[str, float], /, *, step: int) -> None:
        self.logged.append((step, scalars))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "traces", ranks=3, steps=12)


def test_each_step_is_the_mean_of_its_ranks_and_its_blocks_sum_to_it(folder: Path) -> None:
    curves = Curves()
    assert ov.open(folder).log_to(curves) == 11
    assert [step for step, _ in curves.logged] == list(range(12))
    table = ov.open(folder).steps
    for step, scalars in curves.logged:
        of_ranks = table[table["step"] == step]
        assert scalars["overlapscope/step_ms"] == pytest.approx(of_ranks["step_time_ns"].mean() / 1e6)
        assert scalars["overlapscope/exposed_ms"] == pytest.approx(of_ranks["exposed_ns"].mean() / 1e6)
        hidden, all_of_it = of_ranks["hidden_ns"].sum(), of_ranks["communication_ns"].sum()
        assert scalars["overlapscope/overlap_ratio"] == pytest.approx(hidden / all_of_it)
        parts = {name: value for name, value in scalars.items() if name.endswith("_ms")}
        whole, _ = parts.pop("overlapscope/step_ms"), parts.pop("overlapscope/hidden_ms")
        assert sum(parts.values()) == pytest.approx(whole)


def test_of_a_recording_that_goes_on_only_new_steps_are_handed_over(folder: Path) -> None:
    curves = Curves()
    assert ov.open(folder).log_to(curves, after_step=8) == 11
    assert [step for step, _ in curves.logged] == [9, 10, 11]
    assert ov.open(folder).log_to(curves, after_step=11) == 11
    assert len(curves.logged) == 3


def test_a_step_that_a_rank_has_not_finished_is_not_handed_over(tmp_path: Path) -> None:
    curves = Curves()
    for rank, steps in enumerate((12, 12, 11)):
        log = make_rank(tmp_path, rank, world_size=3)
        for step in range(steps):
            write_step(log, step, 1_000_000_000 + step * 10_000_000)
        log.close()
    assert ov.open(tmp_path).log_to(curves) == 10
    assert [step for step, _ in curves.logged] == list(range(11))


def test_a_recording_without_steps_hands_over_nothing(tmp_path: Path) -> None:
    curves = Curves()
    make_rank(tmp_path, 0, world_size=1).close()
    assert ov.open(tmp_path).log_to(curves) == -1
    assert curves.logged == []

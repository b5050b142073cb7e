"""Random programs are what their seed says, are Python, and know their own truth."""

from __future__ import annotations

import ast

import pytest

from tests.chaos.event import FAULT
from tests.chaos.program import EVENTS, Program, compose
from tests.chaos.setting import MODELS

PROGRAMS = [compose(seed) for seed in range(600)]


def of(name: str) -> Program:
    return next(program for program in PROGRAMS if program.event.name == name)


def test_a_seed_always_gives_the_same_program() -> None:
    assert [compose(seed) for seed in range(50)] == PROGRAMS[:50]
    assert len({program.text for program in PROGRAMS}) == len(PROGRAMS)


def test_every_program_is_python() -> None:
    for program in PROGRAMS:
        compile(ast.parse(program.text), f"seed {program.seed}", "exec")


def test_all_that_can_happen_does() -> None:
    assert {program.event.name for program in PROGRAMS} == {event.name for event in EVENTS}
    assert {program.setting.model for program in PROGRAMS} == MODELS.keys()
    assert {program.setting.style for program in PROGRAMS} == {"flat", "main", "trainer"}


def test_whose_ddp_it_is_changes_nothing_else() -> None:
    ours, stock = compose(7, is_ours=True), compose(7, is_ours=False)
    differences = [
        pair for pair in zip(ours.text.splitlines(), stock.text.splitlines(), strict=True) if len({*pair}) > 1
    ]
    assert differences == [
        (
            "from instrumented_ddp import DistributedDataParallel as DDP",
            "from torch.nn.parallel import DistributedDataParallel as DDP",
        )
    ]


def test_a_fault_has_a_line_and_a_healthy_program_has_none() -> None:
    for program in PROGRAMS:
        marked = [number for number, line in enumerate(program.text.splitlines(), 1) if line.endswith(FAULT)]
        if program.event.is_harmless or program.event.has_line:
            assert bool(marked) != program.event.is_harmless, program.event.name
        if program.lines:
            assert set(marked) <= set(program.lines)


def test_it_happens_within_the_training() -> None:
    for program in PROGRAMS:
        setting = program.setting
        assert 0 <= setting.step < setting.steps
        assert all(0 <= rank < setting.ranks for rank in program.blamed)
        assert (setting.step + 1) % setting.accumulation == 0  # a backward that is reduced


@pytest.mark.parametrize(
    ("name", "is_after"), [("extra collective", True), ("branch skipped", False), ("batch skipped", False)]
)
def test_what_follows_the_update_may_be_counted_to_the_next_step(name: str, is_after: bool) -> None:
    update = of(name).setting.update
    assert of(name).steps in (None, (update, update + 1) if is_after else (update,))

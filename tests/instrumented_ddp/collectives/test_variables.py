"""Variables of a frame are read, and whatever the function lets go of afterwards is gone."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from instrumented_ddp.collectives.call_sites import read_variables


class Tensor:
    """Something large."""


def names_in(frame: FrameType) -> list[str]:
    return read_variables(frame, sorted)


def let_go() -> tuple[list[str], Tensor | None]:
    """No test, as pytest has those ask for their variables."""
    tensor = Tensor()
    gone = weakref.ref(tensor)
    names = names_in(sys._getframe())
    del tensor
    return names, gone()


def test_what_a_function_lets_go_of_is_gone():
    names, tensor = let_go()
    assert names == ["gone", "tensor"]
    assert tensor is None


def test_variables_stay_what_they_are():
    first, cell = 1, 2

    def inner() -> int:
        return cell

    names_in(sys._getframe())
    assert (first, inner()) == (1, 2)
    assert sys._getframe().f_locals["first"] == 1


def test_who_has_asked_for_his_variables_himself_has_what_he_was_given():
    learning_rate = 0.1
    settings = locals()
    for later in range(2):
        names_in(sys._getframe())
        assert settings == {"learning_rate": learning_rate}, later


def test_variables_of_a_module_are_no_copy_and_stay():
    names: dict[str, Any] = {"names_in": names_in, "sys": sys, "value": 3}
    exec("found = names_in(sys._getframe())", names)
    assert names["value"] == 3
    assert "value" in names["found"]


def test_a_generator_is_read_as_well():
    def numbers():
        tensor = Tensor()
        gone = weakref.ref(tensor)
        yield names_in(sys._getframe())
        del tensor
        yield gone()

    steps = numbers()
    assert "tensor" in next(steps)
    assert next(steps) is None


def looks(frame: FrameType, event: str, argument: object) -> Any:
    """As a debugger, which keeps copies of its own."""
    _ = frame.f_locals
    return looks


def test_a_debugger_does_not_matter():
    def function() -> int:
        number = 5
        names_in(sys._getframe())
        number += 1
        return number

    before = sys.gettrace()
    sys.settrace(looks)
    try:
        assert function() == 6
    finally:
        sys.settrace(before)

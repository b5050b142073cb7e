"""Which frames run the user's code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest

from instrumented_ddp.collectives.call_sites import find_user_frame, is_user_code


def frame_in(file: str, module: str) -> FrameType:
    """A frame of code of such a file, in such a module."""
    variables = {"__name__": module, "sys": sys}
    exec(compile("frame = sys._getframe()", file, "exec"), variables)  # as Python runs a script
    frame = variables["frame"]
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("file", "module", "expected"),
    [
        ("/home/me/train.py", "__main__", True),
        ("/home/me/src/accelerate/src/accelerate/accelerator.py", "accelerate.accelerator", False),
        ("/usr/lib/python3.11/contextlib.py", "contextlib", False),
        ("<frozen runpy>", "runpy", False),
        ("/venv/lib/python3.11/site-packages/torchmetrics/metric.py", "torchmetrics.metric", False),
    ],
)
def test_a_frame_is_the_users_by_its_file_and_its_module(file: str, module: str, *, expected: bool) -> None:
    assert is_user_code(frame_in(file, module)) == expected


@pytest.mark.parametrize(
    ("file", "module", "expected"),
    [
        ("<stdin>", "__main__", True),
        ("<string>", "__main__", True),
        ("<string>", "mine.config", False),
        ("/venv/lib/python3.11/site-packages/mine/train.py", "__main__", True),
        ("/home/me/src/accelerate/src/accelerate/accelerator.py", "accelerate.accelerator", False),
    ],
)
def test_without_a_file_of_the_users_its_program_is_found(file: str, module: str, *, expected: bool) -> None:
    frame = frame_in(file, module)
    alone = FrameStub(f_code=frame.f_code, f_globals=frame.f_globals, f_back=None)  # without the frames of pytest
    assert (find_user_frame(alone) is alone) == expected  # type: ignore[arg-type, comparison-overlap]


@dataclass
class FrameStub:
    """What is asked of a frame."""

    f_code: CodeType
    f_globals: dict[str, Any]
    f_back: None

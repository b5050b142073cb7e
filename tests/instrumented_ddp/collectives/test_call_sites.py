"""Which frames run the user's code."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from instrumented_ddp.collectives.call_sites import is_user_code


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
        ("<stdin>", "__main__", True),
        ("<string>", "__main__", True),
        ("<string>", "torch.fx.something", False),
        ("/home/me/src/accelerate/src/accelerate/accelerator.py", "accelerate.accelerator", False),
        ("/usr/lib/python3.11/contextlib.py", "contextlib", False),
        ("<frozen runpy>", "runpy", False),
    ],
)
def test_a_frame_is_the_users_by_its_file_and_its_module(file: str, module: str, *, expected: bool) -> None:
    assert is_user_code(frame_in(file, module)) == expected

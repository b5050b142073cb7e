"""What all tests share: properties are about results, a loaded machine is no failure, and waiting needs no core."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from hypothesis import settings

# Hundreds of processes import our sources. Where the environment forbids to keep them compiled, each compiles them all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Every run looks at other examples, so fewer of them at a time find as much over the days.
settings.register_profile("without a deadline", deadline=None, max_examples=40)
settings.load_profile("without a deadline")


def pytest_configure() -> None:
    """Let signals reach what tests start: nohup and CI runners have some ignored, which is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # ignored by the tests themselves all the same


@pytest.hookimpl(optionalhook=True)  # for whoever runs without xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: tests that start ranks wait for half of the time, so there are two workers for a core."""
    return 2 * (os.cpu_count() or 1)

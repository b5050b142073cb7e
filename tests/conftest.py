"""What all tests share: properties are about results, a loaded machine is no failure, and waiting needs no core."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: tests that start ranks wait for half of the time, so there are three workers for two cores."""
    return max(1, 3 * (os.cpu_count() or 1) // 2)

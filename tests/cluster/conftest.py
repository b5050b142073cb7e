"""Ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.cluster.ranks import Ranks


@pytest.fixture(scope="module")
def ranks_of_module() -> Iterator[Callable[[int], Ranks]]:
    """Gives so many ranks, the same ones to all tests of a module: forking and meeting takes longer than most calls.

    For calls that leave nothing behind: one that records has to close its session, which else lasts until its
    process ends.
    """
    with ExitStack() as at_the_end:

        @cache
        def ranks_of(world_size: int) -> Ranks:
            return at_the_end.enter_context(Ranks(world_size))

        yield ranks_of

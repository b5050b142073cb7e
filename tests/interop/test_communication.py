"""Collectives of several ranks are compared only if they are the same ones."""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlapscope.interop.communication import summarize_communication
from overlapscope.trace.communication import GroupCommunication

ENDS_US = (1000, 2500, 3100, 9000)


def spans(ends_us: tuple[int, ...], took_us: tuple[int, ...], *, offset_us: int = 0, name: str = "") -> pd.DataFrame:
    """Return collectives of a rank whose clock is ahead by an offset."""
    end_ns = (np.array(ends_us) + offset_us) * 1000
    fixed = {"group": name, "name": name, "group_size": 0, "op": "all_reduce", "bytes": 8, "is_kernel": True}
    return pd.DataFrame({"start_ns": end_ns - np.array(took_us) * 1000, "end_ns": end_ns}).assign(
        **fixed, exposed_ns=0, is_bucket=False
    )


def summarize(*of_ranks: pd.DataFrame) -> GroupCommunication:
    (found,) = summarize_communication(dict(enumerate(of_ranks)), world_size=len(of_ranks))
    return found


def test_the_shortest_kernel_is_that_of_the_last_rank_whatever_the_clocks() -> None:
    found = summarize(spans(ENDS_US, (500,) * 4), spans(ENDS_US, (100, 100, 100, 499), offset_us=10**9))
    assert found.last_ranks == {"1": (3, 4)}  # one microsecond tells nothing
    assert found.wait_ns == (400_000 * 3 + 1_000) / 2


def test_ranks_of_different_groups_without_names_are_not_compared() -> None:
    found = summarize(spans(ENDS_US, (500,) * 4), spans((1300, 2600, 3900, 8000), (100,) * 4))
    assert (found.wait_ns, found.last_ranks) == (None, {})


def test_profiles_that_begin_at_different_collectives_are_not_compared() -> None:
    found = summarize(spans(ENDS_US, (500,) * 4, name="tp"), spans((*ENDS_US[1:], 9900), (100,) * 4, name="tp"))
    assert (found.wait_ns, found.last_ranks) == (None, {})


def test_a_single_collective_is_compared_if_its_group_is_known() -> None:
    assert summarize(spans((1000,), (500,)), spans((1000,), (100,))).wait_ns is None
    assert summarize(spans((1000,), (500,), name="tp"), spans((1000,), (100,), name="tp")).last_ranks == {"1": (1, 1)}

"""The low-pass of loss curves."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.lab.experiments.skip_sync import smooth


@pytest.mark.parametrize("length", [13, 200])
def test_what_does_not_change_stays(length):
    np.testing.assert_allclose(smooth(np.full(length, 2.5), 0.05), 2.5)


def test_a_fast_ripple_goes_and_a_slow_change_stays_where_it_is():
    steps = np.arange(400)
    slow = np.cos(2 * np.pi * steps / 400)
    found = smooth(slow + 0.5 * (-1.0) ** steps, 0.05)
    assert np.abs(found - slow)[60:-60].max() < 0.02

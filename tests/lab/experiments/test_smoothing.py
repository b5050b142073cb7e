"""The low-pass of loss curves is SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import signal

from overlapscope.lab.experiments.skip_sync import smooth

SERIES = arrays(np.float64, st.integers(13, 60), elements=st.floats(-100, 100))


@given(series=SERIES, cutoff=st.floats(0.02, 0.9))
def test_it_is_what_butter_and_filtfilt_give(series, cutoff):
    expected = signal.filtfilt(*signal.butter(3, cutoff), series)
    np.testing.assert_allclose(smooth(series, cutoff), expected, atol=1e-6 * (1 + np.abs(series).max()))


@pytest.mark.parametrize("length", [13, 200])
def test_what_does_not_change_stays(length):
    np.testing.assert_allclose(smooth(np.full(length, 2.5), 0.05), 2.5)


def test_a_fast_ripple_goes_and_a_slow_change_stays_where_it_is():
    steps = np.arange(400)
    slow = np.cos(2 * np.pi * steps / 400)
    found = smooth(slow + 0.5 * (-1.0) ** steps, 0.05)
    assert np.abs(found - slow)[60:-60].max() < 0.02

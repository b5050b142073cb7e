"""A search for the best bucket size by trying, as Horovod's autotuner does it: what predictions save one from.

Each sample trains some steps with one size. A Gaussian process through the samples, over the logarithm of the size,
says where the expected improvement is largest, and that is tried next. (horovod/common/optim/bayesian_optimization.cc;
its defaults are 10 steps a sample and 20 samples.) Here a sample is the median of steps that were really measured,
drawn with repetition.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

STEPS_PER_SAMPLE: Final = 10
SAMPLES: Final = 20
_FIRST: Final = 3
"""Samples at sizes that are spread over all, before there is anything to fit."""


@dataclass(frozen=True)
class Search:
    """One search: after each sample, the size that it would choose."""

    chosen: tuple[int, ...]


def search(caps_mb: Sequence[float], step_ns: Sequence[NDArray[np.float64]], seed: int) -> Search:
    """Search among sizes whose steps were measured.

    Args:
        caps_mb: (Q,) the sizes.
        step_ns: of each, the measured steps.
    """
    random = np.random.default_rng(seed)
    places = np.log2(np.array(caps_mb))[:, None]
    tried: list[int] = []
    seen_ns: list[float] = []
    chosen: list[int] = []
    for number in range(SAMPLES):
        if number < _FIRST:
            next_one = int(random.permutation(np.array_split(np.arange(len(caps_mb)), _FIRST)[number])[0])
        else:
            next_one = _most_promising(places, tried, seen_ns)
        tried.append(next_one)
        seen_ns.append(float(np.median(random.choice(step_ns[next_one], STEPS_PER_SAMPLE))))
        mean_ns = {each: np.mean([ns for one, ns in zip(tried, seen_ns, strict=True) if one == each]) for each in tried}
        chosen.append(min(mean_ns, key=mean_ns.__getitem__))
    return Search(tuple(chosen))


def _most_promising(places: NDArray[np.float64], tried: Sequence[int], seen_ns: Sequence[float]) -> int:
    """Where a shorter step time may most be expected."""
    scale = float(np.mean(seen_ns))
    kernel = ConstantKernel(0.01) * RBF(2.0, (0.5, 20.0)) + WhiteKernel(1e-4, (1e-6, 1e-1))
    process = GaussianProcessRegressor(kernel, normalize_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(places[list(tried)], np.array(seen_ns) / scale)
    mean, deviation = process.predict(places, return_std=True)
    better = min(seen_ns) / scale - mean
    score = better / np.maximum(deviation, 1e-12)
    cumulative = np.array([0.5 * (1 + math.erf(each / math.sqrt(2))) for each in score])
    density = np.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
    return int(np.argmax(better * cumulative + deviation * density))

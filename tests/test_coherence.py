"""Everything that is said of made-up recordings is possible, and the same on all surfaces.

``python -m benchmarks.coherence`` makes up as many as there is time for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coherence import find_contradictions
from tests.made_up_job import make_up_job, write_made_up_job

SEEDS = (11, 15, 27, 20112, 20526, 20541, 13670, 13774, 102565)
"""Heavy tails and a jump; two steps; hardly any communication; a link of twice the bandwidth, with which DDP's default
is hardly slower than the best size; buckets that change while the job runs; five steps, one of them much longer; six
steps, of which the last ones have other buckets and take four times as long; six steps, the third of which counts; a
rank that is suspected beside all-reduces that are found to take longer from a step on."""


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SEEDS[1:])])
def test_nothing_contradicts_itself_or_what_is_possible(seed: int, tmp_path: Path) -> None:
    folder = write_made_up_job(make_up_job(seed), tmp_path / "one")
    other = write_made_up_job(make_up_job(seed if seed % 2 else 1_000_000 + seed), tmp_path / "other")
    assert find_contradictions(folder, other) == []

from __future__ import annotations

import pytest

from dashboards.recording import RecordingCache, Snapshot
from tests.synthetic import write_recording


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Two ranks, five steps of 10 ms with known numbers; the same for all tests, which change nothing in it."""
    return RecordingCache(write_recording(tmp_path_factory.mktemp("snapshot") / "traces")).latest()

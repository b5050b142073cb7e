from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.recording import RecordingCache, Snapshot
from tests.synthetic import write_recording


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """Two ranks, five steps of 10 ms with known numbers."""
    return RecordingCache(write_recording(tmp_path / "traces")).latest()

"""Durations of collectives for torch.compile, as Inductor's own reader reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import RUN_FILE, rank_folder
from tests.synthetic import BUCKET_ELEMENTS, write_recording, write_straggling_recording

TRANSFERS_US = (800, 1500, 1400)
"""Of the buckets, without the wait for rank 1, which is 3 ms late in every step."""


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: 3000 * (rank == 1), ranks=2)
    path = tmp_path / "collectives.json"
    assert main(["export", str(tmp_path / "traces"), "-o", str(path), "--format", "inductor-pge"]) == 0
    return path


def test_durations_are_without_the_wait_for_the_last_rank(exported: Path) -> None:
    kernels = json.loads(exported.read_text())["traceEvents"]
    found = {one["args"]["Out msg nelems"]: one["dur"] for one in kernels}
    assert found == dict(zip(BUCKET_ELEMENTS, TRANSFERS_US, strict=True))


def test_inductor_reads_them(exported: Path) -> None:
    estimation = pytest.importorskip("torch._inductor.fx_passes.profile_guided_estimation")
    profile = estimation.ProfileData()
    profile.load(str(exported))
    for elements, transfer_us in zip(BUCKET_ELEMENTS, TRANSFERS_US, strict=True):
        assert profile.lookup_collective("all_reduce", (0, 1), elements, "Float") == (transfer_us / 1000, "profile")
    between = profile.lookup_collective("all_reduce", (0, 1), 3 * 1024 * 1024, "Float")
    assert 1.4 < between[0] < 1.5


def test_groups_of_a_mesh_are_read_by_their_ranks_with_the_same_durations(tmp_path: Path) -> None:
    """Ranks that estimated differently would order their collectives differently."""
    estimation = pytest.importorskip("torch._inductor.fx_passes.profile_guided_estimation")
    folder = write_straggling_recording(tmp_path / "traces", late_us=lambda *_: 0, ranks=4)
    path = rank_folder(folder, 0) / RUN_FILE
    run = json.loads(path.read_text())
    run["models"][0]["sharding"] = {"shard_groups": [[0, 1], [2, 3]], "replica_groups": [[0, 2], [1, 3]], "units": []}
    write_json(path, run)
    assert main(["export", str(folder), "-o", str(tmp_path / "c.json"), "--format", "inductor-pge"]) == 0
    profile = estimation.ProfileData()
    profile.load(str(tmp_path / "c.json"))
    assert set(profile.pg_configs.values()) == {(0, 2), (1, 3)}
    for elements, transfer_us in zip(BUCKET_ELEMENTS, TRANSFERS_US, strict=True):
        for ranks in ((0, 2), (1, 3)):
            assert profile.lookup_collective("all_reduce", ranks, elements, "Float") == (transfer_us / 1000, "profile")
    assert profile.lookup_collective("all_reduce", (0, 1, 2, 3), BUCKET_ELEMENTS[0], "Float") is None


def test_without_all_ranks_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path / "traces", ranks=2, world_size=3)
    path = tmp_path / "collectives.json"
    assert main(["export", str(tmp_path / "traces"), "-o", str(path), "--format", "inductor-pge"]) == 1
    assert "all ranks" in capsys.readouterr().err
    assert not path.exists()

"""Whatever is damaged, cut off or gone of a healthy recording: no rank is accused, and nothing false is said."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import HEADER_BYTES, MANIFEST_FILE, TABLES_FOLDER
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RANKS = 3


def train(folder: Path) -> None:
    """Some steps, with a collective of all ranks in each, and one of a group that rank 2 is not in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, trace=folder)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    pair = dist.new_group([0, 1])
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(2), group=pair)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of three ranks that has ended well."""
    folder = tmp_path_factory.mktemp("recording") / "traces"
    assert run_ranks(train, RANKS, folder) == [None] * RANKS
    verdict, problems = diagnosed(folder)
    assert (verdict.kind, problems) == ("healthy", [])
    return folder


def diagnosed(folder: Path) -> tuple[Verdict, list[Problem]]:
    evidence, problems = read_evidence(folder)
    return judge(evidence), problems


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank_*/*") if path.stat().st_size)


def copied(recording: Path) -> Path:
    copy = recording.with_name("damaged")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(recording, copy, ignore=shutil.ignore_patterns(TABLES_FOLDER))
    return copy


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)
@given(st.data())
def test_damage_to_any_byte_of_any_file_accuses_nobody(recording: Path, data: st.DataObject) -> None:
    copy = copied(recording)
    path = data.draw(st.sampled_from(files_of(copy)))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "flip", "flip", "cut", "remove"])):
        case "flip":
            content[place] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:place])
        case "remove":
            path.unlink()
    verdict, problems = diagnosed(copy)
    assert verdict.kind in ("healthy", "cannot tell")
    assert verdict.blamed == ()
    assert all("\n" not in str(problem) for problem in problems)
    with suppress(OverlapScopeError):  # nothing can be shown
        read_trace(copy)


def test_a_damaged_byte_is_noted_with_its_file_and_takes_healthy_away(recording: Path) -> None:
    for name in sorted(path.name for path in files_of(recording) if path.parent.name == "rank_1"):
        copy = copied(recording)
        path = copy / "rank_1" / name
        content = bytearray(path.read_bytes())
        content[-1 if path.suffix == ".log" else len(content) // 2] ^= 0x20
        path.write_bytes(content)
        verdict, problems = diagnosed(copy)
        assert [str(problem).startswith(f"{path}: ") for problem in problems] == [True], name
        assert verdict.kind == "cannot tell", name
        assert str(path) in verdict.sentence


def test_a_header_that_is_damaged_costs_its_log_and_no_verdict(recording: Path) -> None:
    for name in ("events.log", "group_0.log"):
        copy = copied(recording)
        path = copy / "rank_1" / name
        content = bytearray(path.read_bytes())
        content[HEADER_BYTES - 100] ^= 1
        path.write_bytes(content)
        verdict, problems = diagnosed(copy)
        assert str(problems[0]).startswith(f"{path}: damaged header ")
        assert (verdict.kind, verdict.blamed) == ("cannot tell", ())


def test_a_file_that_is_gone_is_missed(recording: Path) -> None:
    for name in sorted(path.name for path in (recording / "rank_1").iterdir()):
        copy = copied(recording)
        (copy / "rank_1" / name).unlink()
        verdict, problems = diagnosed(copy)
        if name == MANIFEST_FILE:  # the list itself: all that it lists is there
            assert verdict.kind == "healthy"
        else:
            assert verdict.kind == "cannot tell", name
            assert any(f"rank_1/{name}: " in str(problem) for problem in problems), name


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_whose_folder_is_gone_is_missed(recording: Path, rank: int) -> None:
    copy = copied(recording)
    shutil.rmtree(copy / f"rank_{rank}")
    verdict, _ = diagnosed(copy)
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())
    assert f"rank {rank} left" in verdict.sentence
    left = [other for other in range(RANKS) if other != rank]
    groups = "2 groups" if rank == 2 else "1 group"
    assert re.search(rf" {groups} .* ranks {left[0]}, {left[1]}\.$", verdict.sentence)


def test_a_log_cut_to_a_third_is_missed(recording: Path) -> None:
    copy = copied(recording)
    path = copy / "rank_1" / "group_0.log"
    content = path.read_bytes()
    path.write_bytes(content[: HEADER_BYTES + (len(content) - HEADER_BYTES) // 3])
    verdict, problems = diagnosed(copy)
    assert (verdict.kind, verdict.blamed, len(problems)) == ("cannot tell", (), 1)
    assert str(path) in verdict.sentence

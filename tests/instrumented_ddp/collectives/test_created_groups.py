"""Process groups that a rank makes, as they are recorded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from instrumented_ddp.collectives.call_sites import CallSiteTable
from instrumented_ddp.collectives.created_groups import CreatedGroups
from overlapscope.diagnosis.evidence import CreatedGroup
from overlapscope.trace.json_files import read_dataclasses
from overlapscope.trace.schema import CREATED_GROUPS_FILE


@pytest.fixture
def created(tmp_path: Path) -> Iterator[CreatedGroups]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    created = CreatedGroups(tmp_path, CallSiteTable(tmp_path))
    yield created
    created.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_each_group_is_written_with_its_name_its_list_and_its_line(created: CreatedGroups, tmp_path: Path) -> None:
    made = dist.new_group([0])
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    dist.new_group(None, timeout=None)
    with pytest.raises(ValueError, match=r"out of range|within the world_size"):
        dist.new_group([3])
    dist.new_group([0], use_local_synchronization=True)  # has a name of its own kind
    names = [one.name for one in created.latest]
    assert names[0] == made.group_name
    assert [one.ranks for one in created.latest[:2]] == [(0,), (0,)]
    assert created.latest[0].call_site is not None
    assert (created.latest[0].call_site.file, created.latest[0].call_site.line) == (__file__, line)
    problems: list[object] = []
    assert read_dataclasses(CreatedGroup, tmp_path / CREATED_GROUPS_FILE, problems) == created.latest  # type: ignore[arg-type]
    assert not problems


def test_groups_of_a_second_world_have_other_names(created: CreatedGroups) -> None:
    dist.new_group([0])
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    dist.new_group([0])
    assert [one.name for one in created.latest] == ["1", "1 (2)"]


def test_an_error_of_ours_does_not_keep_a_group_from_being_made(
    created: CreatedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1 // 0)
    assert dist.new_group([0]).size() == 1
    assert created.latest == ()

"""A recording is a guest in somebody's process: what is the user's stays as it was, and goes when it would go."""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, IncidentError, attach
from instrumented_ddp import session as session_module
from instrumented_ddp.plans.auto_measuring import Meter
from instrumented_ddp.recording.console import reattribute_warnings
from instrumented_ddp.recording.tcp_stats import iter_tcp_sockets
from instrumented_ddp.reduction import reducer as reducer_module
from instrumented_ddp.session import open_session
from overlapscope.trace.event_log import read_log
from overlapscope.trace.schema import ENDED_FILE, EVENTS_FILE, Kind

WRAPPERS = (DistributedDataParallel, nn.parallel.DistributedDataParallel)


def step(model: nn.Module) -> None:
    outputs = model(torch.randn(2, 4))
    sum(output.sum() for output in outputs).backward()


class ReturnsItsScale(nn.Module):
    """As CLIP returns its ``logit_scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x) * self.scale, self.scale


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_parameter_that_a_model_returns_gets_no_hook_a_step(traces: Path, wrapper: Any) -> None:
    attach(traces)
    module = ReturnsItsScale()
    model = wrapper(module)
    for _ in range(3):
        step(model)
    assert not module.scale._backward_hooks


def test_connections_stay_blocking_also_where_sockets_have_a_timeout_by_default() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.setblocking(True)
        socket.setdefaulttimeout(5.0)
        try:
            assert [one.getsockname() for one in iter_tcp_sockets() if one.getsockname() == client.getsockname()]
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(client.fileno())


def test_a_group_that_is_gone_leaves_no_file_open(traces: Path) -> None:
    attach(traces)
    open_files = []
    for _ in range(4):
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert max(open_files[2:]) <= open_files[1], open_files
    assert len(list((traces / "rank_0").glob("group_*.log"))) == 4


def test_a_forked_process_leaves_its_parents_recording_alone(traces: Path) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), trace=traces)
    model(torch.randn(2, 4)).sum().backward()
    log = traces / "rank_0" / EVENTS_FILE

    def phases() -> int:
        """Threads of this process may write other records at any moment, such as of pauses."""
        return int((read_log(log)[1]["kind"] == Kind.PHASE).sum())

    before = phases()
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            model(torch.randn(2, 4))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert phases() == before
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert phases() > before
    model._session.close()
    assert read_log(log)[2] == []


def test_the_memory_of_buckets_is_free_before_that_of_other_buckets_is_taken(
    lone_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = reducer_module.Bucket.__init__
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=0.00001)
    held_by_reducer: list[int] = []

    def note(bucket: Any, *args: Any, **kwargs: Any) -> None:
        held_by_reducer.append(len(model._reducer.buckets) + len(model._reducer.bucket_of))
        works(bucket, *args, **kwargs)

    monkeypatch.setattr(reducer_module.Bucket, "__init__", note)
    for _ in range(2):  # the second forward rebuilds
        model(torch.randn(2, 4)).sum().backward()
    assert len(held_by_reducer) > 1
    assert set(held_by_reducer) == {0}


def test_an_exception_without_words_still_reaches_the_users_hook(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise ValueError

    heard: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: heard.append(what[1]))
    open_session(traces, 0, "off")
    error = WordlessError()
    sys.excepthook(WordlessError, error, None)
    assert heard == [error]


def test_what_the_watchdog_raises_in_a_callback_reaches_the_training(traces: Path) -> None:
    session = open_session(traces, 0, "off")
    with pytest.raises(IncidentError):
        session.disable_recording(IncidentError("ranks differ"))


def test_a_session_that_opens_half_is_closed_and_does_not_say_that_the_process_has_ended(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    hook = sys.excepthook
    monkeypatch.setattr(session_module, "Watchdog", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        open_session(traces, 0)
    assert "can't start new thread" in json.loads((traces / "rank_0" / ENDED_FILE).read_text())["unrecorded_because"]
    assert sys.excepthook == hook
    dist.all_reduce(torch.ones(1))


def test_a_constructor_that_raises_has_warned_all_the_same() -> None:
    def construct() -> None:
        with reattribute_warnings(callers=1):
            warnings.warn("beware", stacklevel=1)
            raise ValueError

    with pytest.warns(UserWarning, match="beware"), pytest.raises(ValueError):  # noqa: PT011 - it is ours
        construct()


def test_a_meter_that_fails_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(torch.device("cpu"))
    for _ in range(3):
        meter.disable_recording(ValueError("of ours"))
    assert len(caplog.records) == 1
    meter.close()

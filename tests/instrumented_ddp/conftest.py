"""A process group of one rank, in the test's own process: enough for what does not depend on the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from instrumented_ddp import attach
from instrumented_ddp.session import get_current_session
from tests.instrumented_ddp.device_stub import Stub, compile_stub, play_torch


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def traces(tmp_path: Path, lone_rank: None) -> Iterator[Path]:
    """A folder to record into; the process's recorder is closed and forgotten after the test."""
    yield tmp_path / "traces"
    session = get_current_session()
    if session is not None:
        session.close()
    attach(None)  # of the next group nobody has been told anything


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub(stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A CUDA device that exists only here, in the place of torch's."""
    stub = Stub(stub_library)
    play_torch(stub, monkeypatch)
    return stub

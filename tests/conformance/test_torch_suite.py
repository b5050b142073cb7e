"""PyTorch's own tests pass with our class in place of torch's, while it records."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from overlapscope.trace.recording import read_trace
from tests.conformance.fork_server import ForkServer
from tests.conformance.stock_passes import TORCH_VERSION, stock_passes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(
        not version("torch").startswith(f"{TORCH_VERSION}."),
        reason=f"the list of tests is that of torch {TORCH_VERSION}",
    ),
]

OUR_CLASS = "instrumented_ddp:DistributedDataParallel"

MAKES_NO_MODEL = {
    "test_DistributedDataParallel_requires_grad",  # it is refused: there is no gradient to reduce
    "test_ddp_model_diff_num_params_across_ranks",  # it is refused: the ranks' modules differ
    "test_dump_DDP_relevant_env_vars",
}
"""Tests with nothing to record. A recording of any other shows that it was our class that passed."""


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("fork_server") / "log.txt")
    yield server
    server.close()


def listed_tests() -> Iterator[Any]:
    for test in stock_passes():
        cannot_compile = "compile" in test and shutil.which("g++") is None
        skip = pytest.mark.skipif(cannot_compile, reason="torch.compile needs a C++ compiler")
        # Seconds each, of compiling a minute. tests/cluster/same_as_stock compares the same on other models.
        takes_long = any(word in test for word in ("compile", "apply_optim_in_backward", "hook_parity", "localSGD"))
        yield pytest.param(test, marks=[skip, *([pytest.mark.nightly] if takes_long else [])])


@pytest.mark.parametrize("test", list(listed_tests()))
def test_our_class_passes(fork_server: ForkServer, tmp_path: Path, test: str) -> None:
    outcome = fork_server.run(test, ddp_class=OUR_CLASS, folder=tmp_path)
    if outcome.status != "passed":
        pytest.fail(f"{outcome.status}: {outcome.reason}\n{outcome.log}", pytrace=False)
    if test not in MAKES_NO_MODEL:
        trace = read_trace(tmp_path / "trace")
        assert 0 in trace.ranks["rank"].values
        # That logs are not closed is a note, and no error: torch's tests end their ranks without atexit.
        assert trace.errors == []
    shutil.rmtree(tmp_path)  # megabytes, of interest only after a failure


class Refusal:
    """Stands where DistributedDataParallel stood, and can't be made."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("this is not torch's class")


@pytest.mark.parametrize("test", ["test_DistributedDataParallelCPU", "test_ddp_broadcast_buffer"])
def test_the_class_under_test_is_the_one_that_the_tests_construct(
    fork_server: ForkServer, tmp_path: Path, test: str
) -> None:
    outcome = fork_server.run(test, ddp_class=f"{__name__}:{Refusal.__name__}", folder=tmp_path)
    assert outcome.status == "failed"
    assert "this is not torch's class" in outcome.log


def test_the_listed_tests_are_in_the_wheel(fork_server: ForkServer) -> None:
    assert set(stock_passes()) <= set(fork_server.ddp_tests)

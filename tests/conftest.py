"""What all tests share: properties are about results, a loaded machine is no failure, and waiting needs no core."""

from __future__ import annotations

import difflib
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Hundreds of processes import our sources. Where the environment forbids to keep them compiled, each compiles them all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A thread for each core, in each worker and in each of its ranks, would spin where another could compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For a format that none of our schemas has, jsonschema would compile a grammar, for seconds in each worker.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# Every run looks at other examples, so fewer of them at a time find as much over the days. Tests that say how many
# they look at are those whose examples are dear.
settings.register_profile("without a deadline", deadline=None, max_examples=8)
settings.register_profile("gate", deadline=None, max_examples=8, derandomize=True)  # .ci/run
settings.register_profile("thorough", deadline=None, max_examples=100)  # .ci/matrix
settings.load_profile("without a deadline")


GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option that renews golden files: ``pytest --update-golden``, whose diff is then reviewed."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ from what the code says now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare what people read with the golden file ``tests/golden/NAME.txt``.

    Tests assert kinds, ranks, steps and numbers. The wording itself is held here alone, so that a sentence is changed
    in one place in the code and one golden file.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        found = "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found)
            return
        expected = path.read_text() if path.exists() else ""
        if found != expected:
            changes = difflib.unified_diff(expected.splitlines(), found.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join([*changes, "", "If this is meant: pytest --update-golden, and review the diff."]))

    return compare


def pytest_configure() -> None:
    """Let signals reach what tests start: nohup and CI runners have some ignored, which is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # ignored by the tests themselves all the same


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all is imported, and leave that out of later collections, which take seconds with it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)  # for whoever runs without xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: tests that start ranks wait for a third of the time; each worker imports all, for 10 s of a core."""
    return (3 * (os.cpu_count() or 1) + 1) // 2

"""What the package says, and where."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from instrumented_ddp.recording.console import log_to_stderr


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """Of a module of the package; what was installed before is there again afterwards."""
    package = logging.getLogger("instrumented_ddp")
    handlers, propagates = package.handlers[:], package.propagate
    package.handlers = []
    log_to_stderr()
    yield logging.getLogger("instrumented_ddp.some.module")
    package.handlers, package.propagate = handlers, propagates


def test_a_warning_is_one_line_on_what_stderr_is_then(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a", "b"):
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        log.warning("rank %d: %s", 1, text)
        assert sys.stderr.getvalue() == f"overlapscope: rank 1: {text}\n"  # type: ignore[attr-defined]


def test_each_warning_is_said_once(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    log.warning("lost")
    log.info("nobody asked")
    assert capfd.readouterr().err == "overlapscope: lost\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_terminal_that_is_gone_stops_nothing(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    log.warning("lost")

"""An abort that hangs keeps nobody else from being aborted."""

from __future__ import annotations

import threading
from typing import Any

from instrumented_ddp.watchdog import abort


class FakeGroup:
    def __init__(self, backend: str, *, hangs_until: threading.Event | None = None) -> None:
        self.backend = backend
        self.hangs_until = hangs_until
        self.is_aborted = threading.Event()

    def name(self) -> str:
        if not self.backend:
            raise RuntimeError("ProcessGroup has no backend")
        return self.backend

    def abort(self) -> None:
        self.is_aborted.set()
        if self.hangs_until is not None:
            self.hangs_until.wait()


def test_all_groups_but_gloos_are_aborted_though_one_hangs_and_one_can_not_be(monkeypatch):
    monkeypatch.setattr(abort, "_ABORTS_WITHIN_S", 0.2)
    test_is_over = threading.Event()
    groups: list[Any] = [
        FakeGroup("nccl", hangs_until=test_is_over),
        FakeGroup(""),
        FakeGroup("gloo"),
        FakeGroup("nccl"),
    ]
    abort._abort(groups)
    assert groups[0].is_aborted.wait(30)
    assert groups[3].is_aborted.wait(30)
    assert not groups[2].is_aborted.is_set(), "gloo has no abort that ends anything"
    test_is_over.set()

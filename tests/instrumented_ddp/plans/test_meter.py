"""What a meter keeps in memory, while threads still add to it."""

from __future__ import annotations

import sys
import threading

from instrumented_ddp.plans.auto_measuring import MemoryLog
from overlapscope.trace.schema import Kind, pack_body

BODY = pack_body(Kind.COLLECTIVE)


def test_a_log_is_read_while_collectives_end() -> None:
    log = MemoryLog()
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=lambda: [log.append(BODY, step, step, step) for step in range(20_000)])
    writer.start()
    try:
        while writer.is_alive():
            records = log.records()
            assert records["step"].tolist() == list(range(len(records)))
    finally:
        writer.join()
        sys.setswitchinterval(switch_interval_s)
    assert len(log.records()) == 20_000

"""What becomes of the fields of an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.diagnosis.collective_order import UNKNOWN_SIGNATURE, RecordedOrder, decode_entries
from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.trace.collective_log import (
    FAILED,
    SHADOW,
    UNEVEN_INPUTS,
    UNKNOWN,
    UNKNOWN_PHASE,
    CollectiveLogHeader,
    CollectiveLogWriter,
)
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.schema import Phase
from tests.ordered import Collective, bucket, write_order

SITE = CallSite(file="train.py", line=42, function="main")


def decoded(path: Path, **where: int) -> Entry:
    """One entry, announced and read back while its log is open."""
    log = CollectiveLogWriter(path / "log", CollectiveLogHeader(name="0", ranks=(0,), rank=0))
    log.announce(1, bucket(0), now_ns=5, call_site=1, **({"step": 3} | where))
    (entry,) = decode_entries(log.read(1, 1).tolist(), {1: bucket(0)}, {1: SITE})
    log.close()
    return entry


def test_an_entry_has_its_names_for_numbers(tmp_path: Path) -> None:
    entry = decoded(tmp_path, batch=7, phase=Phase.BACKWARD, flags=FAILED)
    assert entry == Entry(
        number=1,
        signature=bucket(0),
        step=3,
        batch=7,
        phase="backward",
        call_site=SITE,
        flags=FAILED,
        announced_ns=5,
        launched_ns=None,
        completed_ns=None,
    )


def test_what_nobody_knows_is_none(tmp_path: Path) -> None:
    entry = decoded(tmp_path, batch=UNKNOWN, phase=UNKNOWN_PHASE)
    assert (entry.batch, entry.phase) == (None, None)


def test_lines_that_are_lost_are_unknown(tmp_path: Path) -> None:
    log = CollectiveLogWriter(tmp_path / "log", CollectiveLogHeader(name="0", ranks=(0,), rank=0))
    log.announce(9, bucket(0), now_ns=5, step=0, call_site=9, phase=0xEE)
    (entry,) = decode_entries(log.read(1, 1).tolist(), {}, {})
    assert (entry.signature, entry.call_site, entry.phase) == (UNKNOWN_SIGNATURE, None, None)


@pytest.mark.parametrize("flags", [UNEVEN_INPUTS, UNEVEN_INPUTS | SHADOW])
def test_inside_join_the_batch_says_nothing(tmp_path: Path, flags: int) -> None:
    assert decoded(tmp_path, batch=7, flags=flags).batch is None


@pytest.mark.parametrize("flags", [0, UNEVEN_INPUTS, UNEVEN_INPUTS | SHADOW, FAILED])
def test_a_process_and_its_files_give_the_same(tmp_path: Path, flags: int) -> None:
    live = decoded(tmp_path, batch=7, phase=Phase.FORWARD, flags=flags)
    one = Collective(
        signature=bucket(0), step=3, batch=7, phase=Phase.FORWARD, flags=flags, now_ns=5, state="announced"
    )
    write_order(tmp_path / "run", {0: [one]})
    source = RecordedOrder(open_collective_logs(find_rank_folders(tmp_path / "run")))
    assert source.entries(source.groups()[0], 0, 1, 1) == (live,)

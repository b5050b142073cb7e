"""Recordings made up record by record, with the real writer, for tests that need exact numbers or bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    DEFAULT_LIMIT_BYTES,
    EVENTS_FILE,
    LINKS_FILE,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    Flag,
    Kind,
    Phase,
    pack_body,
    rank_folder,
)

US = 1_000
BUCKET_ELEMENTS = (256 * 1024, 4 * 1024 * 1024, 2 * 1024 * 1024)
PARAMETERS = (("head.weight", 256 * 1024), ("body.1.weight", 4 * 1024 * 1024), ("body.0.weight", 2 * 1024 * 1024))


def write_recording(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 5,
    world_size: int | None = None,
    close: bool = True,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Path:
    """Write a recording in which every time is known; see ``write_step`` for the numbers."""
    for rank in range(ranks):
        log = make_rank(folder, rank, world_size=world_size or ranks, limit_bytes=limit_bytes)
        for step in range(steps):
            write_step(log, step, begin_ns=1_000_000_000 + step * 10_000 * US + rank * 50 * US)
        if close:
            log.close()
    return folder


def write_straggling_recording(
    folder: Path, *, late_us: Callable[[int, int], int], ranks: int = 4, steps: int = 30, ranks_per_host: int = 4
) -> Path:
    """Write a recording in which ranks wait for each other.

    Args:
        late_us: how much longer than 2 ms the forward of a rank takes in a step.
    """
    logs = [make_rank(folder, rank, world_size=ranks, host=f"node{rank // ranks_per_host}") for rank in range(ranks)]
    begin_ns = 1_000_000_000
    for step in range(steps):
        last_us = max(late_us(rank, step) for rank in range(ranks))
        for rank, log in enumerate(logs):
            write_step(log, step, begin_ns, late_us=late_us(rank, step), last_us=last_us)
        begin_ns += (10_000 + last_us) * US
    for log in logs:
        log.close()
    return folder


def make_rank(
    folder: Path, rank: int, *, world_size: int, limit_bytes: int = DEFAULT_LIMIT_BYTES, host: str = "node0"
) -> EventLogWriter:
    """A rank's folder with its JSON files and an empty log."""
    rank_dir = rank_folder(folder, rank)
    rank_dir.mkdir(parents=True)
    write_json(
        rank_dir / RUN_FILE,
        {
            "format_version": 1,
            "world_size": world_size,
            "backend": "gloo",
            "detail": "parameters",
            "argv": ["train.py"],
            "started_unix_ns": 1_700_000_000_000_000_000,
            "versions": {"torch": "2.13.0", "python": "3.11.7", "overlapscope": "0.1.0"},
            "models": [{"model": 0, "class": "GPT", "ddp_arguments": {"bucket_cap_mb": None}}],
        },
    )
    write_json(
        rank_dir / RANK_FILE,
        {
            "rank": rank,
            "host": host,
            "pid": 1000 + rank,
            "device": "cpu",
            "boot_id": "synthetic",
            "clock_samples": [{"monotonic_ns": 1_000_000_000, "unix_ns": 1_700_000_000_000_000_000}],
        },
    )
    buckets = [
        {
            "dtype": "float32",
            "device": "cpu",
            "bytes": elements * 4,
            "parameters": [
                {"index": index, "name": name, "shape": [elements], "elements": elements, "bytes": elements * 4}
            ],
        }
        for index, (name, elements) in enumerate(PARAMETERS)
    ]
    plan = {"model": 0, "epoch": 0, "hash": "0" * 64, "reason": "construction", "buckets": buckets}
    (rank_dir / PLANS_FILE).write_text(json.dumps(plan) + "\n")
    site = {"call_site": 1, "file": "train.py", "line": 42, "function": "main"}
    (rank_dir / CALL_SITES_FILE).write_text(json.dumps(site) + "\n")
    return EventLogWriter(rank_dir / EVENTS_FILE, limit_bytes)


def write_step(
    log: EventLogWriter, step: int, begin_ns: int, late_us: int = 0, last_us: int = 0, plan_epoch: int = 0
) -> None:
    """One step of 10 ms.

    In microseconds from its begin: data wait 0-500, forward 500-2500, backward 3000-7000, finalize 7000-8500,
    optimizer 8500-10000. All-reduces: bucket 0 4000-4800, bucket 1 5000-6500, bucket 2 6900-8300.
    The three copies out take 20 us each, 8320-8380. Compute is forward, backward, optimizer and the copies out:
    2000 + 4000 + 1500 + 60 = 7560 us. Communication is 800 + 1500 + 1400 = 3700 us, of it 800 + 1500 + 100 = 2400
    under backward and none under the copies out, so 1300 us are exposed.

    Args:
        late_us: how much longer forward takes, so that everything after it is later.
        last_us: how much longer the forward of the last rank takes, so that all-reduces end later on all ranks.
        plan_epoch: of the bucket plan, which has the buckets of all others.
    """

    def span(kind: Kind, start_us: int, end_us: int, **body: object) -> None:
        # All ranks are let go together.
        end_ns = begin_ns + (end_us + last_us) * US if kind is Kind.COLLECTIVE else moment_ns(end_us)
        log.append(pack_body(kind, **body), step, moment_ns(start_us), end_ns)  # type: ignore[arg-type]

    def moment_ns(usual_us: int) -> int:
        delay_us = 0 if usual_us <= 500 else late_us if usual_us <= 7000 else last_us
        return begin_ns + (usual_us + delay_us) * US

    def phase(phase: Phase, start_us: int, end_us: int) -> None:
        span(Kind.PHASE_BEGIN, start_us, start_us, index=phase)
        span(Kind.PHASE, start_us, end_us, index=phase)

    phase(Phase.DATA_WAIT, 0, 500)
    phase(Phase.FORWARD, 500, 2500)
    span(Kind.PHASE_BEGIN, 3000, 3000, index=Phase.BACKWARD)
    for bucket, (ready_us, start_us) in enumerate(((3950, 4000), (4950, 5000), (6850, 6900))):
        what = {"index": bucket, "dtype": "float32", "elements": BUCKET_ELEMENTS[bucket], "plan_epoch": plan_epoch}
        span(Kind.GRADIENT_READY, ready_us, ready_us, **what)
        span(Kind.BUCKET_READY, ready_us, ready_us, **what)
        span(Kind.COPY_IN, ready_us, ready_us + 40, **what)
        span(Kind.LAUNCH, start_us, start_us, op="all_reduce", call_site=1, **what)
    span(Kind.PHASE, 3000, 7000, index=Phase.BACKWARD)
    span(Kind.PHASE_BEGIN, 7000, 7000, index=Phase.FINALIZE)
    for bucket, (start_us, end_us) in enumerate(((4000, 4800), (5000, 6500), (6900, 8300))):
        what = {"index": bucket, "dtype": "float32", "elements": BUCKET_ELEMENTS[bucket], "plan_epoch": plan_epoch}
        flags = Flag.START_IS_LOWER_BOUND | Flag.END_IS_UPPER_BOUND
        span(Kind.COLLECTIVE, start_us, end_us, op="all_reduce", flags=flags, **what)
        span(Kind.COPY_OUT, 8320 + 20 * bucket, 8340 + 20 * bucket, **what)
    phase(Phase.OPTIMIZER, 8500, 10_000)
    span(Kind.PHASE, 7000, 8500, index=Phase.FINALIZE)
    span(Kind.STEP, 0, 10_000)


def add_link_sample(folder: Path, rank: int, time_ns: int, *connections: dict[str, object]) -> None:
    """Add a line to a rank's ``links.jsonl``; a connection has its ends and the counters that are not 0."""
    counters = ("bytes_acked", "bytes_received", "busy_us", "rwnd_limited_us", "sndbuf_limited_us")
    unused = dict.fromkeys((*counters, "delivery_bytes_per_s", "rtt_us", "min_rtt_us", "retransmits"), 0)
    sample = {"time_ns": time_ns, "connections": [unused | connection for connection in connections]}
    with (rank_folder(folder, rank) / LINKS_FILE).open("a") as file:
        file.write(json.dumps(sample) + "\n")

"""Synthetic recordings of any size, to estimate the disk space, time and memory of a real one.

Hosts have eight ranks each, and separate clocks that were compared by pings. In every step a rank waits for data, runs
forward and backward, finalizes the gradients, and updates; its buckets become ready during backward, are reduced one
after the other once the last rank has them ready, and end for all ranks at the same time. All durations vary by a few
percent, and one rank computes 10 % longer than the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.event_log import RECORD_DTYPE, Records, serialize_event_log
from overlapscope.trace.json_files import dump_json_line, write_json
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    CLOCK_FILE,
    DTYPES,
    EVENTS_FILE,
    FORMAT_VERSION,
    OPS,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    Kind,
    Phase,
    rank_folder,
)

RANKS_PER_HOST: Final = 8

_US: Final = 1_000
_MS: Final = 1_000_000
_BEGIN_NS: Final = 1_000_000_000_000
_UNIX_NS: Final = 1_700_000_000_000_000_000
_MEAN_PHASE_NS: Final = {
    Phase.DATA_WAIT: 1 * _MS,
    Phase.FORWARD: 25 * _MS,
    Phase.BACKWARD: 50 * _MS,
    Phase.FINALIZE: _MS // 2,  # after the last bucket has ended
    Phase.OPTIMIZER: 4 * _MS,
}
_COMMUNICATION_NS: Final = 45 * _MS
_TOTAL_GRADIENT_BYTES: Final = 512 * 1024**2
"""Bytes of all gradients."""
_NOISE: Final = 0.03
_SLOW_RANK_FACTOR: Final = 1.1
_BEFORE_FORWARD: Final = (Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD)
_PING_NS: Final = 40 * _US
_CLOCK_OFFSET_NS: Final = 1_234_567_890


@dataclass(frozen=True, kw_only=True, eq=False)
class _SyntheticJob:
    """Times of a synthetic job in nanoseconds; S steps, R ranks, B buckets."""

    local_ns: dict[Phase, npt.NDArray[np.int64]]
    """(S, R) duration of each phase."""
    begin_ns: npt.NDArray[np.int64]
    """(S, R) start of each step."""
    reduced_ns: npt.NDArray[np.int64]
    """(S, B) time at which each bucket has been reduced, on all ranks."""


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """What tells one run of a synthetic job from another."""

    slow_rank: int | None
    """The rank that computes longer than the others; None if none does."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts, in the order of the ranks on them; by default ``node0``, ``node1`` ..."""
    started_unix_ns: int = _UNIX_NS
    model: str = "Synthetic"
    seed: int | None = None
    """Of the noise; by default that of the job, so that it is always the same."""


def write_recording(
    folder: Path,
    ranks: int,
    steps: int,
    buckets: int,
    progress: Callable[[int, int], None] | None = None,
    run: SyntheticRun | None = None,
) -> None:
    """Write the recording of a synthetic job.

    Args:
        folder: A folder that has no recording yet.
        progress: Called with the numbers of ranks written and of all ranks.
        run: By default that of ``overlapscope lab synth``.

    Raises:
        OverlapScopeError: The recording can't be written.
    """
    run = run or SyntheticRun(slow_rank=ranks // 3 if ranks > 1 else None)
    job = _simulate_job(ranks, steps, buckets, run)
    try:
        for rank in range(ranks):
            if progress:
                progress(rank, ranks)
            _write_rank(rank_folder(folder, rank), job, rank, run)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be written ({error.strerror})") from None


def estimate_bytes(ranks: int, steps: int, buckets: int) -> int:
    """Compute the size of the event logs."""
    return ranks * steps * _records_per_step(buckets) * RECORD_DTYPE.itemsize


def _records_per_step(buckets: int) -> int:
    return 1 + 2 * len(_MEAN_PHASE_NS) + 3 * buckets


def _simulate_job(ranks: int, steps: int, buckets: int, run: SyntheticRun) -> _SyntheticJob:
    random = np.random.default_rng(ranks * 1_000_003 + steps if run.seed is None else run.seed)

    def about(usual_ns: float, *shape: int) -> npt.NDArray[np.int64]:
        return (usual_ns * np.exp(_NOISE * random.standard_normal(shape))).astype(np.int64)

    local_ns = {phase: about(usual_ns, steps, ranks) for phase, usual_ns in _MEAN_PHASE_NS.items()}
    if run.slow_rank is not None:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            own_ns = local_ns[phase][:, run.slow_rank]
            local_ns[phase][:, run.slow_rank] = (own_ns * _SLOW_RANK_FACTOR).astype(np.int64)
    transfer_ns = about(_COMMUNICATION_NS / buckets, steps, buckets)
    begin_ns = np.zeros((steps, ranks), dtype=np.int64)
    reduced_ns = np.zeros((steps, buckets), dtype=np.int64)
    now_ns = np.full(ranks, _BEGIN_NS)
    for step in range(steps):
        begin_ns[step] = now_ns
        own = {phase: of_steps[step] for phase, of_steps in local_ns.items()}
        reduced_ns[step] = _serialized_ends_ns(_ready_ns(now_ns, own, buckets).max(axis=0), transfer_ns[step])
        released_ns = np.maximum(now_ns + sum(own[phase] for phase in _BEFORE_FORWARD), reduced_ns[step, -1])
        now_ns = released_ns + own[Phase.FINALIZE] + own[Phase.OPTIMIZER]
    return _SyntheticJob(local_ns=local_ns, begin_ns=begin_ns, reduced_ns=reduced_ns)


def _ready_ns(
    begin_ns: npt.NDArray[np.int64], local_ns: dict[Phase, npt.NDArray[np.int64]], buckets: int
) -> npt.NDArray[np.int64]:
    """Compute (n, B) the ready times of buckets for steps of all ranks that begin at the times (n,)."""
    backward_ns = begin_ns + local_ns[Phase.DATA_WAIT] + local_ns[Phase.FORWARD]
    share = np.arange(1, buckets + 1) / buckets
    return backward_ns[:, None] + (local_ns[Phase.BACKWARD][:, None] * share).astype(np.int64)


def _serialized_ends_ns(ready_ns: npt.NDArray[np.int64], takes_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Compute (B,) the end of each bucket, if each begins when it is ready and the previous one has ended.

    Example: ready at 10, 12 and 30, taking 5 each, they end at 15, 20 and 35.
    """
    before_ns = np.cumsum(takes_ns) - takes_ns
    ended_ns: npt.NDArray[np.int64] = np.maximum.accumulate(ready_ns - before_ns) + before_ns + takes_ns
    return ended_ns


def _write_rank(folder: Path, job: _SyntheticJob, rank: int, run: SyntheticRun) -> None:
    ranks, buckets, host = job.begin_ns.shape[1], job.reduced_ns.shape[1], rank // RANKS_PER_HOST
    shift_ns = host * _CLOCK_OFFSET_NS
    folder.mkdir(parents=True)
    described = {
        "format_version": FORMAT_VERSION,
        "world_size": ranks,
        "ranks": list(range(ranks)),
        "backend": "nccl",
        "detail": "buckets",
        "started_unix_ns": run.started_unix_ns,
        "versions": {},
        "models": [{"model": 0, "class": run.model, "ddp_arguments": {}}],
        "imported": {"from": "overlapscope lab synth", "notes": ["Made up: no such job ever ran."]},
    }
    write_json(folder / RUN_FILE, described)
    where = {
        "rank": rank,
        "host": run.hosts[host] if run.hosts else f"node{host}",
        "pid": -1,
        "device": f"cuda:{rank % RANKS_PER_HOST}",
        "boot_id": f"synthetic {host}",
        "clock_samples": [{"monotonic_ns": _BEGIN_NS + shift_ns, "unix_ns": run.started_unix_ns}],
    }
    write_json(folder / RANK_FILE, where)
    (folder / PLANS_FILE).write_text(dump_json_line(_plan(buckets)), encoding="utf-8")
    (folder / CALL_SITES_FILE).touch()
    if host and rank % RANKS_PER_HOST == 0:
        ends_ns = (_BEGIN_NS, int(job.reduced_ns[-1, -1]))
        pings = "".join(json.dumps(_ping_burst(moment_ns, shift_ns)) + "\n" for moment_ns in ends_ns)
        (folder / CLOCK_FILE).write_text(pings, encoding="utf-8")
    (folder / EVENTS_FILE).write_bytes(serialize_event_log(_make_records(job, rank, shift_ns)))
    write_manifest(folder)


def _plan(buckets: int) -> dict[str, Any]:
    elements = _TOTAL_GRADIENT_BYTES // 4 // buckets
    described = [
        {
            "dtype": "float32",
            "device": "cuda",
            "bytes": 4 * elements,
            "parameters": [
                {
                    "index": bucket,
                    "name": f"layers.{buckets - 1 - bucket}.weight",
                    "shape": [elements],
                    "elements": elements,
                    "bytes": 4 * elements,
                }
            ],
        }
        for bucket in range(buckets)
    ]
    digest = hashlib.sha256(repr(described).encode()).hexdigest()
    return {"model": 0, "epoch": 0, "hash": digest, "reason": "construction", "buckets": described}


def _ping_burst(moment_ns: int, shift_ns: int) -> dict[str, Any]:
    """Return the pings of a host whose clock is ahead by ``shift_ns``; rank 0 answers in the middle."""
    ping = [moment_ns + shift_ns, moment_ns + _PING_NS // 2, moment_ns + shift_ns + _PING_NS]
    return {"reason": "synthetic", "reference": "synthetic 0", "pings": 1, "best": [ping]}


def _make_records(job: _SyntheticJob, rank: int, shift_ns: int) -> Records:
    """Return the records of a rank, in the time of its host."""
    steps, buckets = job.reduced_ns.shape
    local_ns = {phase: job.local_ns[phase][:, rank] for phase in _MEAN_PHASE_NS}
    records = np.zeros((steps, _records_per_step(buckets)), dtype=RECORD_DTYPE)
    records["step"] = np.arange(steps)[:, None]
    now_ns, offset = job.begin_ns[:, rank], 0

    def add_records(kind: Kind, start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64], **content: Any) -> None:
        nonlocal offset
        rows = records[:, offset : offset + end_ns.shape[1]]
        rows["kind"], rows["start_ns"], rows["end_ns"] = kind, start_ns, end_ns
        for name, value in content.items():
            rows[name] = value
        offset += end_ns.shape[1]

    def phase(which: Phase, end_ns: npt.NDArray[np.int64]) -> None:
        nonlocal now_ns
        add_records(Kind.PHASE_BEGIN, now_ns[:, None], now_ns[:, None], index=which)
        add_records(Kind.PHASE, now_ns[:, None], end_ns[:, None], index=which)
        now_ns = end_ns

    ready_ns = _ready_ns(now_ns, local_ns, buckets)
    for which in _BEFORE_FORWARD:
        phase(which, now_ns + local_ns[which])
    phase(Phase.FINALIZE, np.maximum(now_ns, job.reduced_ns[:, -1]) + local_ns[Phase.FINALIZE])
    phase(Phase.OPTIMIZER, now_ns + local_ns[Phase.OPTIMIZER])
    sent = {
        "op": OPS.index("all_reduce"),
        "dtype": DTYPES.index("float32"),
        "elements": _TOTAL_GRADIENT_BYTES // 4 // buckets,
    }
    number = np.arange(buckets)
    add_records(Kind.BUCKET_READY, ready_ns, ready_ns, index=number)
    add_records(Kind.LAUNCH, ready_ns, ready_ns, index=number, **sent)
    add_records(Kind.COLLECTIVE, ready_ns, job.reduced_ns, index=number, **sent)
    add_records(Kind.STEP, job.begin_ns[:, rank][:, None], now_ns[:, None])
    flat = records.reshape(-1)
    flat = flat[np.argsort(flat["end_ns"], kind="stable")]
    flat["sequence"] = np.arange(1, len(flat) + 1)
    for edge in ("start_ns", "end_ns"):
        flat[edge] += shift_ns
    return flat

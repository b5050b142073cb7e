"""Recordings of jobs that nobody would make up by hand: drift, jumps, heavy tails, few steps, idle and busy links.

Everything of a job is drawn from its seed. A discrete simulation, step by step and bucket by bucket, says when ranks
compute and wait, and the records of all ranks are written in the real format. Noise is that of ``tests.noise``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapscope.bucket_model.partition import Buckets, Gradients
from overlapscope.bucket_model.plans import default_plan, uniform_plans
from overlapscope.trace.event_log import RECORD_DTYPE, serialize_event_log
from overlapscope.trace.json_files import write_json
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    DTYPES,
    EVENTS_FILE,
    OPS,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    Flag,
    Kind,
    Phase,
    rank_folder,
)
from tests.noise import Floats, Noise, autoregressive, bimodal, bursts, heavy_tailed

BEGIN_NS = 1_000_000_000
MS = 1_000_000
NOISE: dict[str, Noise] = {
    "normal": autoregressive(0.0),
    "AR 0.9": autoregressive(0.9),
    "drifting": autoregressive(0.99),
    "heavy-tailed": heavy_tailed,
    "bimodal": bimodal,
    "bursts": bursts,
}
COURSES = ("level", "level", "falls", "settles", "rises", "jumps", "saws")
"""How the step time goes on average."""
SHARES = {"data_wait": 0.05, "forward": 0.3, "inter_phase": 0.02, "backward": 0.5, "optimizer": 0.1}
"""Of a step's compute."""


@dataclass(frozen=True, kw_only=True)
class MadeUpJob:
    """A job, and how it was recorded."""

    seed: int
    ranks: int
    ranks_per_host: int
    steps: int
    backend: str
    gradient_bytes: tuple[int, ...]
    """In the order in which gradients become ready."""
    plans: tuple[Buckets, ...]
    """In the order in which steps take turns with them, some steps each."""
    compute_ms: float
    """Of a step, on average."""
    communication: float
    """Time of all all-reduces as a share of backward."""
    latency_share: float
    """Of that, how much doesn't depend on size."""
    noise: str
    amplitude: float
    """Standard deviation of compute as a share of it."""
    is_noise_shared: bool
    """True if all ranks have the same noise."""
    course: str
    change: float
    """Factor by which the step time changes in its course."""
    delay: float
    """Share by which rank 0 computes longer."""
    delayed: str
    """In which steps: ``every``, ``second half``, ``every fifth``."""
    has_copies: bool
    has_evaluations: bool

    def __str__(self) -> str:
        """Describe it on a line."""
        return (
            f"seed {self.seed}: {self.steps} steps of {self.ranks} ranks over {self.backend}, {self.noise} noise of "
            f"{self.amplitude:.0%}, {self.course} x{self.change:.2g}, communication {self.communication:.2g} of "
            f"backward in {'/'.join(str(len(plan)) for plan in self.plans)} buckets, "
            f"rank 0 {self.delay:+.0%} in {self.delayed}"
        )


def make_up_job(seed: int) -> MadeUpJob:
    """Draw a job."""
    rng = np.random.default_rng([39, seed])
    sizes = (rng.lognormal(0.0, 1.5, int(rng.integers(1, 13))) * 2**20).astype(np.int64) // 4 * 4 + 4
    gradients = Gradients(
        names=tuple(f"layer{index}.weight" for index in range(len(sizes))),
        bytes=sizes,
        kinds=np.zeros(len(sizes), dtype=np.int64),
        order=np.arange(len(sizes)),
    )
    every = [default_plan(gradients).buckets, *(plan.buckets for plan in uniform_plans(gradients))]
    number = int(rng.choice([1, 1, 1, 2, 3]))
    plans = dict.fromkeys(every[int(index)] for index in rng.integers(0, len(every), number))
    return MadeUpJob(
        seed=seed,
        ranks=int(rng.choice([1, 2, 2, 2, 3, 4, 8])),
        ranks_per_host=int(rng.choice([2, 8])),
        steps=int(rng.choice([1, 2, 4, 6, 9, 12, 16, 25, 40, 80])),
        backend=str(rng.choice(["gloo", "nccl"])),
        gradient_bytes=tuple(sizes.tolist()),
        plans=tuple(plans),
        compute_ms=float(10 ** rng.uniform(-0.5, 2.7)),
        communication=float(10 ** rng.uniform(-2, 0.7)),
        latency_share=float(rng.choice([0.0, 0.1, 0.9])),
        noise=str(rng.choice(list(NOISE))),
        amplitude=float(rng.choice([0.0, 0.01, 0.05, 0.2, 0.6])),
        is_noise_shared=bool(rng.random() < 0.3),
        course=str(rng.choice(COURSES)),
        change=float(10 ** rng.uniform(0.05, 0.7)),
        delay=float(rng.choice([0.0, 0.0, 0.05, 0.2, 1.0])),
        delayed=str(rng.choice(["every", "every", "second half", "every fifth"])),
        has_copies=bool(rng.random() < 0.7),
        has_evaluations=bool(rng.random() < 0.15),
    )


def write_made_up_job(job: MadeUpJob, folder: Path) -> Path:
    """Simulate a job and write what would have been recorded of it."""
    logs = _Simulation(job).run()
    for rank, rows in enumerate(logs):
        _write_rank(job, folder, rank, rows)
    return folder


def _course(job: MadeUpJob) -> Floats:
    """Return the factor of each step's time (S,)."""
    when = np.arange(job.steps) / max(1, job.steps - 1)
    more = job.change - 1
    return {
        "level": np.ones(job.steps),
        "falls": 1 + more * (1 - when),
        "settles": 1 + more * np.exp(-8 * when),
        "rises": 1 + more * when,
        "jumps": 1 + more * (when > 0.6),
        "saws": 1 + more * (4 * when % 1),
    }[job.course]


Row = tuple[Any, ...]
"""Kind, step, start, end and, as a dictionary, what else a record says."""


class _Simulation:
    """A job, step by step."""

    def __init__(self, job: MadeUpJob) -> None:
        self._job = job
        rng = np.random.default_rng([40, job.seed])
        shape = (job.steps, job.ranks)
        noise = NOISE[job.noise](rng, job.steps, 1 if job.is_noise_shared else job.ranks)
        factor = _course(job)[:, None] * np.maximum(1 + job.amplitude * np.broadcast_to(noise, shape), 0.02)
        late = {
            "every": np.ones(job.steps, dtype=bool),
            "second half": np.arange(job.steps) >= job.steps // 2,
            "every fifth": np.arange(job.steps) % 5 == 0,
        }[job.delayed]
        factor[late, 0] *= 1 + job.delay
        own = np.exp(0.01 * rng.standard_normal((len(SHARES), *shape)))
        self._phase_ns = {
            name: share * job.compute_ms * MS * factor * one
            for (name, share), one in zip(SHARES.items(), own, strict=True)
        }
        total = sum(job.gradient_bytes)
        transfer_ns = job.communication * SHARES["backward"] * job.compute_ms * MS
        self._latency_ns = job.latency_share * transfer_ns / len(job.plans[0])
        self._byte_ns = (1 - job.latency_share) * transfer_ns / total
        self._copy_byte_ns = 0.02 * job.compute_ms * MS / total if job.has_copies else 0.0
        self._link = np.maximum(1 + job.amplitude * NOISE[job.noise](rng, job.steps, 1)[:, 0], 0.05)
        self._shares = np.cumsum(rng.dirichlet(np.full(len(job.gradient_bytes), 3.0)))
        self._rows: list[list[Row]] = [[] for _ in range(job.ranks)]

    def run(self) -> list[list[Row]]:
        """Return the records of each rank."""
        begin_ns = np.full(self._job.ranks, float(BEGIN_NS))
        for step in range(self._job.steps):
            begin_ns = self._step(step, begin_ns)
        return self._rows

    def _step(self, step: int, begin_ns: Floats) -> Floats:
        job = self._job
        epoch = step // 3 % len(job.plans)
        plan, phase_ns = job.plans[epoch], {name: ns[step] for name, ns in self._phase_ns.items()}
        now_ns = self._phase(Phase.DATA_WAIT, step, begin_ns, begin_ns + phase_ns["data_wait"])
        now_ns = self._phase(Phase.FORWARD, step, now_ns, now_ns + phase_ns["forward"]) + phase_ns["inter_phase"]
        ready_ns = now_ns[:, None] + phase_ns["backward"][:, None] * self._shares
        end_ns = now_ns + phase_ns["backward"]
        for parameter in range(len(job.gradient_bytes)):
            self._add(Kind.GRADIENT_READY, step, ready_ns[:, parameter], index=parameter, plan_epoch=epoch)
        ends_ns = self._reduce(step, epoch, plan, ready_ns)
        self._phase(Phase.BACKWARD, step, now_ns, end_ns)
        now_ns = np.maximum(end_ns, max(ends_ns, default=0.0))
        for number, bucket in enumerate(plan):
            copied_ns = now_ns + self._copy_byte_ns * self._size(bucket)
            if job.has_copies:
                self._add(Kind.COPY_OUT, step, now_ns, copied_ns, **self._what(number, epoch, bucket))
            now_ns = copied_ns
        now_ns = self._phase(Phase.FINALIZE, step, end_ns, now_ns + 1000)
        now_ns = self._phase(Phase.OPTIMIZER, step, now_ns, now_ns + phase_ns["optimizer"])
        if job.has_evaluations and step % 7 == 6:
            now_ns = self._phase(Phase.EVALUATION, step, now_ns, now_ns + 2 * phase_ns["forward"])
        self._add(Kind.STEP, step, begin_ns, now_ns)
        return now_ns

    def _reduce(self, step: int, epoch: int, plan: Buckets, ready_ns: Floats) -> list[float]:
        """Return when each bucket has been reduced; with one rank no sooner than it takes."""
        job = self._job
        lanes, ends_ns = [0.0] * (2 if job.backend == "gloo" else 1), []
        launch_ns = np.zeros(job.ranks)
        flags = Flag.START_IS_LOWER_BOUND | Flag.END_IS_UPPER_BOUND if job.backend == "gloo" else Flag.DEVICE_CLOCK
        for number, bucket in enumerate(plan):
            what = self._what(number, epoch, bucket)
            of_bucket_ns = ready_ns[:, list(bucket)].max(axis=1)
            copied_ns = of_bucket_ns + self._copy_byte_ns * self._size(bucket)
            launch_ns = np.maximum(launch_ns, copied_ns)
            start_ns = max(float(launch_ns.max()), lanes[0])
            takes_ns = (self._latency_ns + self._byte_ns * self._size(bucket)) * self._link[step]
            lanes = sorted([*lanes[1:], start_ns + takes_ns])
            ends_ns.append(start_ns + takes_ns)
            self._add(Kind.BUCKET_READY, step, of_bucket_ns, **what)
            if job.has_copies:
                self._add(Kind.COPY_IN, step, of_bucket_ns, copied_ns, **what)
            reduced = what | {"op": OPS.index("all_reduce"), "call_site": 1}
            self._add(Kind.LAUNCH, step, launch_ns, **reduced)
            from_ns = launch_ns if job.backend == "gloo" else np.full(job.ranks, start_ns)
            self._add(Kind.COLLECTIVE, step, from_ns, np.full(job.ranks, ends_ns[-1]), flags=flags, **reduced)
        return ends_ns

    def _size(self, bucket: tuple[int, ...]) -> int:
        return sum(self._job.gradient_bytes[index] for index in bucket)

    def _what(self, number: int, epoch: int, bucket: tuple[int, ...]) -> dict[str, int]:
        size = self._size(bucket)
        return {"index": number, "plan_epoch": epoch, "elements": size // 4, "dtype": DTYPES.index("float32")}

    def _phase(self, phase: Phase, step: int, start_ns: Floats, end_ns: Floats) -> Floats:
        self._add(Kind.PHASE_BEGIN, step, start_ns, index=phase)
        self._add(Kind.PHASE, step, start_ns, end_ns, index=phase)
        return end_ns

    def _add(self, kind: Kind, step: int, start_ns: Floats, end_ns: Floats | None = None, **content: int) -> None:
        for rank, rows in enumerate(self._rows):
            start = int(start_ns[rank])
            rows.append((kind, step, start, start if end_ns is None else int(end_ns[rank]), content))


def _write_rank(job: MadeUpJob, folder: Path, rank: int, rows: list[Row]) -> None:
    rank_dir = rank_folder(folder, rank)
    rank_dir.mkdir(parents=True)
    run = {
        "format_version": 1,
        "world_size": job.ranks,
        "ranks": list(range(job.ranks)),
        "backend": job.backend,
        "detail": "parameters",
        "argv": ["train.py"],
        "started_unix_ns": 1_700_000_000_000_000_000,
        "versions": {"torch": "2.13.0"},
        "models": [{"model": 0, "class": "MadeUp", "ddp_arguments": {"bucket_cap_mb": None}}],
    }
    write_json(rank_dir / RUN_FILE, run)
    where = {
        "rank": rank,
        "host": f"node{rank // job.ranks_per_host}",
        "pid": -1,
        "device": "cpu" if job.backend == "gloo" else f"cuda:{rank % job.ranks_per_host}",
        "boot_id": "made up",
        "clock_samples": [{"monotonic_ns": BEGIN_NS, "unix_ns": 1_700_000_000_000_000_000}],
    }
    write_json(rank_dir / RANK_FILE, where)
    lines = [json.dumps(_describe_plan(job, epoch)) + "\n" for epoch in range(len(job.plans))]
    (rank_dir / PLANS_FILE).write_text("".join(lines))
    site = {"call_site": 1, "file": "train.py", "line": 42, "function": "main"}
    (rank_dir / CALL_SITES_FILE).write_text(json.dumps(site) + "\n")
    (rank_dir / EVENTS_FILE).write_bytes(serialize_event_log(_make_records(rows)))
    write_manifest(rank_dir)


def _describe_plan(job: MadeUpJob, epoch: int) -> dict[str, Any]:
    def parameter(index: int) -> dict[str, Any]:
        size = job.gradient_bytes[index]
        name, elements = f"layer{index}.weight", size // 4
        return {"index": index, "name": name, "shape": [elements], "elements": elements, "bytes": size}

    buckets = [
        {
            "dtype": "float32",
            "device": "cpu",
            "bytes": sum(job.gradient_bytes[index] for index in bucket),
            "parameters": [parameter(index) for index in bucket],
        }
        for bucket in job.plans[epoch]
    ]
    return {"model": 0, "epoch": epoch, "hash": f"{epoch:064x}", "reason": "construction", "buckets": buckets}


def _make_records(rows: list[Row]) -> npt.NDArray[Any]:
    records = np.zeros(len(rows), dtype=RECORD_DTYPE)
    for name, values in zip(("kind", "step", "start_ns", "end_ns"), zip(*rows, strict=True), strict=False):
        records[name] = values
    for number, (*_, content) in enumerate(rows):
        for name, value in content.items():
            records[name][number] = value
    records = records[np.argsort(records["end_ns"], kind="stable")]
    records["sequence"] = np.arange(1, len(records) + 1)
    return records

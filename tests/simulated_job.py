"""Recordings of jobs that never ran, in which the cause and the cost of every delay are known.

A discrete simulation, step by step and bucket by bucket, of what ranks do and wait for. It shares no code with
``overlapscope.analysis``, and is quick enough for a thousand ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import DTYPES, EVENTS_FILE, NO_INDEX, OPS, RECORD_FIELDS, Kind, LogHeader, rank_folder
from overlapscope.trace.tables import MODE_COLUMNS, PHASE_NAMES, SEGMENT_COLUMNS
from tests.synthetic import make_rank

MS = 1_000_000
BEGIN_NS = 5_000_000_000
PHASES = ("finalize", "optimizer", "data_wait", "forward", "inter_phase", "backward")
LINK_COLUMNS = [
    *("rank", "time_ns", "local", "peer", "peer_rank", "bytes_acked", "bytes_received", "busy_us"),
    *("rwnd_limited_us", "delivery_bytes_per_s", "rtt_us", "min_rtt_us", "retransmits"),
]
BUCKET_BYTES = (1024**2, 4 * 1024**2, 4 * 1024**2, 2 * 1024**2)


def _usual() -> dict[str, int]:
    return {"finalize": 1, "optimizer": 3, "data_wait": 2, "forward": 10, "inter_phase": 1, "backward": 20}


@dataclass
class Job:
    """A job of which every time is known. Change ``local_ns``, ``transfer_ns`` ... and then ``run`` it."""

    ranks: int = 4
    steps: int = 60
    noise: float = 0.0
    """Standard deviation of every phase, as a share of it."""
    seed: int = 0
    ranks_per_host: int = 8
    gc: list[tuple[int, int, str, int]] = field(default_factory=list)
    """Garbage collections: rank, step, phase, nanoseconds."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shape = (self.steps, self.ranks)
        self.local_ns: dict[str, npt.NDArray[np.int64]] = {
            name: np.maximum(0, usual * MS * (1 + self.noise * random.standard_normal(shape))).astype(np.int64)
            for name, usual in _usual().items()
        } | {"loop": np.zeros(shape, dtype=np.int64)}
        self.carried_over_ns = np.zeros(shape, dtype=np.int64)
        """How much later than the others a rank is let go by the step."""
        self.ready_at = np.array([0.25, 0.5, 0.75, 1.0])
        """When each bucket is ready, as a share of backward."""
        self.transfer_ns = np.tile(np.array([1, 3, 3, 2]) * MS, (self.steps, 1)).astype(np.int64)
        self.links: list[tuple[Any, ...]] = []
        """Rows of the table of links."""
        self.broadcast_ns: int | None = None
        """How long rank 0's buffers take to all others, if they are broadcast."""

    def slow_down(self, rank: int, share: float, steps: slice = slice(None)) -> None:
        """More time in forward and backward."""
        for phase in ("forward", "backward"):
            self.local_ns[phase][steps, rank] += (share * _usual()[phase] * MS).__trunc__()

    def measure_links(self, rates_bytes_per_s: dict[int, float]) -> None:
        """Have the kernel count what each rank sends to the next one in a ring of gloo's: the rate of each."""
        total_bytes = self.steps * sum(BUCKET_BYTES) * 2 * (self.ranks - 1) // self.ranks
        for rank, rate in rates_bytes_per_s.items():
            peer = (rank + 1) % self.ranks
            ends = (f"10.0.0.{rank}:1000", f"10.0.0.{peer}:2000")
            for time_ns, sent in ((BEGIN_NS + 1000 * MS, 0), (BEGIN_NS + 9000 * MS, total_bytes)):
                busy_us = int(1e6 * sent / rate)
                self.links.append((rank, time_ns, *ends, peer, sent, 0, busy_us, 0, int(rate), 100, 50, 0))

    def run(self, path: str = "simulated") -> Trace:
        """The recording."""
        for rank, step, phase, pause_ns in self.gc:
            self.local_ns[phase][step, rank] += pause_ns
        release_ns = np.full(self.ranks, BEGIN_NS, dtype=np.int64)
        step_begin_ns = release_ns.copy()
        columns: dict[str, list[Any]] = {name: [] for name in ("steps", "phases", "collectives")}
        self.last_arrivals_ns: list[npt.NDArray[np.int64]] = []
        self.ends_ns: list[int] = []
        finalize_begin_ns: npt.NDArray[np.int64] | None = None
        for step in range(self.steps):
            now_ns = release_ns.copy()
            if finalize_begin_ns is not None:
                now_ns += self.local_ns["finalize"][step]
                columns["phases"].append(("finalize", step - 1, finalize_begin_ns, now_ns.copy()))
                now_ns = self._do("optimizer", step, now_ns, columns, of_step=step - 1)
                columns["steps"].append((step - 1, step_begin_ns, now_ns))
                step_begin_ns = now_ns
            now_ns = self._do("data_wait", step, now_ns, columns)
            if self.local_ns["loop"].any():
                now_ns = self._do("loop", step, now_ns, columns)
            if self.broadcast_ns is not None:
                launch_ns = now_ns
                now_ns = np.maximum(now_ns, now_ns[0]) + self.broadcast_ns
                columns["collectives"].append((step, -1, "broadcast", 4096, launch_ns, now_ns))
            now_ns = self._do("forward", step, now_ns, columns)
            now_ns = now_ns + self.local_ns["inter_phase"][step]
            backward_ns = self.local_ns["backward"][step]
            arrivals_ns = now_ns[:, None] + (backward_ns[:, None] * self.ready_at).astype(np.int64)
            finalize_begin_ns = self._do("backward", step, now_ns, columns)
            end_ns = 0
            for bucket, bytes_ in enumerate(BUCKET_BYTES):
                begin_ns = max(end_ns, int(arrivals_ns[:, bucket].max()))
                end_ns = begin_ns + int(self.transfer_ns[step, bucket])
                seen_ns = np.full(self.ranks, end_ns)
                if bucket == len(BUCKET_BYTES) - 1:
                    seen_ns = release_ns = seen_ns + self.carried_over_ns[step]
                columns["collectives"].append((step, bucket, "all_reduce", bytes_, arrivals_ns[:, bucket], seen_ns))
            self.last_arrivals_ns.append(arrivals_ns[:, -1])
            self.ends_ns.append(end_ns)
        columns["steps"].append((self.steps - 1, step_begin_ns, release_ns))
        return self._trace(path, columns)

    @property
    def cycle_times_ns(self) -> npt.NDArray[np.int64]:
        """From each step's last all-reduce to that of the next step."""
        return np.diff(np.array(self.ends_ns))

    def _do(
        self,
        phase: str,
        step: int,
        begin_ns: npt.NDArray[np.int64],
        columns: dict[str, list[Any]],
        of_step: int | None = None,
    ) -> npt.NDArray[np.int64]:
        end_ns = begin_ns + self.local_ns[phase][step]
        columns["phases"].append((phase, step if of_step is None else of_step, begin_ns, end_ns))
        return end_ns

    def _trace(self, path: str, columns: dict[str, list[Any]]) -> Trace:
        ranks = np.arange(self.ranks)

        def frame(names: list[str], rows: list[Any]) -> pd.DataFrame:
            values = {
                name: np.concatenate([np.broadcast_to(row[place], self.ranks) for row in rows])
                for place, name in enumerate(names)
            }
            return pd.DataFrame({"rank": np.tile(ranks, len(rows)), **values})

        steps = frame(["step", "start_ns", "end_ns"], columns["steps"])
        phases = frame(["phase", "step", "start_ns", "end_ns"], columns["phases"])
        phases["phase"] = pd.Categorical(phases["phase"], categories=PHASE_NAMES)
        phases = phases.assign(model=0, no_sync=False)
        collectives = frame(["step", "bucket", "op", "bytes", "launch_ns", "end_ns"], columns["collectives"])
        collectives["op"] = pd.Categorical(collectives["op"], categories=OPS)
        collectives["dtype"] = pd.Categorical(np.full(len(collectives), "float32"), categories=DTYPES)
        collectives = collectives.assign(
            model=0,
            group=0,
            plan_epoch=0,
            plan_hash=0,
            elements=collectives["bytes"] // 4,
            call_site=0,
            ready_ns=collectives["launch_ns"].astype("Int64"),
            start_ns=collectives["launch_ns"].astype("Int64"),
            end_uncertainty_ns=0,
            start_is_bound=True,
        )
        collectives["end_ns"] = collectives["end_ns"].astype("Int64")
        return Trace(
            path=Path(path),
            run={"world_size": self.ranks, "backend": "gloo", "models": [{"class": "GPT"}]},
            ranks=pd.DataFrame(
                {
                    "rank": ranks,
                    "host": [f"node{rank // self.ranks_per_host}" for rank in ranks],
                    "pid": 1000 + ranks,
                    "device": "cpu",
                    "boot": "simulated",
                    "clock": "same boot",
                    "offset_ns": 0,
                    "drift_ppm": 0.0,
                    "error_ns": 0.0,
                    "closed": True,
                }
            ),
            steps=steps.assign(is_light=False),
            phases=phases,
            gradients=_empty("rank", "model", "step", "plan_epoch", "parameter", "ready_ns"),
            copies=_empty("rank", "model", "step", "plan_epoch", "bucket", "direction", "start_ns", "end_ns"),
            collectives=collectives,
            incidents=_empty("rank", "step", "incident", "time_ns"),
            pauses=self._pauses(phases),
            segments=_empty(*SEGMENT_COLUMNS),
            user_collectives=_empty("rank", "start_ns", "end_ns"),
            modes=_empty(*MODE_COLUMNS),
            links=pd.DataFrame(self.links, columns=LINK_COLUMNS).astype(
                {name: "str" if name in ("local", "peer") else "int64" for name in LINK_COLUMNS}
            ),
            plans=_empty("model", "plan_epoch", "plan_hash", "bucket", "position", "parameter", "name", "bytes"),
            call_sites=_empty("rank", "call_site", "file", "line", "function"),
            problems=(),
        )

    def _pauses(self, phases: pd.DataFrame) -> pd.DataFrame:
        rows = []
        for rank, step, phase, pause_ns in self.gc:
            of_step = step - 1 if phase in ("finalize", "optimizer") else step
            is_it = (phases["rank"] == rank) & (phases["step"] == of_step) & (phases["phase"] == phase)
            begin_ns = int(phases.loc[is_it, "start_ns"].iloc[0]) + 1
            rows.append((rank, step, 2, begin_ns, begin_ns + pause_ns))
        return pd.DataFrame(rows, columns=["rank", "step", "generation", "start_ns", "end_ns"], dtype="int64")


def write_logs(trace: Trace, folder: Path) -> Path:
    """Write a simulated recording to disk, as if it had been recorded."""
    by_rank = {name: dict(list(getattr(trace, name).groupby("rank"))) for name in ("steps", "phases", "collectives")}
    pauses = trace.pauses.groupby("rank")
    for row in trace.ranks.itertuples(index=False):
        steps, phases, collectives = (by_rank[name][row.rank] for name in by_rank)
        reduced = collectives[collectives["bucket"] >= 0]
        parts = [
            _records(Kind.STEP, steps),
            _records(Kind.PHASE, phases, index=phases["phase"].cat.codes),
            _records(Kind.BUCKET_READY, reduced, start="ready_ns", end="ready_ns", index=reduced["bucket"]),
            _records(Kind.LAUNCH, collectives, start="launch_ns", end="launch_ns", **_body(collectives)),
            _records(Kind.COLLECTIVE, collectives, **_body(collectives)),
        ]
        if row.rank in pauses.groups:
            of_rank = pauses.get_group(row.rank)
            parts.append(_records(Kind.PAUSE, of_rank, index=of_rank["generation"]))
        records = np.concatenate(parts)
        records = records[np.argsort(records["end_ns"], kind="stable")]
        records["sequence"] = np.arange(1, len(records) + 1)
        records["crc32"] = [crc32(record.tobytes()[4:]) for record in records]
        log = make_rank(folder, int(row.rank), world_size=len(trace.ranks), host=str(row.host))
        log.close()
        header = LogHeader(capacity_records=len(records), pinned_records=0, written_records=len(records), closed=True)
        (rank_folder(folder, int(row.rank)) / EVENTS_FILE).write_bytes(header.pack() + records.tobytes())
    return folder


def _records(kind: Kind, table: pd.DataFrame, start: str = "start_ns", end: str = "end_ns", **fields: Any) -> Any:
    records = np.zeros(len(table), dtype=list(RECORD_FIELDS))
    records["kind"], records["step"] = kind, table["step"]
    records["start_ns"], records["end_ns"] = table[start].astype("int64"), table[end].astype("int64")
    for name, values in fields.items():
        records[name] = values
    return records


def _body(collectives: pd.DataFrame) -> dict[str, Any]:
    return {
        "index": np.where(collectives["bucket"] < 0, NO_INDEX, collectives["bucket"]),
        "op": collectives["op"].cat.codes,
        "dtype": DTYPES.index("float32"),
        "elements": collectives["elements"],
    }


def _empty(*names: str) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype="int64") for name in names})

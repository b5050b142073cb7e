"""Collective logs made up entry by entry, with the real writer, for tests of what is read from them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overlapscope.trace.clocks import get_boot_id
from overlapscope.trace.collective_log import (
    GROUP_LIMIT_BYTES,
    UNKNOWN,
    UNKNOWN_PHASE,
    CollectiveLogHeader,
    CollectiveLogWriter,
    Signature,
    group_file,
)
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    ENDED_FILE,
    EVENTS_FILE,
    RANK_FILE,
    RUN_FILE,
    SIGNATURES_FILE,
    Kind,
    Phase,
    pack_body,
    rank_folder,
)

US = 1_000
BEGIN_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One entry to be: a collective and how far it came."""

    signature: Signature
    step: int = 0
    batch: int | None = None
    line: int = 42
    """Of train.py, in main."""
    state: Literal["announced", "launched", "failed", "completed"] = "completed"
    phase: Phase | None = None
    flags: int = 0
    now_ns: int | None = None
    """When it is announced; None: 100 us after the one before it."""
    took_us: int = 50


def bucket(number: int, *, plan_hash: str = "plan", model: int = 0) -> Signature:
    """An all-reduce of a bucket with two parameters."""
    return Signature(
        op="all_reduce",
        reduce_op="sum",
        dtype="float32",
        shapes=((1000 * (number + 1),),),
        elements=1000 * (number + 1),
        bytes=4000 * (number + 1),
        names=(f"layers.{number}.weight", f"layers.{number}.bias"),
        role="bucket",
        model=model,
        plan_hash=plan_hash,
        bucket=number,
    )


def all_reduce(name: str = "loss", elements: int = 1, dtype: str = "float32") -> Signature:
    """One of the user's own."""
    return Signature(
        op="all_reduce", reduce_op="sum", dtype=dtype, shapes=((elements,),), elements=elements, names=(name,)
    )


def steps(count: int, *, first: int = 0, buckets: int = 3) -> list[Collective]:
    """The collectives of some steps: all buckets in each, with the step for the batch."""
    return [
        Collective(signature=bucket(number), step=step, batch=step, phase=Phase.BACKWARD)
        for step in range(first, first + count)
        for number in range(buckets)
    ]


def write_order(
    folder: Path,
    orders: Mapping[int, Sequence[Collective | Signature]],
    *,
    group: str = "default",
    members: Sequence[int] | None = None,
    world_size: int | None = None,
    number: int = 0,
    point_to_point: bool = False,
    close: bool = True,
    limit_bytes: int = GROUP_LIMIT_BYTES,
    description: str | None = None,
    backend: str = "gloo",
) -> Path:
    """Write the collective log of one group: what each rank has launched in it, in order.

    May be called again for another group, with another ``number``.

    Args:
        orders: by rank; of a rank that is not in it nothing is written.
        members: of the group; by default the ranks of ``orders``.
        world_size: by default one more than the highest member.
        number: of the group, in the file names.
        close: as when the process comes to its end.
        description: of the group; by default its name.
    """
    ranks = tuple(members if members is not None else sorted(orders))
    for rank, order in orders.items():
        rank_dir = make_folder(folder, rank, world_size or max(ranks) + 1)
        signatures = _Lines(rank_dir / SIGNATURES_FILE)
        sites = _Lines(rank_dir / CALL_SITES_FILE)
        header = CollectiveLogHeader(
            name=group,
            ranks=ranks,
            rank=rank,
            backend=backend,
            description=group if description is None else description,
            point_to_point=point_to_point,
        )
        path = rank_dir / group_file(number, point_to_point=point_to_point)
        log = CollectiveLogWriter(path=path, header=header, limit_bytes=limit_bytes)
        for place, one in enumerate(order):
            what = one if isinstance(one, Collective) else Collective(signature=one)
            now_ns = BEGIN_NS + place * 100 * US if what.now_ns is None else what.now_ns
            entry = log.announce(
                signatures.number_of(what.signature, what.signature.to_json),
                what.signature,
                now_ns=now_ns,
                step=what.step,
                call_site=sites.number_of(what.line, lambda number, line=what.line: _call_site(number, line)),
                batch=UNKNOWN if what.batch is None else what.batch,
                phase=UNKNOWN_PHASE if what.phase is None else what.phase,
                flags=what.flags,
            )
            if what.state != "announced":
                log.launched(entry, now_ns + 1 * US)
            if what.state in ("failed", "completed"):
                log.completed(entry, now_ns + what.took_us * US, failed=what.state == "failed")
        if close:
            log.close()
    return folder


def make_folder(folder: Path, rank: int, world_size: int, *, host: str = "node0", pid: int = -1) -> Path:
    """A rank's folder with the files that say what it is; nothing if it is there already."""
    rank_dir = rank_folder(folder, rank)
    if rank_dir.exists():
        return rank_dir
    rank_dir.mkdir(parents=True)
    write_json(rank_dir / RUN_FILE, {"format_version": 1, "world_size": world_size, "backend": "gloo"})
    sample = {"monotonic_ns": BEGIN_NS, "unix_ns": 1_700_000_000_000_000_000}
    where = {"rank": rank, "host": host, "pid": pid, "boot_id": "synthetic", "clock_samples": [sample]}
    write_json(rank_dir / RANK_FILE, where)
    return rank_dir


def end(folder: Path, ranks: Iterable[int]) -> None:
    """The processes of these ranks have come to their end."""
    for rank in ranks:
        write_json(rank_folder(folder, rank) / ENDED_FILE, {"how": "ended", "time_ns": 10 * BEGIN_NS})


def fail(folder: Path, rank: int, kind: str, message: str, *, line: int = 7, time_ns: int = 9 * BEGIN_NS) -> None:
    """The process of this rank has ended with an exception."""
    content = {
        "how": "exception",
        "time_ns": time_ns,
        "type": kind,
        "message": message,
        "traceback": f"{kind}: {message}",
    }
    write_json(rank_folder(folder, rank) / ENDED_FILE, content | {"file": "train.py", "line": line, "function": "main"})


def stands(
    folder: Path, rank: int, phase: Phase, step: int, *, since_ns: int = 2 * BEGIN_NS, launched: int = 0
) -> None:
    """Write an event log of steps of 1 ms whose newest record is that a phase begins, or a launch in it."""
    log = EventLogWriter(rank_folder(folder, rank) / EVENTS_FILE, 2**20)
    for done in range(step):
        log.append(pack_body(Kind.STEP), done, BEGIN_NS + done * 10**6, BEGIN_NS + (done + 1) * 10**6)
    log.append(pack_body(Kind.PHASE_BEGIN, index=phase), step, since_ns, since_ns)
    for bucket in range(launched):
        log.append(pack_body(Kind.LAUNCH, index=bucket), step, since_ns + bucket, since_ns + bucket)


def lives_here(folder: Path, rank: int, pid: int, *, written_ns: int | None = None) -> None:
    """Let the rank be a process of this host."""
    sample = {"monotonic_ns": written_ns or time.monotonic_ns(), "unix_ns": time.time_ns()}
    where = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": pid,
        "boot_id": get_boot_id(),
        "clock_samples": [sample],
    }
    write_json(rank_folder(folder, rank) / RANK_FILE, where)


class _Lines:
    """A file of numbered lines, to which a line is added for each thing that is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = path.read_text().splitlines() if path.exists() else []
        self._numbers: dict[object, int] = {}

    def number_of(self, thing: object, line_of: object) -> int:
        if thing not in self._numbers:
            self._lines.append(line_of(len(self._lines) + 1))  # type: ignore[operator]
            self._numbers[thing] = len(self._lines)
            self._path.write_text("".join(f"{line}\n" for line in self._lines))
        return self._numbers[thing]


def _call_site(number: int, line: int) -> str:
    return json.dumps({"call_site": number, "file": "train.py", "line": line, "function": "main"})

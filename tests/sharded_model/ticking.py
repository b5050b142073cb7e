"""A job with sharded parameters that is simulated millisecond by millisecond, and recordings of it.

It shares no code with ``overlapscope.sharded_model.schedule``: every rank is a process that computes, launches or
waits, and the link carries one collective after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.sharded_model.model import Settings, ShardedModel, Unit
from overlapscope.sharded_model.program import Op, build_program
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS
from overlapscope.trace.tables import PHASE_NAMES
from tests.simulated_job import Job

MS = 1_000_000
_OF_RANKS = ("launch", "backward", "wait", "last wait")


@dataclass
class TickingJob:
    """Ranks that train a sharded model over one link. All times are whole milliseconds."""

    model: ShardedModel
    compute_ms: dict[tuple[str, int], list[int]]
    """By pass and segment, of each rank."""
    alpha_ms: int
    beta_ms_per_byte: int
    ranks: int = 2
    after_ms: int = 5
    steps: int = 12
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def transfer_ms(self, unit: Unit, kind: str) -> int:
        """How long a collective takes once all ranks are there."""
        bytes_ = self.model.gather_bytes(unit) if kind == "gather" else self.model.reduce_bytes(unit)
        return self.alpha_ms + self.beta_ms_per_byte * bytes_

    def run_step(self, settings: Settings) -> list[int]:
        """When each rank ends a step that all begin together; what they did is added to ``events``."""
        program = build_program(self.model, settings)
        last_compute = max(number for number, op in enumerate(program) if op.kind == "compute")
        position, left, since = [0] * self.ranks, [0] * self.ranks, [0] * self.ranks
        started = [False] * self.ranks
        arrived: dict[int, set[int]] = {}
        done: dict[int, int] = {}
        remaining: dict[int, int] = {}
        queue = [number for number, op in enumerate(program) if op.kind in ("gather", "reduce")]
        ends: list[int] = [0] * self.ranks
        now = 0
        while min(ends) == 0:
            moved = True
            while moved:
                moved = False
                while queue and len(arrived.get(queue[0], ())) == self.ranks:
                    head = queue[0]
                    remaining.setdefault(head, self.transfer_ms(program[head].unit, program[head].kind))
                    if remaining[head]:
                        break
                    done[queue.pop(0)] = now
                    moved = True
                for rank in range(self.ranks):
                    while position[rank] < len(program):
                        number, op = position[rank], program[position[rank]]
                        if not started[rank]:
                            started[rank], since[rank] = True, now
                            left[rank] = self._ms(op, rank)
                            if op.during == "backward" and program[number - 1].during == "forward":
                                self.events.append(("backward", rank, now))
                            if op.kind in ("gather", "reduce"):
                                arrived.setdefault(number, set()).add(rank)
                                name = "all_gather" if op.kind == "gather" else "reduce_scatter"
                                self.events.append(("launch", rank, now, number, name, op.unit))
                                moved = True
                        if left[rank] or not self._is_over(program, number, done, is_async=settings.is_async):
                            break
                        is_wait = op.kind == ("wait" if settings.is_async else "gather") or op.kind == "reduce"
                        if is_wait:
                            kind = "last wait" if op.kind == "reduce" and number > last_compute else "wait"
                            self.events.append((kind, rank, since[rank], now))
                        position[rank], started[rank], moved = number + 1, False, True
                    if position[rank] == len(program) and not ends[rank]:
                        ends[rank] = now + self.after_ms
            now += 1
            if queue and queue[0] in remaining:
                remaining[queue[0]] -= 1
            left = [max(0, each - 1) for each in left]
        self.events += [("done", number, at) for number, at in done.items()]
        return ends

    def _ms(self, op: Op, rank: int) -> int:
        return self.compute_ms[op.during, op.segment][rank] if op.kind == "compute" else 0

    @staticmethod
    def _is_over(program: tuple[Op, ...], number: int, done: dict[int, int], *, is_async: bool) -> bool:
        op = program[number]
        if op.kind == "reduce" or (op.kind == "gather" and not is_async):
            return number in done
        if op.kind == "wait":
            gathers = [n for n in range(number) if program[n].kind == "gather" and program[n].unit == op.unit]
            return gathers[-1] in done
        return True

    def record(self, settings: Settings) -> Trace:
        """The recording of some steps that are all alike; launches at the same time are a nanosecond apart."""
        tables: dict[str, list[Any]] = {"steps": [], "phases": [], "collectives": []}
        self.events = []
        ends = self.run_step(settings)
        done = {event[1]: event[2] for event in self.events if event[0] == "done"}
        for step in range(self.steps):
            for rank in range(self.ranks):
                self._record_rank(rank, step, 1000 + step * max(ends), ends, done, tables)
        return self._trace(settings, tables)

    def _record_rank(
        self, rank: int, step: int, begin: int, ends: list[int], done: dict[int, int], tables: dict[str, list[Any]]
    ) -> None:
        tables["steps"].append((rank, step, begin * MS, (begin + ends[rank]) * MS))
        own = [event for event in self.events if event[0] in _OF_RANKS and event[1] == rank]
        for event in own:
            if event[0] == "launch":
                _, _, at, number, name, unit = event
                bytes_ = self.model.gather_bytes(unit) if name == "all_gather" else self.model.reduce_bytes(unit)
                row = (
                    rank,
                    step,
                    self._bucket(unit[0]),
                    name,
                    bytes_,
                    (begin + at) * MS + number,
                    (begin + done[number]) * MS,
                )
                tables["collectives"].append(row)
            elif event[0] == "backward":
                tables["phases"].append((rank, step, "backward", (begin + event[2]) * MS, (begin + event[2]) * MS))
            elif event[0] == "wait":
                tables["phases"].append((rank, step, "finalize", (begin + event[2]) * MS, (begin + event[3]) * MS))
        last = [event for event in own if event[0] == "last wait"]
        tables["phases"].append((rank, step, "finalize", (begin + last[0][2]) * MS, (begin + last[-1][3]) * MS))

    def _bucket(self, part: int) -> int:
        return len(self.model.parts) - 1 - part

    def _trace(self, settings: Settings, tables: dict[str, list[Any]]) -> Trace:
        trace = Job(ranks=self.ranks, steps=2).run()
        steps = pd.DataFrame(tables["steps"], columns=["rank", "step", "start_ns", "end_ns"]).assign(is_light=False)
        phases = pd.DataFrame(tables["phases"], columns=["rank", "step", "phase", "start_ns", "end_ns"])
        phases["phase"] = pd.Categorical(phases["phase"], categories=PHASE_NAMES)
        columns = ["rank", "step", "bucket", "op", "bytes", "launch_ns", "end_ns"]
        collectives = pd.DataFrame(tables["collectives"], columns=columns).sort_values(["rank", "launch_ns"])
        first = trace.collectives.iloc[:1].drop(columns=columns)
        constants = pd.concat([first] * len(collectives), ignore_index=True)
        collectives = pd.concat([collectives.reset_index(drop=True), constants], axis=1)
        collectives["op"] = pd.Categorical(collectives["op"], categories=OPS)
        for name in ("ready_ns", "start_ns", "end_ns"):
            source = "end_ns" if name == "end_ns" else "launch_ns"
            collectives[name] = collectives[source].astype("Int64")
        return replace(
            trace,
            run={**trace.run, "models": [{"model": 0, "class": "Net", "sharding": self._sharding(settings)}]},
            steps=steps,
            phases=phases.assign(model=0, no_sync=False),
            collectives=collectives[trace.collectives.columns],
            pauses=trace.pauses.iloc[:0],
        )

    def _sharding(self, settings: Settings) -> dict[str, Any]:
        first = int(self.model.has_root)

        def buckets(units: tuple[int, ...]) -> list[int]:
            return [self._bucket(unit + first) for unit in units]

        def describe(part: int) -> dict[str, Any]:
            number = part - first
            backward = settings.root_backward_prefetch if number < 0 else settings.backward_prefetch[number]
            forward = settings.root_forward_prefetch if number < 0 else settings.forward_prefetch[number]
            return {
                "module": self.model.parts[part].name,
                "is_root": number < 0,
                "reshards": number >= 0 and settings.reshards[number],
                "is_async": settings.is_async,
                "forward_prefetch": buckets(forward),
                "backward_prefetch": None if backward is None else buckets(backward),
            }

        units = [describe(part) for part in range(len(self.model.parts) - 1, -1, -1)]
        return {"shard_groups": [list(range(self.ranks))], "replica_groups": [], "units": units}


def make_default(count: int, *, reshards: bool = True) -> Settings:
    """Torch's default settings of some units behind a root."""
    return Settings(
        units=tuple((part,) for part in range(1, count + 1)),
        reshards=(reshards,) * count,
        is_async=False,
        forward_prefetch=((),) * count,
        backward_prefetch=(None,) * count,
    )


def mean_ms(step_ns: npt.NDArray[np.float64]) -> float:
    """The mean of some step times in milliseconds."""
    return float(step_ns.mean()) / MS

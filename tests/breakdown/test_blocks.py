"""The breakdown of any recording adds up, and is what an oracle says that looks at one nanosecond after the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.breakdown import BLOCKS, Breakdown, compute_breakdown
from overlapscope.breakdown.critical_path import compute_job_breakdown
from overlapscope.breakdown.steady_steps import select_steady_steps
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.breakdown.waits import NOBODY, REASONS
from overlapscope.trace.recording import Trace
from tests.breakdown.recordings import orderly_recordings, wild_recordings


class Oracle:
    """One rank of a recording, looked at slowly."""

    def __init__(self, trace: Trace, rank: int) -> None:
        def of_rank(table: pd.DataFrame) -> list[Any]:
            return list(table[table["rank"] == rank].itertuples())

        self.trace, self.rank = trace, rank
        self.steps, self.phases, self.copies = of_rank(trace.steps), of_rank(trace.phases), of_rank(trace.copies)
        self.pauses, self.collectives = of_rank(trace.pauses), of_rank(trace.collectives)
        self.user_collectives = of_rank(trace.user_collectives)
        self.ended = [each for each in self.collectives if not pd.isna(each.end_ns)]
        self.is_on_device = str(trace.ranks["device"].iloc[0]).startswith("cuda")

    def block(self, moment: int) -> str:
        def within(spans: list[Any]) -> bool:
            return any(span.start_ns <= moment < span.end_ns for span in spans)

        phase = next((each for each in self.phases if within([each])), None)
        if within(self.pauses) and not self.is_on_device:
            return "gc"
        if within(self.copies):
            return "bucket_copies"
        if any(arrival_of(each) <= moment < each.end_ns for each in self.ended if each.op == "broadcast"):
            return "buffers"
        if phase is not None and phase.phase == "finalize" and self.awaited(phase, moment) is not None:
            return "exposed"
        if within(self.user_collectives) and not self.is_on_device:
            return "collectives"
        if phase is not None and phase.phase == "finalize":
            return "bucket_copies"
        kinds = {each.phase for each in self.phases}
        if phase is not None and phase.phase == "loop" and "optimizer" not in kinds:
            return "inter_phase"
        if phase is not None:
            return {"loop": "host_loop"}.get(phase.phase, phase.phase)
        if within(self.user_collectives):
            return "collectives"
        if within(self.pauses):
            return "gc"
        step = next(each for each in self.steps if within([each]))
        inside = [each for each in self.phases if each.step == step.step]
        return (
            "inter_phase"
            if any(each.end_ns <= moment for each in inside) and any(each.start_ns > moment for each in inside)
            else "unattributed"
        )

    def awaited(self, finalize: Any, moment: int) -> Any:
        """The first of the buckets that this finalize waits for, and that has not ended."""
        waiting = [
            each
            for each in self.ended
            if each.bucket >= 0 and self.finalize_of(each) is finalize and each.end_ns > moment
        ]
        return min(waiting, key=lambda each: (each.launch_ns, each.Index), default=None)

    def finalize_of(self, bucket: Any) -> Any:
        """The first that ends after it was entered, or one that follows it without a gap, if the bucket ends there.

        Of those that are gathered, which a forward waits for in several places: the first after the end.
        """
        moment = bucket.end_ns if bucket.op == "all_gather" else arrival_of(bucket)
        later = iter(
            sorted(
                (each for each in self.phases if each.phase == "finalize" and each.end_ns >= moment),
                key=lambda each: each.end_ns,
            )
        )
        found = next(later, None)
        for other in later:
            if found.end_ns >= bucket.end_ns or other.start_ns != found.end_ns:
                break
            found = other
        return found

    def reason(self, row: Any, moment: int) -> str:
        """Why a collective has not ended."""
        if moment < arrival_of(row):
            return "launch_delay"
        matched = self.matched(row)
        if matched is not None and moment < max(arrival_of(each) for each in matched):
            return "straggler"
        everyone = set(range(self.trace.run["world_size"]))
        if matched is None or {each.rank for each in matched} != everyone:
            return "unattributed"
        lanes = 2 if self.trace.run["backend"] == "gloo" else 1
        before = [
            each
            for each in self.ended
            if each.group == row.group and (each.launch_ns, each.Index) < (row.launch_ns, row.Index)
        ]
        return "queued" if sum(each.end_ns > moment for each in before) >= lanes else "transfer"

    def matched(self, row: Any) -> list[Any] | None:
        """The same collective on all ranks with a clock, if they all have it."""
        aligned = self.trace.ranks[self.trace.ranks["clock"] != "none"]["rank"].tolist()
        if self.rank not in aligned:
            return None
        found = []
        for rank in aligned:
            same = [each for each in Oracle(self.trace, rank).ended if key_of(each) == key_of(row)]
            own = [each for each in self.ended if key_of(each) == key_of(row)]
            turn = [each.Index for each in own].index(row.Index)
            if len(same) <= turn:
                return None
            found.append(same[turn])
        return found


def key_of(row: Any) -> tuple[Any, ...]:
    return row.model, row.step, row.bucket, row.op


def arrival_of(row: Any) -> int:
    on_device = next((moment for moment in (row.ready_ns, row.start_ns) if not pd.isna(moment)), row.launch_ns)
    return int(max(row.launch_ns, on_device))


def blocks_of(breakdown: Breakdown, row: int) -> dict[str, int]:
    return {name: int(ns) for name, ns in zip(BLOCKS, breakdown.ns[row], strict=True) if ns}


def check_sums(trace: Trace, breakdown: Breakdown) -> None:
    step_ns = breakdown.end_ns - breakdown.start_ns
    assert (breakdown.ns >= 0).all()
    assert breakdown.ns.sum(axis=1).tolist() == step_ns.tolist()
    exposed_ns = np.zeros(len(step_ns), dtype=np.int64)
    np.add.at(exposed_ns, breakdown.wait_row, breakdown.wait_ns)
    assert exposed_ns.tolist() == breakdown.ns[:, BLOCKS.index("exposed")].tolist()
    for row, rank in enumerate(breakdown.rank.tolist()):
        within_ns = np.clip(breakdown.exposed_spans_ns(rank), breakdown.start_ns[row], breakdown.end_ns[row])
        assert np.diff(within_ns, axis=0).sum() == exposed_ns[row]
    is_late = breakdown.waits.straggler != NOBODY
    length_ns = (breakdown.waits.end_ns - breakdown.waits.start_ns) * is_late
    assert breakdown.straggler_ns.sum(axis=1).tolist() == length_ns.tolist()
    steady = select_steady_steps(trace, breakdown)
    excluded = [step for each in steady.excluded for step in each.steps]
    assert sorted([*steady.steps.tolist(), *excluded]) == np.unique(breakdown.step).tolist()
    job = compute_job_breakdown(trace, breakdown, steady)
    if job is not None:
        assert (job.ns >= 0).all()
        assert job.ns.sum(axis=1).tolist() == (job.end_ns - job.start_ns).tolist()
        mean_ns = (breakdown.end_ns - breakdown.start_ns)[steady.finished_rows].mean(axis=1)
        assert np.allclose(job.end_ns - job.start_ns, mean_ns, atol=1.0)
        assert (job.rank_ns.sum(axis=1) <= job.end_ns - job.start_ns).all()


@given(wild_recordings())
def test_whatever_was_recorded_blocks_sum_to_the_step(trace: Trace) -> None:
    check_sums(trace, compute_breakdown(trace))


@given(orderly_recordings(), st.integers(0, 100))
def test_it_does_not_matter_how_far_a_host_is_ahead_of_its_device(trace: Trace, ahead_ns: int) -> None:
    entered_ns = [arrival_of(row) for row in trace.collectives.itertuples()]
    wanted = trace.collectives.assign(ready_ns=pd.array(entered_ns, dtype="Int64"))
    usual = compute_breakdown(replace(trace, collectives=wanted))
    ahead = compute_breakdown(replace(trace, collectives=wanted.assign(launch_ns=wanted["launch_ns"] - ahead_ns)))
    assert ahead.ns.tolist() == usual.ns.tolist()
    assert ahead.wait_ns.tolist() == usual.wait_ns.tolist()


@given(orderly_recordings())
def test_each_nanosecond_is_in_the_block_that_the_oracle_says(trace: Trace) -> None:
    breakdown = compute_breakdown(trace)
    check_sums(trace, breakdown)
    for rank in trace.ranks["rank"].tolist():
        oracle = Oracle(trace, rank)
        for step in oracle.steps:
            row = int(np.flatnonzero((breakdown.rank == rank) & (breakdown.step == step.step))[0])
            moments = range(step.start_ns, step.end_ns)
            assert blocks_of(breakdown, row) == dict(Counter(oracle.block(moment) for moment in moments))
        exposed = [
            (rank, moment, row.Index, oracle.reason(row, moment))
            for phase in oracle.phases
            if phase.phase == "finalize"
            for moment in range(phase.start_ns, phase.end_ns)
            if oracle.block(moment) == "exposed" and (row := oracle.awaited(phase, moment)) is not None
        ]
        waits = breakdown.waits
        divided = [
            (rank, moment, int(waits.collective[number]), REASONS[waits.reason[number]])
            for number in np.flatnonzero(waits.rank == rank)
            for moment in range(int(waits.start_ns[number]), int(waits.end_ns[number]))
            if oracle.block(moment) == "exposed"
        ]
        assert sorted(divided) == sorted(exposed)


def test_the_documents_name_blocks_as_pages_do() -> None:
    table = (Path(__file__).parents[2] / "docs" / "breakdown.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ") and "`" in line]
    labels = {key: label for row in rows for label, key in zip(row[0].split(", "), row[1].split(", "), strict=False)}
    assert {key.strip("`"): label for key, label in labels.items() if key.strip("`") in BLOCKS} == BLOCK_LABELS

"""Findings: every injected fault by rank, cause, pattern and cost, and nothing in a healthy job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import summarize
from overlapscope.stragglers.cycles import Cycles, build_cycles
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.stragglers import SUSPICION_LEVEL, Stragglers, find_all_findings, find_stragglers
from overlapscope.stragglers.text import (
    describe,
    describe_briefly,
    describe_headline,
    describe_verdict,
    explain_missing_stragglers,
)
from overlapscope.trace.machine_log import MachineReading
from overlapscope.trace.recording import Trace
from overlapscope.trace.tables import MACHINE_COLUMNS, MACHINE_SOURCE_COLUMNS
from tests.machine.said import COOL, HOT, gpu
from tests.simulated_job import BUCKET_BYTES, MS, Job

STEPS = 151
"""150 cycles."""


def noisy_job(**options: object) -> Job:
    return Job(steps=STEPS, noise=0.02, **options)  # type: ignore[arg-type]


def cycles_in(trace: Trace) -> Cycles:
    cycles = build_cycles(trace, compute_breakdown(trace))
    assert cycles is not None
    return cycles


def judged(job: Job) -> Stragglers:
    """With all cycles, also those of the warm-up."""
    trace = job.run()
    return find_stragglers(trace, cycles_in(trace), summarize(trace, compute_breakdown(trace)))


def test_the_mean_step_is_of_the_steps_compared_if_many_others_reduce_otherwise() -> None:
    job = noisy_job()
    job.local_ns["forward"][::3] //= 4
    job.local_ns["backward"][:, 1] += 10 * MS
    trace = job.run()
    bytes_ = trace.collectives["bytes"] + 4 * (trace.collectives["step"] % 3 == 0)
    trace = replace(trace, collectives=trace.collectives.assign(bytes=bytes_))
    summary = summarize(trace, compute_breakdown(trace))
    found = find_stragglers(trace, cycles_in(trace), summary)
    assert set(found.usual.cycles.steps % 3) == {1, 2}
    assert found.step_time_ns > 1.05 * summary.mean.step.value
    (finding,) = found.findings
    assert finding.step_ns == pytest.approx(found.usual.recorded_ns.mean(), rel=0.02)


@pytest.mark.parametrize("steps", [2, 4, 9, 12])
def test_in_a_short_recording_the_mean_step_is_that_of_the_summary(steps: int) -> None:
    """Though its first step is not compared."""
    trace = Job(steps=steps, noise=0.02).run()
    summary = summarize(trace, compute_breakdown(trace))
    assert find_stragglers(trace, cycles_in(trace), summary).step_time_ns == summary.mean.step.value


def only_finding(job: Job) -> Finding:
    (finding,) = judged(job).findings
    return finding


def say(finding: Finding) -> str:
    return f"{describe(finding)}\n{describe_briefly(finding)}"


@pytest.mark.parametrize("steps", [31, STEPS])
def test_in_healthy_jobs_nobody_is_named_and_however_many_steps_there_are_few_are_suspected(steps: int) -> None:
    """Chance alone makes a suspicion in a twentieth of all jobs at most, so that of these, always the same, few may be.

    The quicker one of two ranks, phase by phase, would be quicker than both.
    """
    jobs = [Job(steps=steps, ranks=2 + seed % 4, noise=0.05 - 0.01 * (seed % 3), seed=seed) for seed in range(20)]
    found = [judged(job) for job in jobs]
    assert [each.findings for each in found if each.findings] == []
    suspected = [each for each in found if each.suspect is not None]
    assert len(suspected) <= binom.ppf(0.999, len(found), SUSPICION_LEVEL)
    assert all(("No straggler found" in describe_verdict(each)) == (each.suspect is None) for each in found)


def test_of_noise_that_chance_makes_one_sided_a_suspicion_says_how_probable_that_is() -> None:
    """One of the few healthy jobs in which 150 steps are not enough."""
    suspect = judged(Job(steps=STEPS, ranks=2, noise=0.05, seed=7013)).suspect
    assert suspect is not None
    assert (suspect.late_steps, suspect.steps) == (95, 148)
    assert suspect.p_value == pytest.approx(0.0176, abs=1e-4)
    assert suspect.needed_steps == 320


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), rank=st.integers(0, 3), share=st.floats(0.08, 1.0))
def test_a_rank_that_computes_slowly(seed: int, rank: int, share: float) -> None:
    job = noisy_job(seed=seed)
    job.slow_down(rank, share)
    finding = only_finding(job)
    assert (finding.ranks, finding.cause, finding.pattern.kind) == ((rank,), "compute", "persistent")
    assert finding.added_ns == pytest.approx(30 * share * MS, rel=0.1, abs=0.2 * MS)
    assert finding.parts_ns["backward"] == pytest.approx(20 * share * MS, rel=0.1, abs=0.2 * MS)


def test_a_rank_that_chance_may_have_made_late_is_suspected(golden: Callable[[str, str], None]) -> None:
    """Of 30 steps whose noise happens to last, too few are independent."""
    job = Job(steps=31, ranks=2, noise=0.05, seed=1)
    job.slow_down(1, 0.1)
    stragglers = judged(job)
    assert stragglers.findings == ()
    suspect = stragglers.suspect
    assert suspect is not None
    assert (suspect.rank, suspect.late_steps, suspect.steps) == (1, 28, 28)
    assert 5e-4 < suspect.p_value < 0.05
    assert suspect.needed_steps is not None
    assert suspect.needed_steps > 28
    row = stragglers.by_rank.set_index("rank").loc[1]
    assert (suspect.lateness_ns, suspect.saving_ns) == (row["lateness_ns"], row["saving_ns"])
    golden("findings/suspect", f"{describe_verdict(stragglers)}\n{describe_headline(stragglers)}")


def test_a_rank_that_costs_much_by_chance_is_not_passed_over_in_silence(golden: Callable[[str, str], None]) -> None:
    """Four late steps of 30, of 30 ms each."""
    job = Job(steps=31, ranks=2, noise=0.05, seed=1)
    job.local_ns["backward"][[6, 13, 20, 27], 1] += 30 * MS
    stragglers = judged(job)
    assert stragglers.findings == ()
    costliest = stragglers.costliest
    assert costliest is not None
    assert (costliest.rank, costliest.is_chance, costliest.needed_steps) == (1, True, None)
    assert stragglers.suspect is None
    golden("findings/chance", describe_verdict(stragglers))


def test_a_rank_that_is_named_is_not_suspected_as_well() -> None:
    job = noisy_job()
    job.slow_down(2, 0.3)
    assert judged(job).suspect is None


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), ranks=st.integers(2, 8), data_ms=st.sampled_from((0, 3, 6)))
def test_a_late_rank_has_one_lateness_and_one_saving(seed: int, ranks: int, data_ms: int) -> None:
    """Whatever makes it late, the finding has what the table of ranks has."""
    job = noisy_job(ranks=ranks, seed=seed)
    job.slow_down(1, 0.3)
    job.local_ns["data_wait"][:, 1] += data_ms * MS
    stragglers = judged(job)
    (finding,) = stragglers.findings
    row = stragglers.by_rank.set_index("rank").loc[1]
    assert (finding.ranks, finding.lateness_ns) == ((1,), row["lateness_ns"])
    assert finding.saving.step.value == pytest.approx(row["saving_ns"], abs=1)
    assert finding.saving_share == finding.saving.step.value / stragglers.step_time_ns
    assert ("data_wait" in finding.parts_ns) == (data_ms > 0)


def test_a_rank_late_in_few_steps_saves_a_share_of_all_of_them(golden: Callable[[str, str], None]) -> None:
    """Its steps are outliers of the mean step, and their saving is far more than that."""
    job = noisy_job()
    job.local_ns["data_wait"][[20, 61, 77, 130], 2] += 400 * MS
    stragglers = judged(job)
    (finding,) = stragglers.findings
    assert finding.saving_in_delayed_steps.value == pytest.approx(400 * MS, rel=0.05)
    assert finding.saving_share == pytest.approx(4 * 400 / (4 * 400 + 150 * 41), rel=0.05)
    golden("findings/few_steps", say(finding))


def test_two_ranks_that_are_equally_late_save_nothing_alone(golden: Callable[[str, str], None]) -> None:
    job = noisy_job(ranks=5)
    job.slow_down(1, 0.3)
    job.slow_down(4, 0.3)
    found = judged(job).findings
    assert [finding.ranks for finding in found] in ([(1,), (4,)], [(4,), (1,)])
    assert all(finding.saving.step.value < 0.1 * finding.added_ns for finding in found)
    golden("findings/equally_late", say(min(found, key=lambda finding: finding.ranks)))


def test_data_that_comes_late_every_tenth_step(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.local_ns["data_wait"][::10, 2] += 15 * MS
    finding = only_finding(job)
    assert (finding.ranks, finding.cause) == ((2,), "data_wait")
    assert (finding.pattern.kind, finding.pattern.period) == ("periodic", 10)
    assert finding.added_ns == pytest.approx(1.5 * MS, rel=0.1)
    assert finding.steps.tolist() == list(range(10, STEPS, 10))
    golden("findings/late_data", say(finding))


def test_what_the_loop_itself_does_is_no_wait_for_data(golden: Callable[[str, str], None]) -> None:
    """Rank 0 saves a checkpoint, say."""
    job = noisy_job()
    job.local_ns["loop"][::10, 0] += 15 * MS
    finding = only_finding(job)
    assert (finding.ranks, finding.cause, finding.pattern.period) == ((0,), "host_loop", 10)
    golden("findings/training_loop", say(finding))


def test_garbage_collection_every_seventh_step_is_named_and_not_the_phase_it_interrupts() -> None:
    job = noisy_job(gc=[(3, step, "forward", 50 * MS) for step in range(7, STEPS, 7)])
    finding = only_finding(job)
    assert (finding.ranks, finding.cause, finding.pattern.period) == ((3,), "gc", 7)
    assert finding.added_ns == pytest.approx(50 * MS * 21 / 150, rel=0.1)


def test_one_pause_of_two_seconds(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.local_ns["forward"][77, 1] += 2000 * MS
    finding = only_finding(job)
    assert (finding.ranks, finding.cause, finding.pattern.kind) == ((1,), "compute", "transient")
    assert (finding.steps.tolist(), finding.worst_step) == ([77], 77)
    assert finding.delay_ns == pytest.approx(2000 * MS, rel=0.01)
    golden("findings/pause", say(finding))


def test_a_rank_that_is_slow_from_one_step_on(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.slow_down(2, 0.3, steps=slice(90, None))
    finding = only_finding(job)
    assert (finding.ranks, finding.pattern.kind, int(finding.steps[0])) == ((2,), "shift", 90)
    assert finding.added_ns == pytest.approx(9 * MS * 61 / 150, rel=0.1)
    golden("findings/shift", say(finding))


def test_a_rank_that_is_slow_for_a_while(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.slow_down(2, 0.3, steps=slice(60, 90))
    finding = only_finding(job)
    assert (finding.ranks, finding.pattern.kind, finding.steps.tolist()) == ((2,), "episode", list(range(60, 90)))
    assert finding.added_ns == pytest.approx(9 * MS * 30 / 150, rel=0.1)
    golden("findings/episode", say(finding))


@pytest.mark.parametrize("steps", [slice(0, 50), slice(60, 90)])
def test_of_two_ranks_the_quicker_one_is_not_late_whenever_the_other_one_is_not(steps: slice) -> None:
    job = Job(steps=STEPS, ranks=2, noise=0.05)
    job.slow_down(1, 1.0, steps=steps)
    assert only_finding(job).ranks == (1,)


def test_a_rank_that_is_slow_now_and_again_for_a_while(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.slow_down(2, 0.3, steps=slice(40, 60))
    job.slow_down(2, 0.3, steps=slice(100, 120))
    finding = only_finding(job)
    assert (finding.ranks, finding.pattern.kind) == ((2,), "episode")
    golden("findings/episodes", say(finding))


def test_transfers_that_take_longer_from_one_step_on_are_no_ranks_doing(golden: Callable[[str, str], None]) -> None:
    job = noisy_job()
    job.transfer_ns[60:, 3] += 6 * MS
    finding = only_finding(job)
    assert (finding.ranks, finding.cause, finding.pattern.kind) == ((), "transfer", "shift")
    assert finding.added_ns == pytest.approx(6 * MS * 91 / 150, rel=0.1)
    golden("findings/transfers", say(finding))


def test_a_link_that_is_slower_than_the_others(golden: Callable[[str, str], None]) -> None:
    """Every all-reduce sends one and a half times its bytes over each link of a ring of four: 16.5 MiB a step."""
    job = noisy_job()
    job.transfer_ns[:] = [round(1.5 * bytes_ / 0.4) for bytes_ in BUCKET_BYTES]  # at 0.4 GB/s
    usual = job.run()
    job.measure_links({0: 4e9, 1: 4e9, 2: 0.4e9, 3: 4e9})
    stragglers = Analysis(job.run()).stragglers
    assert stragglers is not None
    (finding,) = stragglers.findings
    link = finding.link
    assert link is not None
    assert (link.rank, link.peer_rank) == (2, 3)
    assert (link.bytes_per_s, link.usual_bytes_per_s) == (pytest.approx(0.4e9, rel=1e-3), pytest.approx(4e9, rel=1e-3))
    job.transfer_ns //= 10
    fast, slow = (build_cycles(trace, compute_breakdown(trace)) for trace in (job.run(), usual))
    assert fast is not None
    assert slow is not None
    truth_ns = slow.end_ns[:, -1].mean() - fast.end_ns[:, -1].mean()
    assert finding.added_ns == pytest.approx(truth_ns, rel=0.05)
    golden("findings/link", say(finding))


def test_a_link_that_seems_slow_while_all_reduces_are_quick_is_not_named() -> None:
    """The kernel counts the wait for acknowledgements as busy, and a loaded machine is late with them."""
    job = noisy_job()
    job.transfer_ns[:] = [round(1.5 * bytes_ / 4) for bytes_ in BUCKET_BYTES]
    job.measure_links({0: 4e9, 1: 4e9, 2: 0.4e9, 3: 4e9})
    stragglers = Analysis(job.run()).stragglers
    assert stragglers is not None
    assert stragglers.findings == ()


def test_two_faults_at_once_are_both_named_each_with_its_own_cost() -> None:
    job = noisy_job()
    job.slow_down(1, 0.2)
    job.local_ns["data_wait"][::10, 2] += 15 * MS
    slow, data = judged(job).findings
    assert (slow.ranks, slow.cause, data.ranks, data.cause) == ((1,), "compute", (2,), "data_wait")
    assert slow.added_ns == pytest.approx(6 * MS, rel=0.1)
    assert data.added_ns == pytest.approx(1.5 * MS, rel=0.1)
    # In every tenth step the other one is late as well, so mending one of them gains less than it costs.
    assert slow.saving.step.value == pytest.approx(6 * MS * 0.9, rel=0.1)
    assert data.saving.step.value == pytest.approx((15 - 6) * MS / 10, rel=0.15)


def test_two_faults_of_one_rank_are_both_named() -> None:
    job = noisy_job()
    job.slow_down(1, 0.2)
    job.local_ns["data_wait"][::10, 1] += 15 * MS
    assert {(finding.ranks, finding.cause) for finding in judged(job).findings} == {
        ((1,), "compute"),
        ((1,), "data_wait"),
    }


def test_of_two_ranks_the_slower_one_is_named() -> None:
    job = noisy_job(ranks=2)
    job.slow_down(0, 0.25)
    assert only_finding(job).ranks == (0,)


def test_ranks_of_one_host_that_are_late_alike_are_named_as_the_host() -> None:
    job = noisy_job(ranks=16, ranks_per_host=4)
    for rank in (8, 9, 10, 11):
        job.slow_down(rank, 0.2)
    finding = only_finding(job)
    assert (finding.ranks, finding.host) == ((8, 9, 10, 11), "node2")
    assert describe(finding).startswith("Host node2 (ranks 8-11) arrives")
    assert judged(job).by_host.set_index("host")["saving_ns"].idxmax() == "node2"


def test_pauses_of_one_host_in_different_steps_are_not_the_hosts() -> None:
    job = noisy_job(ranks=8, ranks_per_host=2)
    for rank, step in ((2, 30), (3, 90)):
        job.local_ns["forward"][step, rank] += 900 * MS
    found = sorted((finding.ranks, finding.steps.tolist()) for finding in judged(job).findings)
    assert found == [((2,), [30]), ((3,), [90])]


def test_lateness_that_communication_hides_is_not_named() -> None:
    """It is there in every step and costs nothing, as the links are what the step waits for."""
    job = noisy_job()
    job.transfer_ns[:] = 40 * MS
    job.local_ns["backward"][:, 1] += 2 * MS
    assert judged(job).findings == ()


def test_carried_over_communication_within_the_error_of_the_clocks_is_not_named() -> None:
    job = noisy_job()
    job.carried_over_ns[:, 2] = 3 * MS
    cycles = cycles_in(job.run())
    assert [found.cause for found in find_all_findings(cycles, {}, [], 40 * MS)] == ["release_skew"]
    uncertain = replace(cycles, clock_error_ns=2.0 * MS)
    assert find_all_findings(uncertain, {}, [], 40 * MS) == ()


def test_ranks_that_send_late_cost_also_where_nobody_waits_for_them(
    golden: Callable[[str, str], None],
) -> None:
    job = Job(ranks=2, steps=5)
    job.transfer_ns *= 20  # so that the last buckets queue long after all ranks have arrived
    job.local_ns["backward"][:, 1] += 16 * MS
    found = judged(job)
    assert found.findings == ()
    assert found.suspect is None
    assert found.waiting.value == 0
    golden("findings/late_start", describe_verdict(found))


def test_what_if() -> None:
    job = noisy_job(seed=3)
    job.slow_down(1, 0.2)
    job.transfer_ns[::2, 3] += 4 * MS
    stragglers = judged(job)
    by_rank = stragglers.by_rank.set_index("rank")
    assert by_rank["lateness_ns"].idxmax() == by_rank["saving_ns"].idxmax() == by_rank["critical_share"].idxmax() == 1
    assert stragglers.saved_if_ranks_equal.step.low > 5 * MS
    assert stragglers.saved_by_best_transfers.step.value == pytest.approx(2 * MS, rel=0.1)
    by_cause = stragglers.by_cause.set_index("cause")["saving_ns"]
    assert by_cause["backward"] == pytest.approx(4 * MS, rel=0.2)
    by_bucket = stragglers.by_bucket.set_index("bucket")
    assert by_bucket["saving_ns"].idxmax() == 3
    assert by_bucket.loc[0, "busbw_bytes_per_s"] == pytest.approx(1024**2 / 1e-3 * 1.5)


def test_a_recording_of_one_rank_has_no_stragglers() -> None:
    assert Analysis(Job(ranks=1).run()).stragglers is None


def test_warm_up_is_not_judged() -> None:
    job = Job(steps=30)
    job.local_ns["forward"][:3, 2] += 900 * MS
    stragglers = Analysis(job.run()).stragglers
    assert stragglers is not None
    assert stragglers.findings == ()
    np.testing.assert_array_equal(stragglers.cycles.steps, np.arange(4, 30))


def with_machine(trace: Trace, rows: list[MachineReading], uses: dict[int, list[str]]) -> Trace:
    """The recording, with what its ranks have sampled."""
    sources = [(rank, name, name.split()[0], "", "") for rank, names in uses.items() for name in names]
    return replace(
        trace,
        machine=pd.DataFrame([(0, *row) for row in rows], columns=list(MACHINE_COLUMNS)),
        machine_sources=pd.DataFrame(sources, columns=list(MACHINE_SOURCE_COLUMNS)),
    )


@pytest.mark.parametrize("hot_rank", [1, 2])
def test_a_gpu_that_is_hot_in_the_late_steps_is_told_of_the_late_rank_only(hot_rank: int) -> None:
    """Rank 2 is late in steps 60 to 89; what the machine says changes nothing of the finding."""
    job = Job(steps=STEPS, ranks=4, noise=0.02)
    job.slow_down(2, 0.3, steps=slice(60, 90))
    trace = job.run()
    late = trace.steps[trace.steps["step"].between(60, 89)]
    begin_s, end_s, last_s = (
        times / 1e9 for times in (late["start_ns"].min(), late["end_ns"].max(), trace.steps["end_ns"].max())
    )
    every_s = 0.02
    times = np.arange(trace.steps["start_ns"].min() / 1e9, last_s, every_s)
    limits = [HOT if begin_s <= at <= end_s else COOL for at in times]
    rows = [
        row
        for rank in range(4)
        for row in gpu(
            f"gpu {rank}", limits if rank == hot_rank else [COOL] * len(times), begin_s=times[0], every_s=every_s
        )
    ]
    without = Analysis(trace).stragglers
    stragglers = Analysis(with_machine(trace, rows, {rank: [f"gpu {rank}"] for rank in range(4)})).stragglers
    assert without is not None
    assert stragglers is not None
    (bare,), (finding,) = without.findings, stragglers.findings
    assert (finding.ranks, finding.steps.tolist(), finding.saving) == (bare.ranks, bare.steps.tolist(), bare.saving)
    found = [one for one in finding.machine if not one.is_alike]
    if hot_rank != 2:
        assert not found
        return
    (one,) = found
    assert (one.ranks, one.condition.kind, one.others) == ((2,), "thermal limit", 0)
    assert one.condition.amount > 0.9
    assert one.condition.elsewhere == pytest.approx(0, abs=0.02)


def test_where_sums_go_to_one_rank_each_nobody_is_said_to_be_late(golden: Callable[[str, str], None]) -> None:
    trace = Job(steps=9).run()
    reduced = replace(trace, collectives=trace.collectives.assign(op="reduce"))
    reason = explain_missing_stragglers(reduced)
    golden("findings/reduce", f"{reason.headline}. {reason.message} {reason.advice}")

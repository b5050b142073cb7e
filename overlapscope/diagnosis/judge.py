"""Rule engine of the diagnosis: picks the cause among everything that is wrong.

The rules run in a fixed order. The first that finds something wins, unless the evidence refutes it:

1. What is wrong before the first step: the ranks disagree on the world size, one never started, their models differ.
   All later faults follow from it, including DDP's own exceptions.
2. DDP settings that differ, if the order of collectives differs in exactly the way they cause. Gradients that were
   never ready: the rank may have continued to other collectives, so this comes before those are compared; it counts
   only if others have launched the bucket, or DDP itself has complained.
3. The order of collectives. Entries are written before the launch and compared by hash, so a difference is a fact. It
   precedes any hang, abort or exception that it leads to.
4. Processes. A signal from outside that ended all ranks explains how they ended, unless one had failed or the job had
   hung before. An exception counts unless it is of the kind that another rank's end causes, and so does an exit status
   that indicates an error, unless the launcher had signaled the process before; then a stopped process; one that
   holds the GIL; an address that can't be reached, unless a rank is known to have been killed; one that is gone, unless
   the others waited for it until they gave up: then it was still there.
5. Who waits for whom. A cycle means that groups are interleaved; otherwise the rank that waits for nobody is after an
   exception that did not end it, at the end of its data, in its data loader, or wherever its position says.
6. What does harm without stopping anything: NaN in the weights, gradients that were not reduced, then replicas that
   differ for no reason found so far; a rank that died while Python shut down, which is after all of that; what
   watchdogs reported while the job ran; ranks that finished at different positions; and, if all finished at the same,
   replicas that differ then.
7. None of these: slow, healthy, or can't tell; the latter also if part of the evidence is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.refutations import is_refuted
from overlapscope.diagnosis.rules import (
    caught,
    created_groups,
    fallback,
    finite,
    flight_recorder,
    gradients,
    groups,
    interrupted,
    machine,
    models,
    order,
    processes,
    remarks,
    replicas,
    start,
    threads,
    waiting,
)
from overlapscope.diagnosis.texts import processes as process_text
from overlapscope.diagnosis.texts import waiting as text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts

Rule = Callable[[Facts], Verdict | None]

_RULES: Final[tuple[Rule, ...]] = (
    start.find_wrong_world_size,
    start.find_never_started,
    models.find_model_difference,
    models.find_settings_fault,
    created_groups.find_unlike_lists,
    gradients.find_missing_gradients,
    threads.find_unordered_threads,
    order.find_divergence,
    groups.find_oversized_message,
    groups.find_recreated_group,
    waiting.find_no_sync_rank,
    waiting.find_rank_without_reductions,
    groups.find_left_out_collective,
    interrupted.find_interruption,
    processes.find_failure,
    processes.find_error_exit,
    processes.find_stopped_process,
    processes.find_gil_holder,
    start.find_unreachable,
    processes.find_killed_process,
    groups.find_missing_new_group_call,
    groups.find_interleaved_groups,
    caught.find_caught_error,
    waiting.find_uneven_inputs,
    finite.find_non_finite_weights,
    replicas.find_unreduced_gradients,
    replicas.find_replica_drift,
    processes.find_killed_at_shutdown,
    fallback.find_watchdog_report,
    fallback.find_uneven_finish,
    replicas.find_replica_drift_at_end,
    waiting.find_data_loader_wait,
    flight_recorder.find_missing_launch,
    flight_recorder.find_missing_dump,
    waiting.find_stuck_rank,
    start.find_slow_start,
    fallback.find_slow_rank,
    flight_recorder.find_incomplete_dumps,
    fallback.judge_healthy,
)
_MOST_UNRECORDED: Final = 4
_CONSEQUENCES: Final[tuple[Rule, ...]] = (
    processes.find_failure,
    processes.find_error_exit,
    processes.find_stopped_process,
    processes.find_killed_process,
    processes.find_killed_at_shutdown,
    replicas.find_unreduced_gradients,
)
"""Rules that also run once the cause is known."""
_NOTES: Final = (
    waiting.note_segment_waits,
    gradients.note_interrupted_backwards,
    caught.note_caught_errors,
    finite.note_non_finite_gradients,
    models.note_setting_differences,
    machine.note_conditions,
)
"""Evidence that is shown with any verdict."""
_EXPLAIN_DRIFT: Final = (
    "replicas differ",
    "models differ",
    "different collectives",
    "missing collective",
    "swapped collectives",
    "step behind",
    "gradients never ready",
    "not reduced",
)
"""Kinds of verdicts that replicas that differ are a consequence of, or that already report it."""


def judge(evidence: Evidence) -> Verdict:
    """Judge a job: return what is wrong with it, if anything."""
    facts = Facts(evidence)
    found_by_rules = (found for rule in _RULES if (found := rule(facts)) is not None)
    verdict = next((found for found in found_by_rules if not is_refuted(facts, found)), None)
    if verdict is None:
        verdict = fallback.judge_undecided(facts)
    also = [
        found.sentence
        for rule in _CONSEQUENCES
        if verdict.is_fault and (found := rule(facts)) is not None and found.kind != verdict.kind
    ]
    unknown = list(_unknown(facts, verdict))
    if verdict.certainty != "certain":
        verdict = replace(verdict, blamed=(), suspected=verdict.named)
    notes = chain.from_iterable(note(facts, verdict) for note in _NOTES)
    return replace(
        verdict,
        also=(*verdict.also, *also),
        evidence=(*verdict.evidence, *notes, *unknown),
        remarks=remarks.find_remarks(facts, verdict),
    )


def _unknown(facts: Facts, verdict: Verdict) -> Iterator[str]:
    """Yield what else is wrong, and what is not known."""
    if verdict.is_fault and verdict.kind not in _EXPLAIN_DRIFT:
        drifted = replicas.find_replica_drift(facts)
        if drifted is not None:
            yield drifted.sentence
    if facts.missing and verdict.kind != "never started":
        yield text.no_log(facts.missing)
    if facts.evidence.job_signal is not None and verdict.kind != "interrupted":
        yield process_text.command_signaled(facts.evidence.job_signal)
    for rank in facts.unrecorded[:_MOST_UNRECORDED]:
        yield text.recording_ended(facts.ranks[rank])

"""From evidence to a verdict: which of the things that are wrong is the cause.

The rules are asked in an order, and the first that has an answer is believed, unless the evidence refutes it:

1. What is wrong before the first step: the ranks don't agree on how many they are, one never started, their models
   differ. Whatever comes later follows from it, DDP's own exceptions included.
2. The settings of DDP differ, and the order of collectives just as they make it. Gradients that never came: the rank
   may have gone on to other collectives, so this is asked before those are compared; it is only believed where others
   have launched the bucket, or DDP itself has complained.
3. The order of collectives. Entries are written before the launch and compared by hash, so a difference is a fact. It
   is older than any hang, abort or exception that it leads to.
4. Processes. A signal from outside that ended all ranks explains how they ended, unless one had failed or the job had
   hung before. An exception counts unless it is of the kind that another rank's end causes, and so does an exit status
   that says so, unless the launcher had told the process to end before; a stopped process; one that
   holds the GIL; one that is gone, unless the others waited for it until they gave up: then it was still there.
5. Who waits for whom: a cycle is groups that are interleaved; else the rank that waits for nobody is at the end of its
   data, in its data loader, or wherever it is.
6. What does harm without stopping anything: gradients that were not reduced, then replicas that differ for no reason
   that is known by then; a rank that died while Python shut down, which is after all of that; what watchdogs reported
   while the job ran; ranks that finished, and not at the same place; and only of those that did, replicas that differ
   at the end.
7. None of these: slow, healthy, or can't tell, which it is too if a part of the evidence is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Final

from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.facts import Facts
from overlapscope.diagnosis.refutations import is_refuted
from overlapscope.diagnosis.rules import (
    dumped,
    gradients,
    groups,
    interrupted,
    left_backward,
    models,
    new_group,
    order,
    otherwise,
    processes,
    replicas,
    segments,
    settings,
    silent,
    start,
    waiting,
)
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import capitalised, ranks_text, verb

Rule = Callable[[Facts], Verdict | None]

_RULES: Final[tuple[Rule, ...]] = (
    start.wrong_world_size,
    start.never_started,
    models.models_differ,
    settings.settings_differ,
    gradients.never_ready,
    order.diverged,
    groups.made_again,
    waiting.in_no_sync,
    groups.left_out,
    interrupted.interrupted,
    processes.failed,
    processes.exited,
    processes.stopped,
    processes.holds_the_gil,
    processes.killed,
    new_group.not_called,
    groups.interleaved,
    waiting.uneven_inputs,
    silent.not_reduced,
    replicas.differ,
    processes.killed_at_the_end,
    otherwise.reported,
    otherwise.ended_apart,
    replicas.differ_at_end,
    waiting.waits_for_data,
    dumped.not_launched,
    dumped.without_dump,
    waiting.stuck,
    start.first_step,
    otherwise.slow,
    dumped.incomplete,
    otherwise.healthy,
)
_MOST_UNRECORDED: Final = 4
_CONSEQUENCES: Final[tuple[Rule, ...]] = (
    processes.failed,
    processes.exited,
    processes.stopped,
    processes.killed,
    processes.killed_at_the_end,
    silent.not_reduced,
)
"""Rules that are also asked once the cause is known."""
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
"""Kinds of verdicts of which replicas that differ are a consequence, or that say it."""


def judge(evidence: Evidence) -> Verdict:
    """Judge a job: what is wrong with it, if anything is."""
    facts = Facts(evidence)
    found_by_rules = (found for rule in _RULES if (found := rule(facts)) is not None)
    verdict = next((found for found in found_by_rules if not is_refuted(facts, found)), None)
    if verdict is None:
        verdict = otherwise.cannot_tell(facts)
    also = [
        found.sentence
        for rule in _CONSEQUENCES
        if verdict.is_fault and (found := rule(facts)) is not None and found.kind != verdict.kind
    ]
    unknown: list[str] = []
    if verdict.is_fault and verdict.kind not in _EXPLAIN_DRIFT and (drifted := replicas.differ(facts)) is not None:
        unknown.append(drifted.sentence)
    if facts.missing and verdict.kind != "never started":
        missing = facts.missing
        unknown.append(
            f"{capitalised(ranks_text(missing))} left no log: what {verb(missing, 'it', 'they')} did is unknown."
        )
    if evidence.job_signal is not None and verdict.kind != "interrupted":
        unknown.append(f"The command was sent {interrupted.signal_text(evidence.job_signal)} while it ran.")
    for rank in facts.unrecorded[:_MOST_UNRECORDED]:
        one = facts.ranks[rank]
        where = f" in step {one.standing.step}" if one.standing is not None else ""
        unknown.append(
            f"The recording of rank {rank} ended early{where} ({one.unrecorded_because}): what it did next is unknown."
        )
    if verdict.certainty != "certain":
        verdict = replace(verdict, blamed=(), suspected=verdict.named)
    noticed = (rule(facts, verdict) for rule in (segments.noticed, left_backward.noticed, settings.noticed))
    return replace(
        verdict, also=(*verdict.also, *also), evidence=(*verdict.evidence, *chain.from_iterable(noticed), *unknown)
    )

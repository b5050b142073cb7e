"""Remarks: told with any verdict, and no fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.loop_facts import LoopFacts, MicroBatches, RepeatedReductions, UnheldParameters
from overlapscope.diagnosis.replica_drift import (
    OUTSIDE_MODELS,
    Replica,
    StillParameters,
    compare_model_replicas,
)
from overlapscope.diagnosis.verdict import Remark
from overlapscope.trace.live_files import FingerprintPasses, fingerprint_pass_dtype
from tests.diagnosis.jobs import ALIKE, DRIFTED, job, rank

EQUAL = replace(DRIFTED, difference=None)


def looping(*loops: LoopFacts, **more: Any) -> Evidence:
    ranks = [rank(number, "ended", loop=one) for number, one in enumerate(loops)]
    return job(*ranks, groups=[ALIKE], **{"replicas": (EQUAL,)} | more)


def only_remark(evidence: Evidence) -> Remark:
    verdict = judge(evidence)
    assert (verdict.kind, verdict.is_fault) == ("healthy", False)
    (remark,) = verdict.remarks
    return remark


def counted(*changes: tuple[int, int], last_step: int = 20) -> LoopFacts:
    return LoopFacts(micro_batches=(MicroBatches(model=0, changes=changes, last_step=last_step),))


def given(*batches: tuple[int, str]) -> LoopFacts:
    return LoopFacts(batches=batches)


def test_gradients_reduced_twice() -> None:
    twice = LoopFacts(repeated=(RepeatedReductions(model=0, by="user", step=4, updates=3, site="train.py:9 (main)"),))
    remark = only_remark(looping(twice, twice, LoopFacts()))
    assert (remark.kind, remark.ranks, remark.step) == ("gradients reduced twice", (0, 1), 4)


@pytest.mark.parametrize(("updates", "is_told"), [(1, False), (5, True)])
def test_backwards_that_are_all_reduced_are_told_if_that_is_the_rule(updates: int, is_told: bool) -> None:
    each = LoopFacts(repeated=(RepeatedReductions(model=0, by="backwards", step=0, updates=updates, backwards=4),))
    assert len(judge(looping(each, each, each)).remarks) == is_told


def test_the_first_step_with_unequal_numbers_of_micro_batches() -> None:
    remark = only_remark(looping(counted((0, 4)), counted((0, 4), (7, 3), (8, 4)), counted((0, 4))))
    assert (remark.kind, remark.ranks, remark.step) == ("unequal micro batches", (1,), 7)


def test_numbers_that_differ_where_not_all_ranks_are_known_are_not_compared() -> None:
    assert judge(looping(counted((0, 4)), counted((0, 4), (18, 2), last_step=18), counted((30, 9)))).remarks == ()
    assert judge(looping(counted((0, 4), last_step=9), counted((0, 4), (10, 2)), counted((0, 4)))).remarks == ()


def test_parameters_that_one_rank_has_in_no_optimizer_explain_replicas_that_differ() -> None:
    lacking = replace(counted((0, 1)), unheld=(UnheldParameters(model=0, names=("a", "head.bias"), count=2),))
    usual = replace(counted((0, 1)), unheld=(UnheldParameters(model=0, names=("a",), count=1),))
    verdict = judge(looping(usual, lacking, usual, replicas=(DRIFTED,)))
    assert verdict.kind == "replicas differ"
    (remark,) = verdict.remarks
    assert (remark.kind, remark.ranks, remark.parameters) == ("parameters without optimizer", (1,), ("head.bias",))


def test_a_sharded_optimizer_has_some_parameters_on_each_rank() -> None:
    shards = [
        replace(counted((0, 1)), unheld=(UnheldParameters(model=0, names=(name,), count=1),))
        for name in ("a", "b", "c")
    ]
    assert judge(looping(*shards)).remarks == ()


def test_parameters_that_stand_still_are_told_with_the_step() -> None:
    still = StillParameters(rank=2, names=("bias",), step=12, is_since_start=False)
    remark = only_remark(looping(LoopFacts(), LoopFacts(), LoopFacts(), replicas=(replace(EQUAL, still=(still,)),)))
    assert (remark.kind, remark.ranks, remark.step, remark.parameters) == (
        "parameters that stand still",
        (2,),
        12,
        ("bias",),
    )


SAME = tuple((number, f"hash {number}") for number in range(5))
OTHER = tuple((number, f"other {number}") for number in range(5))


def test_ranks_that_are_given_the_same_data() -> None:
    assert only_remark(looping(given(*SAME), given(*SAME), given(*SAME))).ranks == (0, 1, 2)
    assert only_remark(looping(given(*SAME), given(*OTHER), given(*SAME))).ranks == (0, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SAME[:3], SAME[:3]),
        ([(number, "always") for number in range(5)],) * 2,  # one batch, learned by heart
        (SAME, (*SAME[:4], (4, "another"))),
    ],
    ids=["few", "constant", "one differs"],
)
def test_batches_that_say_nothing(first: Sequence[tuple[int, str]], second: Sequence[tuple[int, str]]) -> None:
    assert judge(looping(given(*first), given(*second), given(*OTHER))).remarks == ()


def test_ranks_of_different_models_may_have_the_same_data() -> None:
    """Ranks that hold parts of one replica, as with tensor parallelism, must have."""
    groups = (replace(EQUAL, ranks=(0, 1)), replace(EQUAL, model=1, ranks=(2, 3)))
    data = [given(*one) for one in (SAME, OTHER, SAME, OTHER)]
    ranks = [rank(number, "ended", loop=one) for number, one in enumerate(data)]
    assert judge(job(*ranks, replicas=groups)).remarks == ()


def table(*columns: list[int]) -> FingerprintPasses:
    """Fingerprints of tensors, a list each, one pass a step."""
    passes = np.zeros(len(columns[0]), fingerprint_pass_dtype(len(columns)))
    for step, row in enumerate(passes):
        row["first"], row["period"], row["steps"], row["values"] = step, 1, step, [one[step] for one in columns]
    return passes


def still_in(*tables: FingerprintPasses, model: int = 0) -> tuple[StillParameters, ...]:
    replica = Replica(
        model=model,
        key="k",
        class_name="Net",
        ranks=tuple(range(len(tables))),
        tensors=(("weight", "trained"), ("bias", "trained")),
        numbers=(0, 0),
    )
    compared = compare_model_replicas(dict.fromkeys(range(len(tables)), replica), lambda number: tables[number])
    assert compared is not None
    return compared.still


MOVING = [*range(1, 31)]
STOPPED = [min(one, 13) for one in MOVING]


def test_a_parameter_that_stops_on_one_rank_is_found_with_the_step() -> None:
    moving, stopped = table(MOVING, MOVING), table(MOVING, STOPPED)
    assert still_in(moving, stopped) == (StillParameters(rank=1, names=("bias",), step=12, is_since_start=False),)
    own = [100 + one for one in MOVING]  # parameters of each rank's own
    assert still_in(table(MOVING, own), stopped, model=OUTSIDE_MODELS)[0].names == ("bias",)


@pytest.mark.parametrize("last", [13, 15])
def test_what_stops_on_all_ranks_is_frozen_or_done(last: int) -> None:
    others = [min(one, last) for one in MOVING]
    assert still_in(table(MOVING, others), table(MOVING, STOPPED)) == ()


def test_a_parameter_that_never_moved_is_told_as_that() -> None:
    (found,) = still_in(table(MOVING, [7] * 30), table(MOVING, MOVING))
    assert (found.rank, found.names, found.step, found.is_since_start) == (0, ("bias",), 0, True)

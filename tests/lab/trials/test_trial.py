"""Trials: what they are known by, and in which order they are measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlapscope.lab.experiments.trial import ExperimentTrial, list_remaining
from tests.lab.experiments.rows import trial


def test_a_trial_can_be_made_again_from_its_key():
    one = trial(3, bucket_cap_mb=2.5, groups=3, sync_every=4, batch=8, learning_rate=0.02)
    assert ExperimentTrial.read(one.key) == one


def test_trials_that_differ_are_recorded_into_different_folders():
    ways = [
        {},
        {"ranks": 3},
        {"strategy": "ring"},
        {"bucket_cap_mb": 0.0},
        {"groups": 3},
        {"sync_every": 2},
        {"batch": 9},
    ]
    trials = [trial(repetition, **way) for repetition in range(2) for way in ways]
    assert len({each.folder_name for each in trials}) == len(trials)


@given(repetitions=st.integers(1, 4), settings=st.integers(1, 6), done=st.data())
def test_all_that_is_left_is_measured_once_and_repetition_by_repetition(repetitions, settings, done):
    trials = [trial(number, ranks=2 + each) for number in range(repetitions) for each in range(settings)]
    finished = set(done.draw(st.lists(st.sampled_from([each.key for each in trials]), unique=True)))
    left = list_remaining(trials, finished)
    assert {each.key for each in left} == {each.key for each in trials} - finished
    assert [each.repetition for each in left] == sorted(each.repetition for each in left)


def test_repetitions_are_in_orders_of_their_own_that_are_the_same_each_time():
    trials = [trial(number, ranks=ranks) for number in range(4) for ranks in range(2, 8)]
    left = list_remaining(trials, ())
    assert left == list_remaining(trials[::-1], ())
    orders = {tuple(each.ranks for each in left if each.repetition == number) for number in range(4)}
    assert len(orders) > 1

"""What two neighbors find out by comparing a few numbers now and then, against what really differs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.watchdog.peer_comparison import LogComparison, compared_columns, log_head
from overlapscope.diagnosis.order_difference import find_first_difference
from overlapscope.trace.collective_log import UNEVEN_INPUTS, CollectiveLogHeader, CollectiveLogWriter, Signature


class Rank:
    """One rank's log, and what it has launched."""

    def __init__(self, path, rank):
        self.log = CollectiveLogWriter(path / f"{rank}.log", CollectiveLogHeader(name="0", ranks=(0, 1), rank=rank))
        self.signatures = []

    def launch(self, signature, **where):
        if signature not in self.signatures:
            self.signatures.append(signature)
        number = self.signatures.index(signature) + 1
        self.log.announce(number, signature, now_ns=1, **({"step": 0} | where))

    def bucket(self, step, batch, flags=0):
        signature = Signature(op="all_reduce", elements=100, dtype="float32", role="bucket", bucket=0, plan_hash="p")
        self.launch(signature, step=step, batch=batch, flags=flags)

    def reduce(self, name, elements=3, **where):
        self.launch(Signature(op="all_reduce", elements=elements, dtype="float32", names=(name,)), **where)


class Pair:
    """Two ranks; the second is compared with by the first, as over a store."""

    def __init__(self, path):
        self.ours, self.theirs = Rank(path, 0), Rank(path, 1)
        self.comparison = LogComparison(self.ours.log, self.ours.signatures)
        self.questions = 0

    def compare(self):
        head = log_head(self.theirs.log, self.theirs.signatures)
        suspicion = self.comparison.look(head)
        if suspicion is None:
            return None
        self.questions += 1
        rows = compared_columns(self.theirs.log, self.theirs.signatures, suspicion.first, suspicion.last)
        return self.comparison.resolve(suspicion.first, rows, head)


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def test_equal_logs_agree_and_nothing_is_asked(pair):
    for step in range(50):
        for rank in (pair.ours, pair.theirs):
            rank.bucket(step, step + (5 if rank is pair.ours else 0))
        assert pair.compare() is None
    assert pair.questions == 0
    assert pair.comparison.agreed == 50


def test_the_rank_that_is_behind_leaves_it_to_the_other(pair):
    pair.theirs.reduce("loss")
    assert pair.compare() is None
    assert pair.comparison.agreed == 0


@pytest.mark.parametrize("look_every", [1, 3, 17])
def test_the_first_collective_of_another_size_is_found(pair, look_every):
    found = []
    for number in range(1, 101):
        pair.ours.reduce("loss", 3)
        pair.theirs.reduce("loss", 4 if number == 42 else 3)
        if number % look_every == 0:
            found.append(pair.compare())
    differences = [difference for difference in found if difference]
    assert [(one.number, one.divergence) for one in differences] == [(42, "signature")], "once, and not again"


def test_a_bucket_of_another_step_is_found(pair):
    for step in range(10):
        pair.ours.bucket(step, step)
        pair.theirs.bucket(step - (step >= 7), step)
        found = pair.compare()
        assert (found is not None) == (step >= 7)
        if found:
            assert (found.number, found.divergence) == (8, "step")
            break


def test_a_skipped_batch_is_found_although_all_shapes_are_equal(pair):
    for step in range(10):
        pair.ours.bucket(step, step)
        pair.theirs.bucket(step, step + 3 + (step >= 6))
        found = pair.compare()
        if found:
            assert (found.number, found.divergence) == (7, "batch")
            break
    else:
        pytest.fail("not found")


def test_a_new_epoch_is_no_skipped_batch(pair):
    for step in range(40):
        pair.ours.bucket(step, step % 8)
        pair.theirs.bucket(step, step % 8)
        assert pair.compare() is None


def test_ranks_with_uneven_inputs_may_be_anywhere_in_their_data(pair):
    for step in range(40):
        pair.ours.bucket(step, step, UNEVEN_INPUTS)
        pair.theirs.bucket(step // 2, step // 3, UNEVEN_INPUTS)
        assert pair.compare() is None
    assert pair.questions == 0


@pytest.mark.parametrize("left_out", [None, 20])
def test_a_difference_after_a_step_that_was_left_out_may_be_older(pair, left_out):
    for step in range(100):
        pair.theirs.reduce("gradient", step=step)
        pair.ours.reduce("gradient", step=step + (left_out is not None and step >= left_out))
        assert pair.compare() is None
    pair.theirs.reduce("gradient", step=100)
    pair.ours.reduce("loss", 1, step=100)
    found = pair.compare()
    assert (found.number, found.divergence, found.predates_log) == (101, "signature", left_out is not None)


@pytest.mark.parametrize("look_every", [1, 2, 7])
def test_swapped_names_are_found(pair, look_every):
    found = []
    for step in range(20):
        names = ("norm", "loss")
        for name in names:
            pair.ours.reduce(name)
        for name in reversed(names) if step == 11 else names:
            pair.theirs.reduce(name)
        if step % look_every == 0:
            found.append(pair.compare())
    assert [(one.number, one.divergence) for one in found if one] == [(23, "names")]


def test_other_names_are_no_fault_and_asked_about_once(pair):
    for _ in range(100):
        pair.ours.reduce("weights")
        pair.theirs.reduce("received")
        pair.ours.reduce("loss")
        pair.theirs.reduce("loss")
        assert pair.compare() is None
    assert pair.questions == 1


def test_names_that_are_swapped_among_harmless_differences_are_found(pair):
    found = None
    for step in range(30):
        ours, theirs = ["weights", "norm", "loss"], ["received", "norm", "loss"]
        if step == 20:
            theirs = ["received", "loss", "norm"]
        for mine, other in zip(ours, theirs, strict=True):
            pair.ours.reduce(mine)
            pair.theirs.reduce(other)
        found = found or pair.compare()
    assert (found.number, found.divergence) == (62, "names")


def test_names_that_are_new_each_time_are_given_up_on(pair):
    for number in range(300):
        pair.ours.reduce(f"ours {number}")
        pair.theirs.reduce(f"theirs {number}")
        assert pair.compare() is None
    assert pair.questions < 100


NAMES = st.sampled_from(["norm", "loss", "weights"])


@st.composite
def two_orders(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """What two ranks launch, by name: the same, but for a few collectives; ``bucket`` is the only one of its size."""
    ours = draw(st.lists(st.one_of(NAMES, st.just("bucket")), min_size=1, max_size=80))
    theirs = list(ours)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(theirs) - 1))
        match draw(st.sampled_from(["swap", "rename", "insert", "drop"])):
            case "swap":
                theirs[place - 1], theirs[place] = theirs[place], theirs[place - 1]
            case "rename":
                theirs[place] = draw(NAMES) if theirs[place] != "bucket" else "bucket"
            case "insert":
                theirs.insert(place, draw(NAMES))
            case "drop" if len(theirs) > 1:
                del theirs[place]
    return ours, theirs


@given(two_orders(), st.integers(1, 20))
def test_looks_now_and_then_find_what_comparing_all_entries_finds(orders, look_every):
    with tempfile.TemporaryDirectory() as folder:
        pair, found = Pair(Path(folder)), None
        for number, names in enumerate(zip(*orders, strict=False), 1):
            for rank, name in zip((pair.ours, pair.theirs), names, strict=True):
                if name == "bucket":
                    rank.bucket(rank.log.latest, rank.log.latest)
                else:
                    rank.reduce(name)
            if found is None and number % look_every == 0:
                found = pair.compare()
                looked_at = number
        if found is None:
            found, looked_at = pair.compare(), number
        ours, theirs = (compared_columns(rank.log, rank.signatures, 1, looked_at) for rank in (pair.ours, pair.theirs))
        assert found == find_first_difference(ours, theirs)


@pytest.mark.parametrize("batch", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("flags", [0, UNEVEN_INPUTS])
def test_the_batch_of_the_newest_entry_is_the_one_that_is_compared(pair, batch, flags):
    pair.ours.bucket(0, batch, flags)
    for launch in (lambda: pair.ours.reduce("loss"), lambda: pair.ours.bucket(1, batch, flags)):
        log, signatures = pair.ours.log, pair.ours.signatures
        rows = compared_columns(log, signatures, log.latest, log.latest)
        assert log_head(log, signatures).batch == rows["batch"][0]
        launch()

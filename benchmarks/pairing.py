"""Two ways of doing one training step, measured in pairs: the ratio of their times, and how sure it is.

A machine's speed drifts by more than what is to be measured, so the two sides of a comparison run one right after the
other, a block of steps each, and only the ratio of the two is looked at. Which side of a pair comes first is drawn,
equally often each, with a seed that all ranks share. The sides of several comparisons take turns.

The ranks start a block together, behind a barrier. Its wall time is that of the rank that took longest, because that
is when the job is done with it: one rank's local time would hide whatever holds up another after the last all-reduce.
Its CPU time is the sum over the ranks' processes with all their threads (gloo's, ours, a profiler's), which also shows
work that hides in waiting time, and hardly notices other jobs on the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

_FEWEST_PAIRS: Final = 4
_BOOTSTRAP_DRAWS: Final = 2000
_LONG_STEP_S: Final = 0.3
"""In such a step cold caches don't show."""


@dataclass(frozen=True)
class Side:
    """One way of doing a step."""

    step: Callable[[], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered before each block and left after it, outside the time that is taken."""


Comparison = tuple[Side, Side]
"""What is looked at, and what it is compared with."""


@dataclass(frozen=True)
class Block:
    """How many steps are timed in one go, after how many that are not."""

    steps: int
    lead_in: int = 1
    """The first step after the other side has run finds little of its own in the caches."""


@dataclass(frozen=True)
class BlockTimes:
    """Nanoseconds of all blocks of one comparison, shape (pairs, 2)."""

    wall_ns: np.ndarray
    cpu_ns: np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def measure_pairs(
    comparisons: Mapping[str, Comparison],
    block: Block,
    *,
    most_pairs: int,
    most_seconds: float = float("inf"),
    seed: int = 0,
    on_pair: Callable[[], object] = lambda: None,
) -> dict[str, BlockTimes]:
    """Measure pairs of blocks until there are enough or time is up. All ranks call this together.

    Args:
        comparisons: by name; all ranks pass the same, in the same order.
        block: what is timed in one go.
        most_pairs: of each comparison.
        most_seconds: no new round of pairs is begun after this time, unless there are very few.
        seed: of the order within pairs, the same on all ranks.
        on_pair: called when a pair of each comparison is done.

    Returns:
        Times of the whole job by comparison, the same on all ranks.
    """
    first_sides = {name: _draw_first_sides(random.Random(f"{seed} {name}")) for name in comparisons}
    taken: list[list[list[tuple[int, int]]]] = []  # this rank's, by pair, comparison and side
    deadline = time.monotonic() + most_seconds
    while len(taken) < most_pairs and _rank_0_says(len(taken) < _FEWEST_PAIRS or time.monotonic() < deadline):
        taken.append([])
        for name, sides in comparisons.items():
            first = next(first_sides[name])
            times = {side: _time_block(sides[side], block) for side in (first, 1 - first)}
            taken[-1].append([times[0], times[1]])
        on_pair()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, taken)
    times_ns = np.array(everyones)  # by rank, pair, comparison, side and clock
    return {
        name: BlockTimes(
            wall_ns=times_ns[:, :, number, :, 0].max(axis=0), cpu_ns=times_ns[:, :, number, :, 1].sum(axis=0)
        )
        for number, name in enumerate(comparisons)
    }


def block_of(step: Callable[[], None], at_least_s: float, tries: int = 3) -> Block:
    """Make a block that takes a given time at least; the same on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(tries):
        step()
    step_s = torch.tensor((time.perf_counter() - start) / tries)
    dist.all_reduce(step_s, dist.ReduceOp.MIN)
    return Block(steps=int(at_least_s / step_s) + 1, lead_in=0 if step_s > _LONG_STEP_S else 1)


def ratio_of(times: Sequence[np.ndarray], draws: int = _BOOTSTRAP_DRAWS) -> Estimate:
    """Return the median over pairs of first side / second side.

    Args:
        times: shape (pairs, 2) each, from one start of the processes each. Where memory happens to lie differs between
            starts, so the bootstrap draws starts first, and then pairs of each.
        draws: of the bootstrap.
    """
    ratios = [both[:, 0] / both[:, 1] for both in times]
    random_draws = np.random.default_rng(0)
    medians = []
    for _ in range(draws):
        starts = random_draws.integers(len(ratios), size=len(ratios))
        medians.append(np.median(np.concatenate([random_draws.choice(ratios[s], len(ratios[s])) for s in starts])))
    low, high = np.percentile(medians, [2.5, 97.5])
    return Estimate(float(np.median(np.concatenate(ratios))), float(low), float(high))


def _draw_first_sides(random_draws: random.Random) -> Iterator[int]:
    """Yield the side that a pair begins with, pair by pair: each of them once in two pairs."""
    while True:
        first = random_draws.randrange(2)
        yield first
        yield 1 - first


def _time_block(side: Side, block: Block) -> tuple[int, int]:
    """Wall and CPU nanoseconds on this rank."""
    with side.around():
        for _ in range(block.lead_in):
            side.step()
        dist.barrier()
        wall_start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(block.steps):
            side.step()
        return time.perf_counter_ns() - wall_start, time.process_time_ns() - cpu_start


def _rank_0_says(what: bool) -> bool:
    answer = torch.tensor(what)
    dist.broadcast(answer, 0)
    return bool(answer)

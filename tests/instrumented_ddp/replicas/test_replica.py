"""What a replica's fingerprints cost, on virtual clocks of the host and the device."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instrumented_ddp.replicas import replica as replica_module
from instrumented_ddp.replicas.fingerprint import divide_into_parts
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.replicas.rows import HostRows
from instrumented_ddp.replicas.schedule import MAX_COST_SHARE, number_part

LAYERS = 64
STEPS = 20_000


class Clock:
    """A clock of a thread that never waits."""

    def __init__(self) -> None:
        self.now_ns = 0.0

    def perf_counter_ns(self) -> int:
        return int(self.now_ns)

    thread_time_ns = perf_counter_ns


class CostlyRows(HostRows):
    """Rows whose parts take a known time of the host's clock, and of the device beside it."""

    clock: Clock
    host_ns = 0.0
    part_device_ns = 0.0
    first_factor = 1.0
    spent_ns = 0.0
    taken = 0

    def take(self, part: int) -> None:
        self.taken += 1
        factor = self.first_factor if self.taken <= len(self.parts) else 1.0
        self.clock.now_ns += factor * self.host_ns
        self.spent_ns += max(factor * self.host_ns, self.part_device_ns)
        self.device_ns = self.part_device_ns * len(self.parts)
        self._is_taken[part] = True


def fail(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 4) for _ in range(LAYERS)])


def make_replica(module: nn.Module, clock: Clock) -> tuple[FingerprintedReplica, CostlyRows]:
    tensors = list(module.parameters())
    parts = divide_into_parts(tensors)
    replica = FingerprintedReplica(tensors, parts, [number_part(part) for part in range(len(parts))], fail)
    rows = CostlyRows(tensors, parts)
    rows.clock = clock
    replica._rows = rows
    return replica, rows


@given(
    host_us=st.floats(1, 300),
    device_us=st.floats(0, 300),
    first_factor=st.floats(1, 30),
    jumps=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.5, 2)), min_size=1, max_size=4),
    step_ms=st.floats(5, 200),
    pause_s=st.floats(0, 60),
)
def test_the_share_is_a_thousandth_whether_host_or_device_is_the_limit(
    module: nn.Module,
    host_us: float,
    device_us: float,
    first_factor: float,
    jumps: list[tuple[float, float]],
    step_ms: float,
    pause_s: float,
) -> None:
    """With a slow first pass, steps and costs that jump, and evaluations, which are no steps."""
    clock = Clock()
    with patch.object(replica_module, "time", clock):
        replica, rows = make_replica(module, clock)
        rows.first_factor = first_factor
        steps_ns = largest_ns = 0.0
        for reductions in range(STEPS):
            of_step, of_cost = jumps[reductions * len(jumps) // STEPS]
            rows.host_ns, rows.part_device_ns = 1e3 * host_us * of_cost, 1e3 * device_us * of_cost
            before_ns = rows.spent_ns
            replica.on_forward_start(reductions, reductions)
            largest_ns = max(largest_ns, rows.spent_ns - before_ns)
            clock.now_ns += 1e6 * step_ms * of_step
            steps_ns += 1e6 * step_ms * of_step
            if reductions % 700 == 650:
                clock.now_ns += 1e9 * pause_s
        pass_ns = len(rows.parts) * 2 * 1e3 * max(host_us, device_us)
        assert rows.taken > len(rows.parts)
        assert rows.spent_ns <= MAX_COST_SHARE * steps_ns + (first_factor + 10) * pass_ns


@pytest.mark.parametrize(("factor", "period"), [(0.05, 4096), (20, 64)])
def test_a_pass_ends_when_steps_become_much_longer_or_shorter(factor: float, period: int) -> None:
    clock, numbers = Clock(), iter(range(10**6))
    with patch.object(replica_module, "time", clock):
        replica, rows = make_replica(nn.ParameterList([torch.zeros(3)] * 640), clock)
        rows.host_ns = 75_000.0

        def train(steps: int, step_ms: float) -> None:
            for _ in range(steps):
                number = next(numbers)
                replica.on_forward_start(number, number)
                clock.now_ns += 1e6 * step_ms

        train(20_000, 2.0)
        assert replica.period == 1024  # 20 parts of 75 us each, 2 us allowed in a step
        replica.passes()
        while not replica.passes():
            train(1, 2.0)
        train(500, 2.0 * factor)
        assert replica.period == period


def test_a_pass_is_handed_over_as_soon_as_its_last_part_is_final(module: nn.Module) -> None:
    clock = Clock()
    with patch.object(replica_module, "time", clock):
        replica, rows = make_replica(module, clock)
        rows.host_ns = 100_000.0
        last_taken = handed_over = 0
        for number in range(3000):
            taken = rows.taken
            replica.on_forward_start(number, number)
            last_taken = number if rows.taken > taken else last_taken
            for period, first, _, _ in replica.passes():
                handed_over += 1
                assert number == last_taken + 1 or number == first + period  # in a period of one step it is taken again
            clock.now_ns += 2e6
        assert handed_over > 5


def test_gradients_and_random_numbers_are_left_alone(module: nn.Module) -> None:
    tensors = list(module.parameters())
    replica = FingerprintedReplica(tensors, divide_into_parts(tensors), range(4), fail)
    state = torch.get_rng_state()
    replica.on_forward_start(0, 0)
    replica.close(1)
    assert len(replica.passes()) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_parameters_that_are_moved_between_the_passes_of_a_step_are_not_compared(module: nn.Module) -> None:
    replica, rows = make_replica(module, Clock())
    replica.on_accumulating_forward(0)
    with torch.no_grad():
        for parameter in module.parameters():  # as sharpness-aware minimization does
            parameter += 1
    replica.on_forward_start(0, 0)
    assert rows.taken == 0
    replica.on_accumulating_forward(1)
    replica.on_forward_start(1, 1)
    assert rows.taken > 0

"""Gradients that the user's own collectives reduce are known by their memory, or as copies by size and values."""

from __future__ import annotations

import pytest
import torch

from instrumented_ddp.collectives.user_reductions import GradientReader, UserReductions

LINE = 7
ALL = (0, 1)


class Loop:
    """A module with gradients, and what is reduced of them."""

    def __init__(self, within: frozenset[int] | None = None) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.parameters = [*self.module.parameters()]
        self.reductions = UserReductions()
        self.reader = GradientReader(self.reductions, self.parameters, within)
        self.backward()

    def backward(self) -> None:
        self.module.zero_grad()
        self.module(torch.randn(3, 4)).square().sum().backward()

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self.parameters if one.grad is not None]

    def reduce(self, *tensors: torch.Tensor, ranks: tuple[int, ...] = ALL, line: int = LINE) -> None:
        for tensor in tensors:
            self.reductions.on_reduction([tensor], line, ranks)


def test_a_gradient_is_known_by_its_memory_whatever_tensor_holds_it() -> None:
    loop = Loop()
    first, second, *_ = loop.gradients
    loop.reduce(first.data, second.view(-1))
    assert loop.reader.take() == {0, 1}
    assert loop.reader.take() == frozenset()


def test_a_buffer_that_gradients_are_views_of_reduces_all_of_them() -> None:
    loop = Loop()
    buffer = torch.cat([one.reshape(-1) for one in loop.gradients])
    begin = 0
    for parameter in loop.parameters:
        parameter.grad = buffer[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    loop.reduce(buffer)
    assert loop.reader.take() == {0, 1, 2, 3}


@pytest.mark.parametrize("divisor", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("some", "covered"), [(slice(None), {0, 1, 2, 3}), (slice(1, None), {1, 2, 3})])
def test_a_copy_is_known_by_its_size_and_values(
    some: slice, covered: set[int], dtype: torch.dtype, divisor: int
) -> None:
    loop = Loop()
    for _ in range(3):
        loop.backward()
        loop.reduce(torch.cat([one.reshape(-1) for one in loop.gradients[some]]).to(dtype) / divisor)
        assert loop.reader.take() == covered


def test_copies_of_equal_size_reduced_in_one_line_are_told_apart() -> None:
    loop = Loop()
    for _ in range(3):
        loop.backward()
        loop.reduce(*[one.clone() for one in loop.gradients])
        covered = loop.reader.take()
    assert covered == {0, 1, 2, 3}


def test_what_is_no_gradient_is_none_and_counts_as_unknown() -> None:
    loop = Loop()
    loop.reduce(loop.parameters[0].data, torch.randn(4, 4), torch.ones(1))
    assert loop.reader.take() == frozenset()
    assert loop.reader.unknown_elements == 33


def test_memory_that_is_used_again_is_another_tensors() -> None:
    loop = Loop()
    for parameter in loop.parameters:
        parameter.grad = None
    for _ in range(50):  # the allocator gives the same memory to the next tensor of this size
        loop.reduce(torch.randn(4, 4))
    loop.backward()
    assert loop.reader.take() == frozenset()


def test_gradients_that_another_optimizer_updates_are_not_unknown() -> None:
    loop = Loop()
    other = GradientReader(loop.reductions, loop.parameters[2:])
    for _ in range(2):
        loop.backward()
        loop.reduce(*loop.gradients[:2], line=5)
        loop.reduce(*loop.gradients[2:])
        assert loop.reader.take() == {0, 1, 2, 3}
        assert other.take() == {0, 1}
    assert other.unknown_elements == 0


def test_a_reduction_with_other_ranks_is_no_repetition() -> None:
    loop = Loop(within=frozenset(ALL))
    loop.reduce(*loop.gradients, ranks=(0, 2))
    assert loop.reader.take() == frozenset()
    loop.reduce(*loop.gradients, ranks=(0, 1))
    assert loop.reader.take() == {0, 1, 2, 3}


def test_the_same_launches_again_are_not_looked_at_and_others_are() -> None:
    loop = Loop()
    for skipped in (False, False, True, False):
        loop.backward()
        loop.reduce(*loop.gradients[skipped:])
        assert loop.reader.take() == set(range(skipped, 4))


def test_so_much_that_the_beginning_was_forgotten_is_unknown() -> None:
    loop = Loop()
    for _ in range(5000):
        loop.reduce(torch.ones(1))
    assert loop.reader.take() is None
    loop.reduce(loop.gradients[0])
    assert loop.reader.take() == {0}


def test_it_is_known_whether_a_group_of_so_many_ranks_reduces_gradients() -> None:
    loop = Loop()
    assert loop.reader.is_reduced_by(4), "nothing is known"
    loop.reduce(*loop.gradients, ranks=(0, 2))
    loop.reduce(torch.zeros(3), ranks=(0, 1, 2, 3))
    loop.reader.take()
    assert loop.reader.is_reduced_by(2)
    assert not loop.reader.is_reduced_by(4), "another tensor"

"""Buffers: broadcast before each forward, or by a hook, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, batch, logged, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)


class Counting(nn.Module):
    """Linear layers around a batch norm; counts calls and keeps what ranks differ in."""

    def __init__(self, *, replaces_buffers: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("own_rank", torch.tensor([float(dist.get_rank())]))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("not_saved", torch.rand(2), persistent=False)
        self.replaces_buffers = replaces_buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers, and count."""
        if self.replaces_buffers:
            self.calls = self.calls + 1 + dist.get_rank()
        else:
            self.calls += 1 + dist.get_rank()
        return self.layers(x) + self.own_rank


def train_and_note_buffers(model: nn.parallel.DistributedDataParallel, seen: Seen) -> None:
    seen.state("at construction", model)
    for step in range(4):
        mean_square(model, step).backward()
        seen.note(f"step {step}: buffers", dict(model.named_buffers()))
        seen.gradients(f"step {step}", model)


@scenarios.add(forward_sync_buffers=(None, True, False), broadcast_buffers=(None, True, False))
def whether_to_broadcast(
    make_ddp: MakeDdp, seen: Seen, forward_sync_buffers: bool | None, broadcast_buffers: bool | None
) -> None:
    with seen.warnings("construction"):
        model = make_ddp(Counting(), forward_sync_buffers=forward_sync_buffers, broadcast_buffers=broadcast_buffers)
    seen.note("broadcast_buffers", model.broadcast_buffers)
    seen.note("forward_sync_buffers", model.forward_sync_buffers)
    train_and_note_buffers(model, seen)
    seen.note("logged", logged(model))


@scenarios.add()
def the_choice_may_change(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Counting())
    for value in (False, True):
        model.broadcast_buffers = value
        seen.note("forward_sync_buffers", model.forward_sync_buffers)
        train_and_note_buffers(model, seen)


@scenarios.add()
def the_module_replaces_a_buffer(make_ddp: MakeDdp, seen: Seen) -> None:
    train_and_note_buffers(make_ddp(Counting(replaces_buffers=True)), seen)


@scenarios.add()
def gradients_are_accumulated(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Counting())
    for step in range(0, 6, 2):
        with model.no_sync():
            mean_square(model, step).backward()
            seen.note(f"step {step}: buffers inside no_sync", dict(model.named_buffers()))
        mean_square(model, step + 1).backward()
        seen.note(f"step {step}: buffers", dict(model.named_buffers()))


@scenarios.add()
def evaluation_in_between(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Counting())
    for step in range(3):
        train(model, seen, steps=[step])
        model.eval()
        with torch.no_grad():
            for part in range(2):
                seen.note(f"step {step}: evaluation {part}", model(batch(step + part)))
                seen.note(f"step {step}: buffers", dict(model.named_buffers()))
        model.train()


@scenarios.add()
def a_batch_norm_is_run_twice_before_backward(make_ddp: MakeDdp, seen: Seen) -> None:
    # The broadcast must not make autograd believe that a buffer of the first pass has changed.
    model = make_ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    train(model, seen, loss_of=lambda model, step: mean_square(model, step) + mean_square(model, step + 10))


def adding(asked: list[str], buffers: dict[str, torch.Tensor]) -> None:
    asked.append(" ".join(buffers))
    for buffer in buffers.values():
        dist.all_reduce(buffer)


def adding_later(asked: list[str], buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[torch.Tensor]]:
    asked.append(" ".join(buffers))
    return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]


@scenarios.add(hook=(adding, adding_later))
def a_hook_for_buffers(make_ddp: MakeDdp, seen: Seen, hook: Callable[..., object]) -> None:
    model = make_ddp(Counting())
    asked: list[str] = []
    model._register_buffer_comm_hook(asked, hook)
    train_and_note_buffers(model, seen)
    seen.note("calls of the hook", asked)


@scenarios.add()
def a_hook_for_buffers_before_the_forward(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Counting())
    asked: list[str] = []
    model._register_buffer_comm_hook(asked, adding, _BufferCommHookLocation.PRE_FORWARD)
    train_and_note_buffers(model, seen)
    seen.note("calls of the hook", asked)


@scenarios.add()
def a_hook_for_buffers_must_be_callable(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Counting())
    seen.error("hook", lambda: model._register_buffer_comm_hook(None, "no function"))


@scenarios.add()
def ignored_buffers_are_left_alone(make_ddp: MakeDdp, seen: Seen) -> None:
    module = Counting()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own_rank", "calls"])
    model = make_ddp(module)
    train_and_note_buffers(model, seen)
    seen.note("watched", sorted(model.named_module_buffers))


@scenarios.add()
def synchronized_batch_norm_is_refused_on_a_cpu(make_ddp: MakeDdp, seen: Seen) -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    seen.error("construction", lambda: make_ddp(module))

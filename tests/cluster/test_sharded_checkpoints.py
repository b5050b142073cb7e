"""What some ranks have saved any number of others load; what is no checkpoint is refused; a kill loses nothing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, ShardedOptimizer
from instrumented_ddp.strategies.sharded import checkpoint
from overlapscope.errors import OverlapScopeError
from tests.cluster.ranks import Ranks, run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 12


class Net(nn.Module):
    """A convolution whose weights lie channels last, statistics of a batch, something frozen, and half precision."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3)) + self.frozen.sum()
        return self.head(x.to(torch.bfloat16)).float()


def make(seed: int = 0, width: int = 9, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> ShardedOptimizer:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Net(width), strategy="sharded", bucket_cap_mb=0.0005)
    made = ShardedOptimizer(ddp, optimizer, lr=0.02)
    made.ddp = ddp
    return made


def train(optimizer: ShardedOptimizer, steps: range, *, same_on_all: bool = False) -> list[str]:
    """Losses to the bit."""
    scheduler_gamma = 0.97
    losses = []
    for step in steps:
        data = torch.Generator().manual_seed(100 * step + (0 if same_on_all else dist.get_rank()))
        loss = optimizer.ddp(torch.randn(8, 3, 6, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= scheduler_gamma
        losses.append(loss.item().hex())
    return losses


def save_and_train(folder: str) -> list[str]:
    optimizer = make()
    train(optimizer, range(4), same_on_all=True)
    checkpoint.save(folder, optimizer, 4, {"note": "of rank 0"})
    return train(optimizer, range(4, 8), same_on_all=True)


def load_and_train(folder: str) -> tuple[list[str], dict[str, Any]]:
    optimizer = make(seed=1)  # other weights
    path = checkpoint.latest(folder)
    assert path is not None
    extra = checkpoint.load(path, optimizer)
    return train(optimizer, range(4, 8), same_on_all=True), extra


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (4, 2), (2, 1), (1, 4), (2, 2)])
def test_a_checkpoint_loads_into_any_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    (went_on, *_) = run_ranks(save_and_train, saved_by, str(tmp_path))
    for losses, extra in run_ranks(load_and_train, loaded_by, str(tmp_path)):
        assert extra == {"note": "of rank 0"}
        if saved_by == loaded_by:
            assert losses == went_on
        numbers = [[float.fromhex(loss) for loss in some] for some in (losses, went_on)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-3)


def states_of(folder: str, *, loads: bool) -> list[tuple[str, int, list[float]]]:
    """By fragment, what the optimizer keeps of it."""
    optimizer = make(seed=1)
    if loads:
        checkpoint.load(checkpoint.latest(folder), optimizer)
    else:
        train(optimizer, range(3), same_on_all=True)
        checkpoint.save(folder, optimizer, 3)
    return [
        (one.name, one.fragment.begin, optimizer.inner.state[one.main]["exp_avg"].tolist())
        for one in optimizer.shards.owned
    ]


def test_each_element_has_the_state_that_it_had(tmp_path: Path) -> None:
    saved, loaded = (
        {(name, begin + at): value for rank in ranks for name, begin, row in rank for at, value in enumerate(row)}
        for ranks in (run_ranks(_save_state, 3, str(tmp_path)), run_ranks(_load_state, 2, str(tmp_path)))
    )
    assert len(saved) == 9 * 27 + 9 + 9 + 9 + 45 + 5
    assert saved == loaded


def _save_state(folder: str) -> list[tuple[str, int, list[float]]]:
    return states_of(folder, loads=False)


def _load_state(folder: str) -> list[tuple[str, int, list[float]]]:
    return states_of(folder, loads=True)


# -- what is none ----------------------------------------------------------------------------------------------------


def refusals(folder: str) -> list[str]:
    optimizer = make()
    train(optimizer, range(1))
    path = checkpoint.save(folder, optimizer, 1)
    said = []

    def refused(act: Any) -> None:
        try:
            act()
        except OverlapScopeError as error:
            said.append(str(error).replace(folder, ""))

    refused(lambda: checkpoint.save(folder, optimizer, 1))
    refused(lambda: checkpoint.load(path, make(width=8)))
    refused(lambda: checkpoint.load(path, make(optimizer=torch.optim.SGD)))
    refused(lambda: checkpoint.load(Path(folder), optimizer))
    content = (path / "rank_0.pt").read_bytes()
    (path / "rank_0.pt").write_bytes(content[:-9])
    refused(lambda: checkpoint.load(path, optimizer))
    (path / "rank_0.pt").write_bytes(b"\0" * len(content))
    refused(lambda: checkpoint.load(path, optimizer))
    (path / "complete.json").write_text("{}")
    refused(lambda: checkpoint.load(path, optimizer))
    (path / "complete.json").unlink()
    refused(lambda: checkpoint.load(path, optimizer))
    assert checkpoint.latest(folder) is None
    checkpoint.save(folder, optimizer, 1)  # what is left of an incomplete one is written anew
    assert checkpoint.latest(folder) == path
    return said


def test_what_is_incomplete_or_of_something_else_is_refused_in_one_line(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    (said,) = run_ranks(refusals, 1, str(tmp_path))
    golden("refused/checkpoint", "\n".join(said))


def save_where_one_cannot(folder: str) -> str:
    optimizer = make()
    if dist.get_rank() == 1:
        folder = "/proc/nowhere"
    try:
        checkpoint.save(folder, optimizer, 1)
    except OverlapScopeError as error:
        return str(error)
    return ""


def test_if_one_rank_cannot_write_all_are_told_and_nothing_is_complete(tmp_path: Path) -> None:
    told = run_ranks(save_where_one_cannot, 2, str(tmp_path))
    assert "another rank" in told[0]
    assert "can't be written" in told[1]
    assert checkpoint.latest(tmp_path) is None


# -- killed ----------------------------------------------------------------------------------------------------------


def train_and_save(folder: str) -> None:
    """Go on from the newest checkpoint, and save after every step; rank 0 notes the losses."""
    optimizer = make()
    first = 0
    if (path := checkpoint.latest(folder)) is not None:
        first = checkpoint.load(path, optimizer)["step"]
    dist.barrier()  # nobody saves before all have found the newest
    for step in range(first, STEPS):
        (loss,) = train(optimizer, range(step, step + 1))
        if dist.get_rank() == 0:
            with (Path(folder) / "losses.txt").open("a") as file:
                file.write(f"{step} {loss}\n")
        checkpoint.save(folder, optimizer, step + 1, {"step": step + 1})


def lines_in(folder: Path) -> list[tuple[int, str]]:
    """Step and loss, in the order in which they were noted."""
    path = folder / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), loss) for step, loss in map(str.split, lines)]


def train_until_killed(folder: Path, chance: random.Random) -> None:
    """Kill a rank, or both, somewhere in the second or third step from now: also while they save."""
    with Ranks(2) as ranks:
        pids = ranks.call(os.getpid)
        victims = chance.choice([pids[:1], pids[1:], pids])
        goal, delay_s = len(lines_in(folder)) + chance.randint(1, 2), chance.uniform(0, 0.03)

        def kill() -> None:
            while len(lines_in(folder)) < goal:
                time.sleep(0.001)
            time.sleep(delay_s)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with suppress(RuntimeError):  # a rank died
            results = ranks.call(train_and_save, str(folder))
            assert any(isinstance(result, Exception) for result in results)
        killer.join()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_a_training_killed_at_random_moments_goes_on_with_the_same_losses_to_the_bit(tmp_path: Path, seed: int) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    run_ranks(train_and_save, 2, str(undisturbed))
    chance = random.Random(seed)
    for _ in range(3):
        train_until_killed(killed, chance)
    before = len(lines_in(killed))
    run_ranks(train_and_save, 2, str(killed))
    assert before < len(lines_in(killed))  # there was something left to do
    assert [step for step, _ in lines_in(undisturbed)] == list(range(STEPS))
    assert set(lines_in(killed)) == set(lines_in(undisturbed))

"""The wait for a batch of torch's DataLoader, and what else a loop does between an update and the next forward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.instrumented_ddp.recording.lone_training import backward, make_model, phases_by_step, recorded


def test_the_wait_for_a_data_loader_is_told_from_what_else_the_loop_does(traces):
    """A batch comes after 20 ms, then another model takes 5 ms, and another batch is fetched after the backward."""

    class Slow(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                time.sleep(0.02)
                yield torch.randn(8, 4)

    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Slow(), batch_size=None))
    for _ in range(3):
        x = next(batches)
        time.sleep(0.005)
        loss = model(x).sum()
        next(batches)
        loss.backward()
        optimizer.step()
    trace = recorded(model, traces)
    phases = trace.phases
    in_order = ["loop", "data_wait", "loop", "forward", "data_wait", "backward", "finalize", "optimizer"]
    assert phases_by_step(trace) == {0: in_order[3:], 1: in_order, 2: in_order}
    lasted_ns = (phases["end_ns"] - phases["start_ns"])[phases["step"] > 0].groupby(phases["phase"].astype(str)).sum()
    assert lasted_ns["data_wait"] >= 4 * 20_000_000
    assert lasted_ns["loop"] >= 2 * 5_000_000


def test_a_dataset_that_asks_the_model_itself_is_no_wait_for_data(traces):
    model = make_model(traces)

    class Asked(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                with torch.no_grad():
                    answers = model(torch.randn(8, 4))
                yield torch.cat([answers, torch.zeros(8, 2)], dim=1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Asked(), batch_size=None))
    for _ in range(3):
        model(next(batches)).sum().backward()
        optimizer.step()
    phases = recorded(model, traces).phases.sort_values("start_ns")
    assert "data_wait" not in set(phases["phase"])
    assert (phases["start_ns"].to_numpy()[1:] >= phases["end_ns"].to_numpy()[:-1]).all()


def test_a_loader_that_is_read_by_another_thread_keeps_nobody_waiting(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(torch.randn(24, 4), batch_size=8))
    with ThreadPoolExecutor(1) as ahead:
        for _ in range(3):
            model(ahead.submit(next, batches).result()).sum().backward()
            optimizer.step()
    assert "data_wait" not in set(recorded(model, traces).phases["phase"])


def test_of_a_loop_that_skips_thousands_of_batches_no_more_than_a_few_waits_are_kept(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    for _ in DataLoader(torch.randn(2000, 4), batch_size=1):
        pass
    backward(model)
    optimizer.step()
    phases = recorded(model, traces).phases
    assert (phases["phase"] == "data_wait").sum() == 8
    gap_ns = phases.loc[(phases["step"] == 1) & (phases["phase"] == "forward"), "start_ns"].item()
    assert phases.loc[phases["phase"] == "data_wait", "end_ns"].max() <= gap_ns

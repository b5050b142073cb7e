"""What it costs the launching thread to be told of a collective: by a kernel on torch's dispatcher, or by c10d's hooks.

    python -m benchmarks.collective_hooks [--rounds 9] [--collectives 1000]

One process launches all-reduces of four numbers over gloo, which has nobody to talk to. CPU time of its thread, in
microseconds a launch; ways take turns, medians over rounds with 90 % intervals from five rounds on. Hooks exist since
torch 2.14; before, their ways are left out. One in C++ is torch's own that looks for NaN, the cheapest that it has.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.medians import format_interval, median_with_ci
from instrumented_ddp.collectives.dispatch import Call, DispatchInterceptor
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.position import TrainingPosition

PLAIN: Final = "nobody is told"
HOOK: Final = 7
"""Identifies ours."""


class Nobody:
    """An observer that does nothing with what it is told."""

    def announce(self, call: Call) -> None:
        """Ignore it."""

    def launched(self, announced: object, work: dist.Work | None) -> None:
        """Ignore it."""

    def failed(self, announced: object) -> None:
        """Ignore it."""

    def on_unparsed_collective(self, error: Exception) -> None:
        """Raise the error."""
        raise error


@contextmanager
def kernels_on_the_dispatcher() -> Iterator[None]:
    interceptor = DispatchInterceptor(Nobody())
    try:
        yield
    finally:
        interceptor.close()


@contextmanager
def whole_log() -> Iterator[None]:
    with TemporaryDirectory() as folder:
        log = CollectiveRecorder(Path(folder) / "rank_0", 0, TrainingPosition(), Nobody().on_unparsed_collective)
        try:
            yield
        finally:
            log.close()


@contextmanager
def hooks(group: Any, before: Callable[[Any], object], after: Callable[[Any], object]) -> Iterator[None]:
    group.register_pre_hook(HOOK, before)
    group.register_post_hook(HOOK, after)
    try:
        yield
    finally:
        group.unregister_pre_hook(HOOK)
        group.unregister_post_hook(HOOK)


@contextmanager
def hook_in_cpp(group: Any) -> Iterator[None]:
    hook = torch._C._distributed_c10d.NanCheckHook.attach(group)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hook.remove()


def ways_of(group: Any) -> dict[str, Callable[[], Any]]:
    """Return how to be told, by name."""

    def read(args: Any) -> object:
        return args.name, args.async_op, args.root, args.op_id, args.input_tensors, args.output_tensors

    ways = {PLAIN: nullcontext, "kernel on the dispatcher, in Python": kernels_on_the_dispatcher}
    if hasattr(group, "register_pre_hook"):
        ways |= {
            "two hooks in Python that do nothing": partial(hooks, group, lambda _: None, lambda _: None),
            "two hooks in Python that read it all": partial(hooks, group, read, lambda args: (args.work, args.op_id)),
            "a hook in C++": partial(hook_in_cpp, group),
        }
    return ways | {"the whole collective log": whole_log}


def measure_us(group: dist.ProcessGroup, collectives: int) -> float:
    """Return what the launch of a collective takes this thread, in microseconds."""
    tensor, options = torch.ones(4), dist.AllreduceOptions()
    begin_ns = time.thread_time_ns()
    for _ in range(collectives):
        group.allreduce([tensor], options)
    taken_ns = time.thread_time_ns() - begin_ns
    group.allreduce([tensor], options).wait()
    return taken_ns / collectives / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--collectives", type=int, default=1000, help="launches of each way in each round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.group.WORLD
    assert group is not None
    ways = ways_of(group)
    taken_us: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):  # the first one warms up
        for way, telling in ways.items():
            gc.collect()
            with telling():
                us = measure_us(group, args.collectives)
            if number:
                taken_us[way].append(us)
    plain_us = median_with_ci(taken_us[PLAIN]).value
    table = Table("", "us a launch", "more", box=SIMPLE_HEAD)
    for way, each in taken_us.items():
        found = median_with_ci(each)
        table.add_row(way, format_interval(found, 1), f"{found.value - plain_us:+.1f}")
    Console(width=100).print(f"torch {torch.__version__}, {args.rounds} rounds of {args.collectives}", table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

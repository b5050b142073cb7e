"""A table of small trainings, each run with stock's class and with ours, recording, in the same processes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from tests.cluster.same_as_stock.seen import Seen

MakeDdp = Callable[..., nn.parallel.DistributedDataParallel]
"""Stock's class, or ours with a folder to record into."""

Run = Callable[..., None]
"""What a scenario is: called with a `MakeDdp` and a `Seen`, and the choices it is listed with."""

LIMIT_S = 60
"""A rank that has not finished by then shows where it hangs and ends."""


@dataclass
class Scenarios:
    """The scenarios of one file, by name."""

    ranks: Sequence[int] = (2,)

    def __post_init__(self) -> None:
        self.by_name: dict[str, Run] = {}

    def add(self, **choices: Sequence[Any]) -> Callable[[Run], Run]:
        """List a scenario, once for each combination of choices."""

        def listed(run: Run) -> Run:
            for values in itertools.product(*choices.values()):
                chosen = dict(zip(choices, values, strict=True))
                words = [_word(choice, value) for choice, value in chosen.items()]
                name = "-".join([run.__name__, *filter(None, words)])
                assert name not in self.by_name, name
                self.by_name[name] = partial(run, **chosen)
            return run

        return listed

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return itertools.product(self.by_name, self.ranks)


def _word(choice: str, value: object) -> str:
    if isinstance(value, bool):
        return choice if value else ""
    if value is None or isinstance(value, int | float | tuple):
        return f"{choice}={value}".replace(" ", "")
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def differences_from_stock(subject: str, name: str, trace: str) -> list[str]:
    """Run one scenario of a file with both classes, and list what this rank sees differ."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    run = importlib.import_module(subject).scenarios.by_name[name]
    stock, ours = Seen(), Seen()
    run_once(run, nn.parallel.DistributedDataParallel, stock)
    try:
        run_once(run, partial(DistributedDataParallel, trace=trace), ours)
    except Exception:
        return [*stock.differences(ours), traceback.format_exc()]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return stock.differences(ours)


def run_once(run: Run, make_ddp: MakeDdp, seen: Seen) -> None:
    """Run a scenario from the same state as every other time."""
    torch.manual_seed(0)
    run(make_ddp, seen)
    gc.collect()  # the wrapper and its hooks
    torch._dynamo.reset()

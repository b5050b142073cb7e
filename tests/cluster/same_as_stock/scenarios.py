"""A table of small trainings, each run with stock's class and with ours, recording, in the same processes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import TORCH_IS_OLDER

MakeDdp = Callable[..., nn.parallel.DistributedDataParallel]
"""Stock's class, or ours with a folder to record into."""

Run = Callable[..., None]
"""What a scenario is: called with a `MakeDdp` and a `Seen`, and the choices it is listed with."""

LIMIT_S = 100
"""A rank that has not finished by then shows where it hangs and ends."""


@dataclass
class Scenarios:
    """The scenarios of one file, by name."""

    world_sizes: Sequence[int] = (2,)
    leave_traces: bool = False
    """Each needs processes of its own: torch's compilers keep something of what they have seen."""

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


def _word(choice: str, value: object) -> str:
    if isinstance(value, bool):
        return choice if value else ""
    if value is None or isinstance(value, int | float | tuple):
        return f"{choice}={value}".replace(" ", "")
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


class OlderTorchError(Exception):
    """Stock's class of an older torch can't do what a scenario asks for."""


def differences_from_stock(subject: str, name: str) -> list[str]:
    """Run one scenario of a file with both classes, and list what this rank sees differ.

    Raises:
        OlderTorchError: there is nothing to compare with.
        AssertionError: ours raised what stock did not.
    """
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    run = importlib.import_module(subject).scenarios.by_name[name]
    stock, ours = Seen(), Seen()
    try:
        run_once(run, nn.parallel.DistributedDataParallel, stock)
    except Exception as error:
        if TORCH_IS_OLDER:
            raise OlderTorchError(repr(error)) from None
        raise
    try:
        run_once(run, partial(DistributedDataParallel, trace=Path(tempfile.gettempdir(), "traces")), ours)
    except Exception:
        raise AssertionError("\n".join([*stock.differences(ours), traceback.format_exc()])) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    return stock.differences(ours)


def run_once(run: Run, make_ddp: MakeDdp, seen: Seen) -> None:
    """Run a scenario from the same state as every other time."""
    torch.manual_seed(0)
    run(make_ddp, seen)
    gc.collect()  # the wrapper and its hooks
    torch._dynamo.reset()

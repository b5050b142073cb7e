"""What recording costs a training step on a CUDA device: stock's DDP and ours, not recorded and recorded.

    python -m benchmarks.device_step_time [--models resnet50 bert gpt2] [--dtypes float32 bfloat16] [--rounds 7]

One rank trains over NCCL. Each way has a process of its own, which stays; in each round all take turns, so that all of
them see the device as it is then, and another one begins. One rank's all-reduces do nothing, so what is seen is what
marks, streams and hooks cost, not what they do to collectives.

Of stock's DDP, not recorded, the table has the median over rounds in milliseconds: of a step, and of the host in
``backward()``, which returns when everything is enqueued. Of the others it has the median over rounds of the ratio to
it in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).parents[1]))
from instrumented_ddp import DistributedDataParallel, attach
from tests.cluster.ranks import Ranks
from tests.gpu.device import DEVICE, on_the_device

WARM_UP_STEPS: Final = 10
WAYS: Final = ("stock", "stock, recorded", "ours", "ours, recorded")
Loss = Callable[[nn.Module], torch.Tensor]
Times = tuple[float, float]
"""Milliseconds of a step, and of the host in its backward."""


def resnet50() -> tuple[nn.Module, Loss]:
    from transformers import ResNetConfig, ResNetForImageClassification

    images = torch.randn(128, 3, 224, 224, device=DEVICE)
    return ResNetForImageClassification(ResNetConfig()), lambda model: model(images).logits.float().square().mean()


def bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    tokens = torch.randint(0, 30_000, (64, 128), device=DEVICE)
    return BertForMaskedLM(BertConfig()), lambda model: model(input_ids=tokens, labels=tokens).loss


def gpt2() -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50_000, (16, 256), device=DEVICE)
    return GPT2LMHeadModel(GPT2Config()), lambda model: model(input_ids=tokens, labels=tokens).loss


MODELS: Final = {"resnet50": resnet50, "bert": bert, "gpt2": gpt2}
_built: dict[str, Any] = {}


def build(way: str, name: str, folder: str) -> None:
    module, loss = MODELS[name]()
    module = module.to(DEVICE)
    trace = folder if "recorded" in way else None
    if way.startswith("ours"):
        model: nn.Module = DistributedDataParallel(module, device_ids=[0], trace=trace)
    else:
        if trace:
            attach(trace)
        model = TorchDDP(module, device_ids=[0])
    _built.update(model=model, loss=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5))


def train(steps: int, dtype: str) -> Times:
    model, loss, optimizer = _built["model"], _built["loss"], _built["optimizer"]
    backward_ms = []
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(model)
        before = time.perf_counter()
        value.backward()
        backward_ms.append(1e3 * (time.perf_counter() - before))
        optimizer.step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / steps, statistics.median(backward_ms)


def measure(name: str, dtypes: list[str], rounds: int, steps: int) -> dict[str, list[dict[str, Times]]]:
    """Of each dtype, round by round, by way."""
    with ExitStack() as at_the_end:
        folder = at_the_end.enter_context(tempfile.TemporaryDirectory())
        ranks = {way: at_the_end.enter_context(Ranks(1, on_the_device, "nccl")) for way in WAYS}
        with ThreadPoolExecutor(len(WAYS)) as together:
            built = [
                together.submit(own.call, build, way, name, f"{folder}/{number}")
                for number, (way, own) in enumerate(ranks.items())
            ]
            for one in built:
                check(one.result())
        measured: dict[str, list[dict[str, Times]]] = {}
        for dtype in dtypes:
            for own in ranks.values():
                check(own.call(train, WARM_UP_STEPS, dtype))
            measured[dtype] = []
            for number in range(rounds):
                first = number % len(WAYS)
                order = WAYS[first:] + WAYS[:first]
                measured[dtype].append({way: check(ranks[way].call(train, steps, dtype)) for way in order})
        return measured


def check(results: list[Any]) -> Times:
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default: 7)")
    parser.add_argument("--steps", type=int, default=20, help="of each turn (default: 20)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and there is none")
    console = Console(highlight=False, soft_wrap=True, width=140)
    console.print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, one rank over NCCL")
    for name in args.models:
        table = Table("model", box=SIMPLE_HEAD)
        for way in WAYS:
            unit = " ms" if way == WAYS[0] else ""
            table.add_column(f"{way}\nstep{unit}", justify="right")
            table.add_column(f"\nbackward{unit}", justify="right")
        for dtype, rounds in measure(name, args.dtypes, args.rounds, args.steps).items():
            cells = [f"{statistics.median(times[WAYS[0]][what] for times in rounds):.2f}" for what in (0, 1)]
            cells += [
                f"{statistics.median(times[way][what] / times[WAYS[0]][what] for times in rounds):.3f}"
                for way in WAYS[1:]
                for what in (0, 1)
            ]
            table.add_row(f"{name} {dtype}", *cells)
        console.print(table)


if __name__ == "__main__":
    main()

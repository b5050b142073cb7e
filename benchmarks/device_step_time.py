"""What recording costs a training step on a CUDA device, beside torch.profiler.

    python -m benchmarks.device_step_time [--models bert-base resnet-50] [--seconds 15] [--parts]

One rank trains over NCCL, in bfloat16 with a fused AdamW:

    stock, ours               with torch's DDP and with ours
    recorded                  by the native code, or by its twins in Python
    NCCL timing               stock's, with TORCH_NCCL_ENABLE_TIMING=1
    profiler, CUDA; CPU+CUDA  stock's, watched by torch.profiler all the time

Each way has a process of its own, which stays (the profilers share one). Ways take turns of a few steps, in every round
in another order, so that all of them see the device as it is then; rounds go on for so many seconds. One rank's
all-reduces do nothing, so what is seen is what marks, streams and hooks cost, not what they do to collectives. It is
told that it has a neighbor, as it would not take fingerprints otherwise.

Of stock's DDP, not recorded, a line has medians over rounds in milliseconds: of a step, and of the host in
``backward()``, which returns when everything is enqueued. The others have medians over rounds of the ratio to it in the
same round, with 90 % intervals. With --parts, parts of a recording of our DDP are left out in turn instead.

A way that fails, for want of memory for one, is left out with a line. With ``--device cpu`` it runs on a CPU over gloo,
to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.device_training import MODELS, PARTS, Turn
from benchmarks.medians import format_interval, median_with_ci
from instrumented_ddp.native import IS_NATIVE, NATIVE_VARIABLE
from overlapscope.trace.event_log import read_latest_step
from overlapscope.trace.schema import EVENTS_FILE, rank_folder

ROOT: Final = Path(__file__).parents[1]
USUAL_MODELS: Final = [name for name in MODELS if name != "tiny"]
NAME_WIDTH, CELL_WIDTH = 34, 30


@dataclass(frozen=True)
class Way:
    """Of doing the same training."""

    name: str
    arguments: tuple[str, ...]
    """Of ``benchmarks.device_training``."""
    variables: tuple[tuple[str, str], ...] = field(default=((NATIVE_VARIABLE, "1"),))
    profiled: str = "none"
    """What torch.profiler watches, as in ``benchmarks.device_training``."""

    @property
    def option(self) -> str:
        """Return its name on the command line."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def process(self) -> tuple[object, ...]:
        """Return what its process is started with. Ways with the same one share it."""
        return self.arguments, self.variables


RECORDED: Final = ("--trace", "FOLDER")
IN_PYTHON: Final = ((NATIVE_VARIABLE, "0"),)
WATCHED: Final = ((NATIVE_VARIABLE, "1"), ("TORCH_PROFILER", "used"))
"""A process that torch.profiler has been used in is not the same afterwards, so the variable keeps it apart."""
STOCK: Final = Way("stock", ("stock",))
WAYS: Final = (
    STOCK,
    Way("stock, recorded", ("stock", *RECORDED)),
    Way("stock, recorded in Python", ("stock", *RECORDED), IN_PYTHON),
    Way("ours", ("ours",)),
    Way("ours, recorded", ("ours", *RECORDED)),
    Way("ours, recorded in Python", ("ours", *RECORDED), IN_PYTHON),
    Way("NCCL timing", ("stock",), ((NATIVE_VARIABLE, "1"), ("TORCH_NCCL_ENABLE_TIMING", "1"))),
    Way("profiler, CUDA", ("stock",), WATCHED, "device"),
    Way("profiler, CPU+CUDA", ("stock",), WATCHED, "all"),
)
PARTS_LEFT_OUT: Final = (
    STOCK,
    Way("ours", ("ours",)),
    Way("ours, recorded", ("ours", *RECORDED)),
    *(Way(f"without {part}", ("ours", *RECORDED, "--without", part)) for part in PARTS),
    Way("without all of these", ("ours", *RECORDED, "--without", *PARTS)),
)


class Trainer:
    """The process of a way, or of several."""

    def __init__(self, way: Way, model: str, folder: Path, device: str) -> None:
        own = str(folder / way.name)
        arguments = [own if argument == "FOLDER" else argument for argument in way.arguments]
        wrapper, *options = arguments
        command = ["-m", "benchmarks.device_training", wrapper, model, "--device", device, *options]
        self._errors = (folder / f"{way.name}.errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | dict(way.variables),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, steps: int, profiled: str) -> None:
        """Have it train, after what it does at its start."""
        assert self._process.stdin is not None
        try:
            print(steps, profiled, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # which its answer says, too

    def answer(self) -> Turn | str:
        """Return what it was asked for, or how what it has said of its failure ends."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return Turn(**json.loads(line))
        self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


Round = dict[Way, Turn]


def measure(model: str, ways: Sequence[Way], steps: int, seconds: float, device: str) -> list[Round]:
    """Measure all ways that did not fail, round by round."""
    with ExitStack() as at_the_end:
        folder = Path(at_the_end.enter_context(tempfile.TemporaryDirectory()))
        trainers: dict[tuple[object, ...], Trainer] = {}
        for way in ways:
            if way.process not in trainers:
                trainers[way.process] = Trainer(way, model, folder, device)
                at_the_end.callback(trainers[way.process].close)
        for trainer in trainers.values():  # which start together
            trainer.ask(1, "none")
        ways, rounds = _without_failed(ways, {key: each.answer() for key, each in trainers.items()}), []
        begin_s = time.monotonic()
        while STOCK in ways and (not rounds or time.monotonic() - begin_s < seconds):
            first = len(rounds) % len(ways)
            measured: Round = {}
            for way in (*ways[first:], *ways[:first]):
                trainers[way.process].ask(steps, way.profiled)
                turn = trainers[way.process].answer()
                if isinstance(turn, str):
                    ways = _without_failed(ways, {way.process: turn})
                else:
                    measured[way] = turn
            rounds.append(measured)
        for way in ways:
            assert way.arguments[-2:] != RECORDED or _is_recorded(folder / way.name, len(rounds) * steps), way.name
        return [{way: measured[way] for way in ways} for measured in rounds if all(way in measured for way in ways)]


def _is_recorded(folder: Path, steps: int) -> bool:
    return (read_latest_step(rank_folder(folder, 0) / EVENTS_FILE) or 0) >= steps


def _without_failed(ways: Sequence[Way], answers: dict[tuple[object, ...], Turn | str]) -> list[Way]:
    left = []
    for way in ways:
        answer = answers.get(way.process)
        if isinstance(answer, str):
            print(f"{way.name} is left out: {answer}")
        else:
            left.append(way)
        if isinstance(answer, Turn):
            assert answer.is_native == (dict(way.variables)[NATIVE_VARIABLE] == "1"), f"{way.name}: {answer}"
    return left


def lines_of(model: str, rounds: Sequence[Round]) -> list[str]:
    """Return a line a way."""
    if not rounds:
        return [f"{model}: nothing could be measured"]

    def line(name: str, *cells: str) -> str:
        return name.ljust(NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)

    def cells(way: Way, what: Callable[[Turn], float]) -> tuple[str, str]:
        ratio = median_with_ci([what(each[way]) / what(each[STOCK]) for each in rounds])
        return format_interval(ratio, 3), f"{median_with_ci([what(each[way]) for each in rounds]).value:.2f}"

    lines = [line(f"{model}, {len(rounds)} rounds", "step / stock's (90 %)", "ms", "host in backward / stock's", "ms")]
    for way in rounds[0]:
        step, backward = cells(way, lambda turn: turn.step_ms), cells(way, lambda turn: turn.backward_ms)
        lines.append(line(f"  {way.name}", *step, *backward))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names, options = ", ".join(MODELS), [way.option for way in WAYS[1:]]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=USUAL_MODELS, metavar="MODEL", help=names)
    parser.add_argument("--seconds", type=float, default=15, help="of taking turns, for each model (default: 15)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn that count (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=options, metavar="WAY", help=", ".join(options))
    parser.add_argument("--parts", action="store_true", help="leave parts of a recording out in turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device, and there is none")
    if not IS_NATIVE:
        parser.error("the native code is not there: compile it with pip install -e .")
    ways = PARTS_LEFT_OUT if args.parts else WAYS
    if args.ways:
        ways = (STOCK, *(way for way in ways if way.option in args.ways))
    if args.device == "cpu":  # where a profiler of devices sees nothing
        ways = tuple(way for way in ways if way.profiled != "device")
    place = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    print(f"{place}, torch {torch.__version__}, one rank, bfloat16", flush=True)
    for model in args.models:
        rounds = measure(model, ways, args.steps, args.seconds, args.device)
        print("\n".join(["", *lines_of(model, rounds)]), flush=True)


if __name__ == "__main__":
    main()

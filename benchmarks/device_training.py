"""One rank of a training on a device, which trains when it is told to; benchmarks/device_step_time.py starts it.

    python -m benchmarks.device_training WRAPPER MODEL [--trace FOLDER] [--without PART ...] [--device cpu]

It reads lines from stdin: a number of steps, and ``none``, ``device`` or ``all`` for what torch.profiler watches in
them. For each it answers with a line of JSON, a ``Turn``; an error ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile, supported_activities

sys.path.insert(0, str(Path(__file__).parents[1]))
from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.native import IS_NATIVE
from instrumented_ddp.recording import events
from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.recording.timing import HostTimer
from instrumented_ddp.replicas import replicas

WARM_UP_STEPS: Final = 10
UNCOUNTED_STEPS: Final = 2
"""At the beginning of a turn: memory was given back at the end of the one before."""
Loss = Callable[[nn.Module], torch.Tensor]
_PROFILED: Final = {
    "device": {ProfilerActivity.CUDA},
    "all": {ProfilerActivity.CPU, ProfilerActivity.CUDA},
}


@dataclass(frozen=True)
class Turn:
    """Milliseconds of a step, and of the host in its backward, which returns when everything is enqueued."""

    step_ms: float
    backward_ms: float
    is_native: bool


def tiny(device: torch.device) -> tuple[nn.Module, Loss]:
    return _chain(layers=3, device=device)


def chain_600(device: torch.device) -> tuple[nn.Module, Loss]:
    return _chain(layers=300, device=device)


def _chain(layers: int, device: torch.device) -> tuple[nn.Module, Loss]:
    batch = torch.randn(32, 64, device=device)
    modules = [module for _ in range(layers) for module in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*modules), lambda model: model(batch).float().square().mean()


def resnet_50(device: torch.device) -> tuple[nn.Module, Loss]:
    from transformers import ResNetConfig, ResNetForImageClassification

    images = torch.randn(128, 3, 224, 224, device=device)
    return ResNetForImageClassification(ResNetConfig()), lambda model: model(images).logits.float().square().mean()


def bert_base(device: torch.device) -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    tokens = torch.randint(0, 30_000, (64, 128), device=device)
    return BertForMaskedLM(BertConfig()), lambda model: model(input_ids=tokens, labels=tokens).loss


def gpt2_small(device: torch.device) -> tuple[nn.Module, Loss]:
    return _gpt2(device, (16, 256))


def gpt2_medium(device: torch.device) -> tuple[nn.Module, Loss]:
    return _gpt2(device, (8, 1024), n_embd=1024, n_layer=24, n_head=16)


def _gpt2(device: torch.device, batch: tuple[int, int], **sizes: int) -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50_000, batch, device=device)
    return GPT2LMHeadModel(GPT2Config(**sizes)), lambda model: model(input_ids=tokens, labels=tokens).loss


MODELS: Final = {
    "bert-base": bert_base,
    "gpt2-small": gpt2_small,
    "chain-600": chain_600,
    "resnet-50": resnet_50,
    "gpt2-medium": gpt2_medium,
    "tiny": tiny,
}
"""By name: the first three wait for the host, the two after them for the device; the last one is for tests."""


class AsOneOfTwo:
    """``torch.distributed`` with another rank, without which a replica would not be fingerprinted."""

    get_process_group_ranks = staticmethod(lambda group: [0, 1])  # noqa: ARG005

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def without_fingerprints() -> None:
    replicas.ReplicaComparison.add = lambda *_: None  # type: ignore[method-assign] # as with a model that can't be compared


def without_marks() -> None:
    events.make_timer = lambda device, log: HostTimer(log)  # type: ignore[assignment] # noqa: ARG005


def without_log() -> None:
    CollectiveRecorder.announce = lambda *_, **__: None  # type: ignore[method-assign] # as after an error


def without_threads() -> None:
    BackgroundScheduler.add = lambda *_: None  # type: ignore[method-assign]


PARTS: Final = {
    "fingerprints": without_fingerprints,
    "marks": without_marks,
    "log": without_log,
    "threads": without_threads,
}
"""What can be left out of a recording, each with what does so: fingerprints of parameters, marks on the device (the
host's clock is read instead), the collective log, and what runs in the background, the watchdog for one."""


class Training:
    """A model in its wrapper, with its optimizer."""

    def __init__(self, wrapper: str, model: str, device: torch.device, trace: str | None) -> None:
        self.device = device
        module, self.loss = MODELS[model](device)
        module = module.to(device)
        given: dict[str, Any] = {"device_ids": [0]} if device.type == "cuda" else {}
        if wrapper == "ours":
            self.model: nn.Module = DistributedDataParallel(module, **given, trace=trace)
        else:
            if trace:
                attach(trace)
            self.model = TorchDDP(module, **given)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def turn(self, steps: int, profiled: str) -> Turn:
        """Train for some steps, of which the first ones don't count."""
        with profile(activities=_PROFILED[profiled] & supported_activities()) if profiled != "none" else nullcontext():
            self._train(UNCOUNTED_STEPS)
            begin_s = time.perf_counter()
            backward_ms = self._train(steps)
            step_ms = 1e3 * (time.perf_counter() - begin_s) / steps
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the others
        return Turn(step_ms, statistics.median(backward_ms), IS_NATIVE)

    def _train(self, steps: int) -> list[float]:
        backward_ms = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(self.model)
            begin_s = time.perf_counter()
            loss.backward()
            backward_ms.append(1e3 * (time.perf_counter() - begin_s))
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return backward_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wrapper", choices=("stock", "ours"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--trace", metavar="FOLDER", help="record into this folder")
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[], help="leave parts of the recording out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    # Whatever else prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    replicas.dist = AsOneOfTwo()  # type: ignore[assignment]
    for part in args.without:
        PARTS[part]()
    torch.manual_seed(0)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        training = Training(args.wrapper, args.model, device, args.trace)
        training.turn(WARM_UP_STEPS, "none")
        for line in iter(sys.stdin.readline, ""):
            steps, profiled = line.split()
            print(json.dumps(asdict(training.turn(int(steps), profiled))), file=answers, flush=True)
        dist.destroy_process_group()
    # A thread of gloo that asks for the GIL of an interpreter that is ending would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()

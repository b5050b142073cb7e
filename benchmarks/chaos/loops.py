"""Source of a whole random training: the loop and all that strangers have around it."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from typing import Final

from benchmarks.chaos.habits import after_step_text, functions_text, setup_text
from benchmarks.chaos.networks import data_text, loader_text, model_text
from benchmarks.chaos.setting import Setting

SEEN: Final = "  # <- seen"
"""Marks a line at which a process may notice the fault that another line has made."""
_IMPORTS: Final = """import concurrent.futures
import copy
import ctypes
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset"""
_STOCK: Final = "from torch.nn.parallel import DistributedDataParallel as DDP"
_OURS: Final = "from instrumented_ddp import DistributedDataParallel as DDP"
_OF_TRAINER: Final = ("rank", "world", "step", "model", "optimizer")
_OPTIMIZERS: Final = {"SGD": "SGD({0}, lr=0.01)", "Adam": "Adam({0}, lr=1e-3)", "AdamW": "AdamW({0}, lr=1e-3)"}
_ENDINGS: Final = {
    "exit": "except Exception as error:\n    print(f'rank {os.environ.get(\"RANK\")}: {error}', flush=True)\n"
    f"    sys.exit(1){SEEN}",
    "raise": "except Exception as error:\n    print('training failed:', error, flush=True)\n    raise",
    "finally": "finally:\n    if dist.is_initialized():\n        dist.destroy_process_group()",
    "os exit": "except Exception:\n    logging.exception('training failed')\n    os._exit(3)",
    "swallow": "except Exception as error:\n    print('something went wrong, see the log:', error, flush=True)",
}

Slots = Mapping[str, str]
"""Lines, or expressions, that a fault puts in or has in place of the usual ones."""


def script_of(setting: Setting, slots: Slots) -> str:
    """Return the script as text.

    Args:
        slots: ``definitions``, ``before_init``, ``sample``, ``generate``, ``in_forward``, ``build``, ``setup``,
            ``before``, ``between``, ``before_update``, ``after``, ``epoch_end`` and ``end`` are lines; ``net``,
            ``forward``, ``context``, ``backward``, ``update`` and ``batches`` stand in place of what is usual there;
            ``around`` is a context of the loop.
    """
    names = dict(setting.names)
    top = [
        _IMPORTS,
        _OURS if setting.is_ours else _STOCK,
        f"\nWIDTH = {setting.width}\nBATCHES = {setting.batches}\nEPOCHS = {setting.epochs}\n",
        model_text(setting, slots.get("in_forward", "")),
        data_text(setting, slots.get("sample", ""), slots.get("generate", "")),
        functions_text(setting),
        slots.get("definitions", ""),
    ]
    body = _trainer(setting, slots) if setting.style == "trainer" else _plain(setting, slots, names)
    text = "\n\n\n".join(part for part in [*top, body] if part)
    return Template(text).substitute(names) + "\n"


def _plain(setting: Setting, slots: Slots, names: dict[str, str]) -> str:
    names |= {"skip": "continue", "stop": "break"}
    if setting.launcher == "spawn":
        main = f"def main($rank, $world):\n{_indented(_begin(setting, slots))}\n{_indented(_training(setting, slots))}"
        return f"{main}\n\n\n{_FREE_PORT}\n\n\n{_SPAWN.format(ranks=setting.ranks, call=_spawned_call(setting))}"
    if setting.style == "flat":
        return f"{_begin(setting, slots)}\n{_training(setting, slots)}"
    main = f"def main():\n{_indented(_begin(setting, slots))}\n{_indented(_training(setting, slots))}"
    return f'{main}\n\n\nif __name__ == "__main__":\n{_indented(_guarded("main()", setting.ending))}'


def _trainer(setting: Setting, slots: Slots) -> str:
    """Write a class that has everything, and callbacks."""
    own = {name: f"self.{setting.names[name]}" for name in _OF_TRAINER}
    own |= {"skip": "return True", "stop": "return False"}
    local = {name: f"${name}" for name in (*setting.names, "skip", "stop")} | own
    batch = Template(_step(setting, slots)).safe_substitute(local)
    loop = Template(_loop(setting, "if not self.train_batch($x, $y):\n    break", slots)).safe_substitute(local)
    begin = f"{_begin(setting, slots)}\n{_setup(setting, slots)}"
    attributes = "\n".join(
        f"        self.{setting.names[name]} = {setting.names[name]}" for name in _OF_TRAINER if name != "step"
    )
    return f"""class Trainer:
    def __init__(self, $model, $optimizer, scheduler, scaler, criterion, loader, sampler, $rank, $world):
{attributes}
        self.scheduler, self.scaler, self.criterion = scheduler, scaler, criterion
        self.loader, self.sampler = loader, sampler
        self.callbacks = [self.on_batch_end]
        self.{setting.names["step"]} = -1

    def train_batch(self, $x, $y):
        scheduler, scaler, criterion = self.scheduler, self.scaler, self.criterion
{_indented(batch, 2)}
        return True

    def on_batch_end(self, $loss):
        self.last_loss = $loss.detach()

    def fit(self):
        loader, sampler = self.loader, self.sampler
{_indented(loop, 2)}


def main():
{_indented(begin)}
    trainer = Trainer($model, $optimizer, scheduler, scaler, criterion, loader, sampler, $rank, $world)
    trainer.fit()
{_indented(_end(setting, slots))}


if __name__ == "__main__":
{_indented(_guarded("main()", setting.ending))}"""


def _begin(setting: Setting, slots: Slots) -> str:
    timeout = f", timeout=timedelta(seconds={setting.timeout_s})" if setting.timeout_s else ""
    lines = [slots.get("before_init", ""), "torch.set_num_threads(1)"]
    if setting.launcher == "spawn":
        lines.append(f'dist.init_process_group("gloo", rank=$rank, world_size=$world{timeout})')
    else:
        lines += [
            f'dist.init_process_group("gloo"{timeout})',
            "$rank = dist.get_rank()",
            "$world = dist.get_world_size()",
        ]
    lines.append(f"torch.manual_seed({'1 + $rank' if setting.seeds_by_rank else '42'})")
    return "\n".join(line for line in lines if line)


def _training(setting: Setting, slots: Slots) -> str:
    parts = [_setup(setting, slots), _loop(setting, _step(setting, slots), slots), _end(setting, slots)]
    return "\n".join(part for part in parts if part)


def _setup(setting: Setting, slots: Slots) -> str:
    options = "".join(f", {option}" for option in setting.ddp_options)
    lines = []
    if setting.is_adversarial:
        lines += [f"generator = DDP(Generator()){SEEN}", f"$model = DDP(Discriminator()){SEEN}"]
        lines += ["generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)"]
        lines += ["criterion = nn.BCEWithLogitsLoss()"]
    else:
        lines += [f"network = {slots.get('net', 'Net()')}", slots.get("build", "")]
        wrappers = {"DDP": f"DDP(network{options})", "fsdp": "fully_shard(network)", "none": "network"}
        lines += [f"$model = {wrappers[setting.wrapper]}{SEEN}", "criterion = nn.CrossEntropyLoss()"]
    parameters = "$model.parameters()"
    lines.append(f"$optimizer = torch.optim.{_OPTIMIZERS[setting.optimizer].format(parameters)}")
    schedule = "torch.optim.lr_scheduler.StepLR($optimizer, 50, 0.5)" if setting.has_scheduler else "None"
    lines.append(f"scheduler = {schedule}")
    scaler = 'torch.amp.GradScaler("cpu", init_scale=1024.0)' if setting.amp == "scaler" else "None"
    lines.append(f"scaler = {scaler}")
    if setting.loader != "sampler":
        lines.append("sampler = None")
    lines += [loader_text(setting, slots.get("batches", "BATCHES")), setup_text(setting), slots.get("setup", "")]
    return "\n".join(line for line in lines if line)


def _loop(setting: Setting, body: str, slots: Slots) -> str:
    loop = _bare_loop(setting, body, slots)
    return f"with {slots['around']}:\n{_indented(loop)}" if "around" in slots else loop


def _bare_loop(setting: Setting, body: str, slots: Slots) -> str:
    loader = "loader()" if setting.loader == "generator" else "loader"
    if setting.loop == "while":
        return f"""iterator = iter({loader})
$step = -1
while $step + 1 < EPOCHS * BATCHES:
    $step += 1
    try:
        $x, $y = next(iterator){SEEN}
    except StopIteration:
        iterator = iter({loader})
        $x, $y = next(iterator){SEEN}
{_indented(body)}"""
    set_epoch = "\n    sampler.set_epoch(epoch)" if setting.loader == "sampler" else ""
    epoch_end = f"\n{_indented(slots['epoch_end'])}" if "epoch_end" in slots else ""
    return f"""for epoch in range(EPOCHS):{set_epoch}
    for i, ($x, $y) in enumerate({loader}):{SEEN}
        $step = epoch * BATCHES + i
{_indented(body, 2)}{epoch_end}"""


def _step(setting: Setting, slots: Slots) -> str:
    core = _adversarial_step(setting, slots) if setting.is_adversarial else _usual_step(setting, slots)
    callback = "for callback in self.callbacks:\n    callback($loss)" if setting.style == "trainer" else ""
    parts = [slots.get("before", ""), core, callback, after_step_text(setting), slots.get("after", "")]
    return "\n".join(part for part in parts if part)


def _usual_step(setting: Setting, slots: Slots) -> str:
    forward = slots.get("forward", f"$model($x){SEEN}")
    call, _, mark = forward.partition("  #")
    lines = [f"output = {call}" + (f"  #{mark}" if mark else ""), "$loss = criterion(output.float(), $y)"]
    if setting.accumulation > 1:
        lines.append(f"$loss = $loss / {setting.accumulation}")
    if setting.amp:
        lines = ['with torch.autocast("cpu", dtype=torch.bfloat16):', *(f"    {line}" for line in lines)]
    scaled = "scaler.scale($loss)" if setting.amp == "scaler" else "$loss"
    lines += [slots.get("between", ""), slots.get("backward", f"{scaled}.backward(){SEEN}")]
    context = slots.get("context")
    if context is None and setting.accumulation > 1:
        context = f"$model.no_sync() if ($step + 1) % {setting.accumulation} else nullcontext()"
    if context is not None:
        context, _, mark = context.partition("  #")
        text = _indented("\n".join(line for line in lines if line))
        lines = [f"with {context}:" + (f"  #{mark}" if mark else ""), text]
    update = [slots.get("before_update", "")]
    if setting.clips:
        update += ["scaler.unscale_($optimizer)"] if setting.amp == "scaler" else []
        update.append("torch.nn.utils.clip_grad_norm_($model.parameters(), 1.0)")
    stepping = "scaler.step($optimizer)\nscaler.update()" if setting.amp == "scaler" else "$optimizer.step()"
    update += [slots.get("update", stepping), f"$optimizer.zero_grad{setting.zero_grad}"]
    update += ["scheduler.step()"] if setting.has_scheduler else []
    text = "\n".join(line for line in update if line)
    if setting.accumulation > 1:
        text = f"if ($step + 1) % {setting.accumulation} == 0:\n{_indented(text)}"
    return "\n".join([*(line for line in lines if line), text])


def _adversarial_step(setting: Setting, slots: Slots) -> str:
    """Write the step of a generator that is trained in each iteration, or in every fifth."""
    parts = [
        "noise = torch.randn($x.shape[0], 16)",
        f"fake = generator(noise){SEEN}",
        "$optimizer.zero_grad()",
        f"scores = $model(torch.cat([$x, fake.detach()])){SEEN}",
        "truth = torch.cat([torch.ones($x.shape[0], 1), torch.zeros($x.shape[0], 1)])",
        "$loss = criterion(scores, truth)",
        slots.get("between", ""),
        f"$loss.backward(){SEEN}",
        slots.get("before_update", ""),
        "$optimizer.step()",
    ]
    generate = [
        "generator_optimizer.zero_grad()",
        f"criterion($model(fake), torch.ones($x.shape[0], 1)).backward(){SEEN}",
        "generator_optimizer.step()",
    ]
    if setting.model == "wgan":
        generate = ["if $step % 5 == 4:", *(f"    {line}" for line in generate)]
    parts += generate
    return "\n".join(part for part in parts if part)


def _end(setting: Setting, slots: Slots) -> str:
    lines = [slots.get("end", ""), 'if $rank == 0:\n    print("done", flush=True)']
    if setting.leaves_group and setting.ending != "finally":
        lines.append("dist.destroy_process_group()")
    return "\n".join(line for line in lines if line)


_FREE_PORT: Final = """def find_free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]"""
_SPAWN: Final = """{call}if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(find_free_port())
    mp.spawn(worker, args=({ranks},), nprocs={ranks})"""


def _spawned_call(setting: Setting) -> str:
    return f"def worker($rank, $world):\n{_indented(_guarded('main($rank, $world)', setting.ending))}\n\n\n"


def _guarded(call: str, ending: str) -> str:
    return call if ending == "none" else f"try:\n    {call}\n{_ENDINGS[ending]}"


def _indented(text: str, levels: int = 1) -> str:
    return "\n".join("    " * levels + line if line else "" for line in text.splitlines())

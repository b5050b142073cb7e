"""What scenarios come to with stock's class and with another one: only values, not how they lie in memory."""

from __future__ import annotations

import faulthandler
import importlib
import traceback
from dataclasses import replace

import torch
from torch import nn

from tests.cluster.same_as_stock.scenarios import LIMIT_S, MakeDdp, run_once
from tests.cluster.same_as_stock.seen import Seen, SeenTensor


def differences_of_values(subject: str, make_ddp: MakeDdp) -> list[str]:
    """Run all scenarios of a file with stock's class and with another one, and list what differs."""
    found = []
    for name, run in importlib.import_module(f"tests.cluster.same_as_stock.{subject}").scenarios.by_name.items():
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        stock, ours = Seen(), Seen()
        try:
            run_once(run, nn.parallel.DistributedDataParallel, stock)
            run_once(run, make_ddp, ours)
        except Exception:
            found.append(f"{name}: {traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
        found += [f"{name}: {difference}" for difference in _values(stock).differences(_values(ours))]
    return found


def _values(seen: Seen) -> Seen:
    """Tensors as they are wherever they lie, and nothing else."""
    values = Seen()
    values.notes = [
        (what, _of_values(value) if isinstance(value, SeenTensor) else None)
        for what, value in seen.notes
        if value is None or isinstance(value, SeenTensor)
    ]
    return values


def _of_values(tensor: SeenTensor) -> SeenTensor:
    """Without strides, and with all that is no number alike: which bits that has is up to how it was added."""
    values = [
        torch.where(value.isnan(), torch.nan, value) if value.is_floating_point() else value for value in tensor.values
    ]
    return replace(tensor, kind=tensor.kind[:2], values=tuple(values))

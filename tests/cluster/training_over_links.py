"""A recorded training that keeps the links between its hosts busy."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel

LAYERS = 4
WIDTH = 512  # a gradient of 1 MB a layer


def train(folder: Path, steps: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2, trace=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    model._session.close()

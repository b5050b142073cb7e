"""Models that the experiments train, each with the real data that it learns from.

They are sized for a few CPU cores: at 1 Gbit/s the communication of ``convnet`` and ``transformer`` takes about as long
as their backward, so that it matters how the two overlap. The small ones are for loss curves and first tries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1]))  # folder of the examples, in a clone and once installed
from train_gpt import GPT, draw_batch, read_sources

Draw = Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
"""Function that draws a batch of some samples: inputs, and the correct classes."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model and data of a training step."""

    module: nn.Module
    draw: Draw
    batch: int
    """Default number of samples per rank."""
    learning_rate: float


def make_convnet(width: int, batch: int) -> Workload:
    """Make the ResNet of ``train_convnet.py``, which learns scikit-learn's digits."""
    from train_convnet import load_images, make_resnet

    images, labels = load_images()[0].tensors

    def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(images), (count,), generator=generator)
        return images[chosen], labels[chosen]

    return Workload(module=make_resnet(width), draw=draw, batch=batch, learning_rate=0.02)


def make_transformer(width: int, layers: int, heads: int, batch: int) -> Workload:
    """Make the GPT of ``train_gpt.py``, which learns the sources of Python's standard library."""
    text, context = read_sources(), 64

    def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = draw_batch(text, count, context, generator)
        return inputs, targets.flatten()

    module = GPT(width=width, layers=layers, heads=heads, context=context)
    return Workload(module=module, draw=draw, batch=batch, learning_rate=0.02)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "convnet": lambda: make_convnet(width=160, batch=24),
    "transformer": lambda: make_transformer(width=384, layers=6, heads=6, batch=6),
    "small-convnet": lambda: make_convnet(width=16, batch=8),
    "small-transformer": lambda: make_transformer(width=64, layers=2, heads=2, batch=4),
}
"""Workloads by name. The first two have 29 and 41 MB of gradients, the small ones half a MB each."""

NEED_SKLEARN = ("convnet", "small-convnet")
"""Workloads that need scikit-learn for the images."""


def compute_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Compute the mean loss of a batch of either model."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets)

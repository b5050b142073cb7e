"""Small models of the kinds that matter to gradient reduction, each with a way to make a batch and a loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class TiedTransformer(nn.Module):
    """Two encoder layers; the embedding and the output layer share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, position) to logits of the last position."""
        return self.head(self.encoder(self.embedding(x)))[:, -1]


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    """One of mlp, convnet, transformer, with the same weights on every call."""
    torch.manual_seed(1)
    models = {
        "mlp": lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)),
        "convnet": lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.LazyLinear(32),
        ),
        "transformer": TiedTransformer,
    }
    model = models[name]()
    if name == "convnet":
        model(torch.zeros(2, 1, 8, 8))  # gives the lazy layer its shape
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    return model.to(dtype)


def make_batch(name: str, dtype: torch.dtype, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that every process can make for every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    targets = torch.randint(0, 32, (6,), generator=generator)
    if name == "transformer":
        return torch.randint(0, 32, (6, 5), generator=generator), targets
    shape = (6, 8) if name == "mlp" else (6, 1, 8, 8)
    return torch.randn(shape, generator=generator).to(dtype), targets


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of one batch, in float32."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).float(), targets)

"""The models that are trained to see what recording costs, each with a batch for one rank and a loss.

They are sized for a CPU core: a step takes tens of milliseconds, of the large ones some hundred, of the two known
architectures about a second.
Weights and batches are random, and the same on all ranks that are given the same seed; nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from examples.train_gpt import GPT


@dataclass(frozen=True)
class Workload:
    """What a training step is made of."""

    module: nn.Module
    batch: dict[str, torch.Tensor]
    """Arguments of the module, by name."""
    loss_of: Callable[[Any], torch.Tensor]
    """The loss, from what the module returns."""


def make_tiny() -> Workload:
    """Make a model with 1.5 MB of gradients in 12 parameters, to see that a benchmark runs with several buckets."""
    return _mlp(layers=6, width=256, batch=4)


def make_mlp() -> Workload:
    """Make a model with 400 parameters: 200 layers of width 64."""
    return _mlp(layers=200, width=64, batch=32)


def make_convnet() -> Workload:
    """Make the ResNet of examples/train_convnet.py."""
    from examples.train_convnet import make_resnet  # which imports scikit-learn

    return Workload(make_resnet(32), {"input": torch.randn(32, 1, 8, 8)}, _mean_square)


def make_transformer() -> Workload:
    """Make the GPT of examples/train_gpt.py, with a smaller batch."""
    module = GPT(width=192, layers=6, heads=6, context=64)
    return Workload(module, {"text": torch.randint(0, 256, (2, 64))}, _mean_square)


def make_deep_mlp() -> Workload:
    """Make a model with 600 parameters in 300 layers of width 16, whose compute is hardly more than launches."""
    return _mlp(layers=300, width=16, batch=4)


def make_deep_transformer() -> Workload:
    """Make a model with 100 parameters: the GPT of examples/train_gpt.py with 8 layers."""
    module = GPT(width=160, layers=8, heads=5, context=64)
    return Workload(module, {"text": torch.randint(0, 256, (2, 64))}, _mean_square)


def make_normalized_convnet() -> Workload:
    """Make a model with 16 convolutions, each with a BatchNorm, whose buffers rank 0 broadcasts before each forward."""
    modules: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False)]
    for _ in range(15):
        modules += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False)]
    modules.append(nn.BatchNorm2d(32))
    return Workload(nn.Sequential(*modules), {"input": torch.randn(8, 3, 16, 16)}, _mean_square)


def make_wide_mlp() -> Workload:
    """Make a model with 36 MB of gradients: 16 layers of width 768."""
    return _mlp(layers=16, width=768, batch=384)


def make_wide_mlp_of_small_batch() -> Workload:
    """Make a model of the same gradients after a third of the compute, so that communication is most of a step."""
    return _mlp(layers=16, width=768, batch=128)


def make_wide_convnet() -> Workload:
    """Make a model with 29 MB of gradients, most in the last block: a wider ResNet of examples/train_convnet.py."""
    from examples.train_convnet import make_resnet

    return Workload(make_resnet(160), {"input": torch.randn(24, 1, 8, 8)}, _mean_square)


def make_gpt() -> Workload:
    """Make a model with 41 MB of gradients: the GPT of examples/train_gpt.py, twice as wide."""
    module = GPT(width=384, layers=6, heads=6, context=64)
    return Workload(module, {"text": torch.randint(0, 256, (6, 64))}, _mean_square)


class LanguageLSTM(nn.Module):
    """Embedding, LSTM layers and a decoder, whose two matrices of words hold most of the parameters."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next word, given (T, B) words."""
        scores: torch.Tensor = self.decoder(self.lstm(self.embedding(text))[0])
        return scores


def make_lstm() -> Workload:
    """Make a model with 47 MB of gradients in 11 parameters: a language model of 8,000 words, on 4 texts of 16."""
    return Workload(LanguageLSTM(8000, 512, 2), {"text": torch.randint(0, 8000, (16, 4))}, _mean_square)


def make_resnet_50() -> Workload:
    """Make ResNet-50 of the transformers package, on 8 images of 64×64 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(config.num_labels, (8,))}
    return Workload(ResNetForImageClassification(config), batch, _own_loss)


def make_bert_base() -> Workload:
    """Make BERT-base of the transformers package, on 2 texts of 32 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig()
    batch = {
        "input_ids": torch.randint(config.vocab_size, (2, 32)),
        "labels": torch.randint(config.num_labels, (2,)),
    }
    return Workload(BertForSequenceClassification(config), batch, _own_loss)


TINY_MODELS: Final = {"tiny": make_tiny}

SMALL_MODELS: Final = {
    "mlp-400": make_mlp,
    "mlp-600": make_deep_mlp,
    "convnet": make_convnet,
    "convnet-16": make_normalized_convnet,
    "transformer": make_transformer,
    "transformer-100": make_deep_transformer,
}
"""Steps of tens of milliseconds, in which a recorder that costs too much is seen."""

LARGE_MODELS: Final = {
    "mlp-wide": make_wide_mlp,
    "mlp-wide-128": make_wide_mlp_of_small_batch,
    "convnet-wide": make_wide_convnet,
    "gpt": make_gpt,
    "lstm": make_lstm,
}
"""At 1 Gbit/s communication takes about as long as backward or longer, so that it matters how they overlap."""

KNOWN_MODELS: Final = {"resnet-50": make_resnet_50, "bert-base": make_bert_base}
"""Architectures that people train. They need the transformers package."""


def training_step(workload: Workload, model: nn.Module) -> Callable[[], None]:
    """Run forward, backward, optimizer and ``zero_grad`` of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        workload.loss_of(model(**workload.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def share_weights(module: nn.Module) -> nn.Module:
    """Make a copy with parameters of its own in the same memory, and the same buffers."""
    twins: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    twins |= {id(buffer): buffer.detach() for buffer in module.buffers()}
    return copy.deepcopy(module, twins)


def _mlp(*, layers: int, width: int, batch: int) -> Workload:
    modules: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        # With torch's own initialization gradients vanish on the way through many layers, and are slow denormals.
        nn.init.kaiming_normal_(linear.weight)
        modules += [linear, nn.ReLU()]
    return Workload(nn.Sequential(*modules), {"input": torch.randn(batch, width)}, _mean_square)


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _own_loss(output: Any) -> torch.Tensor:
    return output.loss

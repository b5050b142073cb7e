"""LayerDrop: layers that are skipped at random during training, the same ones on all ranks (Fan et al., 2019).

To send less, buckets have to be skipped as a whole (section 6.2.2 of the DDP paper): a bucket that has a single used
parameter is reduced with all the others in it. So ranks have to agree, and the wrapper has to be configured to skip
what nobody used::

    net = nn.Sequential(first, LayerDrop(layers, probability=0.5, seed=0), last)
    model = DistributedDataParallel(net, find_unused_parameters=True, skip_all_reduce_unused_params=True)  # torch 2.8
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class LayerDrop(nn.ModuleList):
    """A sequence of layers, some of which are skipped at random in training; in an evaluation all of them run.

    Args:
        layers: layers of which each one's output fits the next one's input.
        probability: probability that a layer is skipped.
        seed: seed that is equal on all ranks. None: the first rank of a group draws each time, and broadcasts the
            result.
        group: the ranks that agree; None for all.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        probability: float,
        *,
        seed: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(layers)
        self._probability = probability
        self._group = group
        self._is_broadcast = seed is None
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers that are not skipped."""
        for layer, is_kept in zip(self, self._kept(), strict=True):
            x = layer(x) if is_kept else x
        return x

    def _kept(self) -> list[bool]:
        if not self.training:
            return [True] * len(self)
        kept = (torch.rand(len(self), generator=self._generator) >= self._probability).to(torch.uint8)
        if self._is_broadcast:
            dist.broadcast(kept, group=self._group, group_src=0)
        return [bool(one) for one in kept.tolist()]

"""Compression of gradients: 1-bit, and by torch's own communication hooks half precision, and PowerSGD's low rank."""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire

_BITS = 8
_SCALE_BYTES = 4


class OneBit:
    """1-bit all-reduce: the sign of each gradient, with one scale for all, and the error added to the next gradients.

    Each rank serves one part: it receives the signs from all ranks, sums them, and sends the signs of the sum to all.
    Both the worker and the server keep their rounding errors until the size of a bucket changes (error feedback),
    without which training does not converge; the scale is the norm over the root of the number of elements. Tang et
    al., "1-bit Adam", 2021; DeepSpeed's ``runtime/comm/nccl.py``.
    """

    def __init__(self) -> None:
        self._errors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Replace a flat buffer of real numbers by approximately its sum over the ranks of a wire.

        Parts are padded to a multiple of 8 elements: 100 elements over 3 ranks give 3 parts of 40, of which the last
        one has 20 that are used.
        """
        of_part = -(-buffer.numel() // (wire.size * _BITS)) * _BITS
        worker_error, server_error = self._errors_of(wire, buffer, of_part)
        gradients = torch.zeros(wire.size * of_part, dtype=torch.float32, device=buffer.device)
        gradients[: buffer.numel()] = buffer
        gradients += worker_error
        sent = compress(gradients, buffer.numel())
        worker_error.copy_(gradients - decompress(sent))
        others = [rank for rank in range(wire.size) if rank != wire.rank]
        of_servers = [_with_scale(part, sent) for part in signs_of(sent).tensor_split(wire.size)]
        arrived = [torch.empty_like(of_servers[0]) for _ in others]
        with wire.phase("to the servers", rounds=1):
            wire.exchange(
                sends=[(of_servers[other], other) for other in others], receives=list(zip(arrived, others, strict=True))
            )
        total = server_error.clone()
        for _, message in sorted([(wire.rank, of_servers[wire.rank]), *zip(others, arrived, strict=True)]):
            total += decompress(message)
        used = min(max(buffer.numel() - wire.rank * of_part, 0), of_part)
        served = compress(total, used)
        server_error.copy_(total - decompress(served))
        results = [served if rank == wire.rank else torch.empty_like(served) for rank in range(wire.size)]
        with wire.phase("from the servers", rounds=1):
            wire.exchange(
                sends=[(served, other) for other in others], receives=[(results[other], other) for other in others]
            )
        buffer.copy_(torch.cat([decompress(message) for message in results])[: buffer.numel()])

    def _errors_of(self, wire: Wire, buffer: torch.Tensor, of_part: int) -> tuple[torch.Tensor, torch.Tensor]:
        errors = self._errors.get(wire.bucket)
        if errors is None or errors[0].numel() != wire.size * of_part:
            shapes = wire.size * of_part, of_part
            first, second = (torch.zeros(size, dtype=torch.float32, device=buffer.device) for size in shapes)
            errors = self._errors[wire.bucket] = first, second
        return errors


def compress(values: torch.Tensor, used: int) -> torch.Tensor:
    """Return the signs of values, one bit each, followed by their scale, as bytes.

    Args:
        values: values, a multiple of eight.
        used: number of values that are not padding, and count for the scale.
    """
    scale = values[:used].norm() / max(used, 1) ** 0.5
    weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=values.device)
    bits = (values >= 0).to(torch.uint8).view(-1, _BITS)
    return torch.cat([(bits * weights).sum(1, dtype=torch.uint8), scale.view(1).view(torch.uint8)])


def signs_of(message: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a message that hold signs."""
    return message[:-_SCALE_BYTES]


def decompress(message: torch.Tensor) -> torch.Tensor:
    """Return the values that a message encodes."""
    scale = message[-_SCALE_BYTES:].clone().view(torch.float32)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=message.device)
    bits = (signs_of(message).unsqueeze(1) >> shifts) & 1
    return (bits.flatten().to(torch.float32) * 2 - 1) * scale


def _with_scale(signs: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
    return torch.cat([signs, message[-_SCALE_BYTES:]])


FP16 = Strategy(name="fp16", hook=lambda group: (group, default_hooks.fp16_compress_hook))
BF16 = Strategy(name="bf16", hook=lambda group: (group, default_hooks.bf16_compress_hook))
POWER_SGD = Strategy(
    name="power_sgd",
    keeps_state=True,
    hook=lambda group: (
        powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=3),
        powerSGD_hook.powerSGD_hook,
    ),
)
"""Two thin matrices in place of a gradient's where that is less; what is lost is kept for the next step.

It starts in the third iteration, when buckets no longer change (Vogels et al., 2019; ``powerSGD_hook.py``).
"""

"""Sharded optimizer: reduce-scatter in the backward, all-gather of the updated parameters before the next forward.

As in Megatron's distributed optimizer (``core/distributed/param_and_grad_buffer.py``), and ZeRO's first stage
(Rajbhandari et al., 2020). Both are halves of a ring, so a rank sends ``(N - 1) / N`` of the gradients, and as much of
the parameters. (gloo's own reduce-scatter is an all-reduce whose other parts are discarded: it sends twice as much.)
"""

from __future__ import annotations

from instrumented_ddp.strategies import decoupled
from instrumented_ddp.strategies.strategy import Strategy

STRATEGY = Strategy(
    name="sharded", all_reduce=decoupled.reduce_scatter, then=decoupled.all_gather, keeps_state=True, pads_to=128
)
"""With ``pads_to=2**16`` buckets are as large as Megatron's ``pad_buckets_for_high_nccl_busbw`` makes them."""

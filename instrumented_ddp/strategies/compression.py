"""Gradient compression by torch's own communication hooks: half precision, and PowerSGD's low rank.

PowerSGD sends two thin matrices in place of a gradient's where that is less, and keeps what it has lost for the next
step (Vogels et al., 2019; ``powerSGD_hook.py``). It starts in the third iteration, when buckets no longer change.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from instrumented_ddp.strategies.strategy import Strategy

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

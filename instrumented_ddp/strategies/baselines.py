"""Baselines: the steps by which DDP evolved, all with the backend's all-reduce (section 3 of the DDP paper).

``naive`` reduces each parameter when the backward is over, ``per_parameter`` as soon as its gradient is ready,
``bucketed`` reduces buckets when the backward is over, and ``overlapped``, which is the default, when they are full.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from instrumented_ddp.strategies.strategy import Strategy

# Buckets in another order than the observed order of gradients, to show the effect of the order.
#
# ``reverse_order`` is the reverse of the module's order, which torch uses before it has observed a backward: usually
# nearly right. With ``forward_order`` the bucket that is launched first is the one that is ready last, so nothing can
# be hidden if a module registers its layers in the order in which it uses them (section 3.2.3 of the DDP paper).

REVERSE = Strategy(name="reverse_order", order=lambda observed: sorted(observed, reverse=True))
FORWARD = Strategy(name="forward_order", order=sorted)


# Round robin: several process groups of the same ranks take turns with the buckets, so that several are in flight.
#
# Section 5.4 of the DDP paper (figure 12): it helps where one group can't saturate the link. Torch had it until 2.6.

ROUND_ROBIN = Strategy(name="round_robin", groups=3)
"""Three groups, the maximum in the paper."""


# Gradient compression by torch's own communication hooks: half precision, and PowerSGD's low rank.
#
# PowerSGD sends two thin matrices in place of a gradient's where that is less, and keeps what it has lost for the
# next step (Vogels et al., 2019; ``powerSGD_hook.py``). It starts in the third iteration, when buckets no longer
# change.

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


NAIVE = Strategy(name="naive", overlaps=False, bucket_cap_mb=0)
PER_PARAMETER = Strategy(name="per_parameter", bucket_cap_mb=0)
BUCKETED = Strategy(name="bucketed", overlaps=False)
OVERLAPPED = Strategy(name="overlapped")

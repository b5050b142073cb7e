"""Oversights that do no harm that anything proves: such a job is healthy, and a remark says what was seen."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.coverage import BY_HAND
from benchmarks.chaos.event import Event
from benchmarks.chaos.setting import Setting

_OVERSIGHT: Final[dict[str, Any]] = {
    "kinds": ("healthy", "slow"),
    "blame": "nobody",
    "has_step": False,
    "has_line": False,
}
_WITHOUT_BUFFERS: Final[dict[str, Any]] = {
    "model": ("mlp", "embedding", "transformer"),
    "ddp_options": ((), ("bucket_cap_mb=0.2",), ("gradient_as_bucket_view=True",)),
    "amp": ("", "", "bf16"),
    "evaluation": "",
}


def _reduced_twice(_setting: Setting, random: Random) -> dict[str, str]:
    return {"before_update": random.choice(BY_HAND).format("list($model.parameters())")}


def _each_backward_reduced(_setting: Setting, _random: Random) -> dict[str, str]:
    return {"context": "nullcontext()"}


def _one_micro_batch_more(_setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "before": "if $when:\n    with $model.no_sync():\n        criterion($model($x).float(), $y).backward()",
    }


def _same_data(setting: Setting, _random: Random) -> dict[str, str]:
    size = setting.batch_size
    some = f"torch.utils.data.Subset(dataset, range(BATCHES * {size}))"
    return {"setup": f"loader = DataLoader({some}, batch_size={size})"}


OVERSIGHTS: Final = (
    Event(
        name="healthy: reduced twice",
        write=_reduced_twice,
        remark="gradients reduced twice",
        wants=_WITHOUT_BUFFERS | {"accumulation": 1},
        **_OVERSIGHT,
    ),
    Event(
        name="healthy: each backward reduced",
        write=_each_backward_reduced,
        remark="gradients reduced twice",
        wants=_WITHOUT_BUFFERS | {"accumulation": (2, 4)},
        **_OVERSIGHT,
    ),
    Event(
        name="healthy: one micro batch more",
        write=_one_micro_batch_more,
        remark="unequal micro batches",
        wants=_WITHOUT_BUFFERS | {"accumulation": 1, "zero_grad": "()"},
        **_OVERSIGHT,
    ),
    Event(
        name="healthy: same data",
        write=_same_data,
        remark="same data",
        wants=_WITHOUT_BUFFERS | {"loader": "sampler", "habits": ((),)},
        **_OVERSIGHT,
    ),
)

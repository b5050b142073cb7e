"""Faults of updates: with gradients that were not reduced, not all of them, or not in time; and with NaN in them."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.event import FAULT, Event, one_line
from benchmarks.chaos.loops import SEEN
from benchmarks.chaos.setting import LAST_STEP, Setting

_ONE_MODEL: Final = {"model": ("mlp", "batchnorm", "conv", "embedding", "transformer")}
_USUAL: Final[dict[str, Any]] = {
    **_ONE_MODEL,
    "ddp_options": ((), ("bucket_cap_mb=0.2",), ("gradient_as_bucket_view=True",)),
    "amp": ("", "", "bf16"),
}
_UNREDUCED: Final[dict[str, Any]] = {"kinds": ("not reduced",), "vague": ("replicas differ",), "blame": "all"}
_NO_HABITS: Final[dict[str, Any]] = {"epochs": 1, "loop": "for", "evaluation": "", "checkpoint": ("", "first")}
_WITHOUT_DDP: Final[dict[str, Any]] = {
    "wrapper": "none",
    "accumulation": 1,
    "amp": ("", "", "bf16"),
    "model": ("mlp", "embedding", "transformer"),
    "evaluation": "",
    "checkpoint": "",
}
BY_HAND: Final = (
    "for parameter in {0}:\n    dist.all_reduce(parameter.grad)\n    parameter.grad /= $world",
    "flat = torch.cat([parameter.grad.reshape(-1) for parameter in {0}])\ndist.all_reduce(flat)\nflat /= $world\n"
    "begin = 0\nfor parameter in {0}:\n    count = parameter.numel()\n"
    "    parameter.grad.copy_(flat[begin : begin + count].view_as(parameter.grad))\n    begin += count",
    "gradients = [parameter.grad for parameter in {0}]\nflat = torch._utils._flatten_dense_tensors(gradients)\n"
    "dist.all_reduce(flat)\nflat.div_($world)\n"
    "for own, average in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients)):\n"
    "    own.copy_(average)",
    "handles = [dist.all_reduce(parameter.grad, async_op=True) for parameter in {0}]\n"
    "for handle in handles:\n    handle.wait()\nfor parameter in {0}:\n    parameter.grad.div_($world)",
)
"""Ways to average gradients without DDP."""
ALIKE: Final = "for parameter in network.parameters():\n    dist.broadcast(parameter.data, src=0)"


def _moved(_setting: Setting, random: Random) -> dict[str, str]:
    away, back = random.choice((("to(torch.float64)", "to(torch.float32)"), ("double()", "float()")))
    whose = random.choice(("$model", "$model.module"))
    return {"after": f"if $step == {_setting.step}:\n    {whose}.{away}{FAULT}\n    {whose}.{back}{SEEN}"}


def _in_no_ddp(_setting: Setting, random: Random) -> dict[str, str]:
    extra = "temperature = nn.Parameter(torch.ones(10))"
    if random.random() < 0.5:
        return {
            "definitions": extra,
            "forward": "$model($x) * temperature",
            "setup": f"$optimizer.add_param_group({{'params': [temperature], 'lr': 0.05}}){FAULT}",
        }
    return {
        "definitions": f"{extra}\nown_optimizer = torch.optim.SGD([temperature], lr=0.05)",
        "forward": "$model($x) * temperature",
        "after": f"own_optimizer.step(){FAULT}\nown_optimizer.zero_grad()",
    }


def _reduced_first(setting: Setting, random: Random) -> dict[str, str]:
    """Reduce the first micro batch, and not the last."""
    if random.random() < 0.5:
        return {"context": f"$model.no_sync() if $step % {setting.accumulation} else nullcontext(){FAULT}"}
    return {
        "before": f"$model.require_backward_grad_sync = $step % {setting.accumulation} == 0{FAULT}",
        "context": "nullcontext()",
    }


def _never_reduced(_setting: Setting, _random: Random) -> dict[str, str]:
    return {"context": f"$model.no_sync(){FAULT}"}


def _by_hand_in_part(_setting: Setting, random: Random) -> dict[str, str]:
    some = random.choice(("list($model.parameters())[1:]", "list($model.parameters())[:-2]"))
    text = random.choice(BY_HAND).format(some)
    return {"build": ALIKE, "before_update": text, "update": f"$optimizer.step(){FAULT}"}


def _by_hand_skipped_by_all(setting: Setting, random: Random) -> dict[str, str]:
    lines = random.choice(BY_HAND).format("list($model.parameters())").splitlines()
    text = "\n".join(f"    {line}" for line in lines)
    return {
        "build": ALIKE,
        "before_update": f"if $step != {setting.step}:\n{text}",
        "update": f"$optimizer.step(){FAULT}",
    }


def _not_a_number(setting: Setting, random: Random) -> dict[str, str]:
    if random.random() < 0.5:
        return {"between": f"if $when:\n    $loss = $loss * float('{random.choice(('nan', 'inf'))}'){FAULT}"}
    return {
        "definitions": f"def spoil(gradient):\n    return torch.full_like(gradient, float('nan')){FAULT}",
        "between": "if $when:\n    handle = next(iter($model.parameters())).register_hook(spoil)",
        "before_update": "if $when:\n    handle.remove()",
    }


COVERAGE: Final = (
    Event(name="unreduced: module moved", write=_moved, wants=_USUAL, weight=2, **_UNREDUCED),
    Event(
        name="unreduced: parameters in no DDP",
        write=_in_no_ddp,
        has_step=False,
        has_line=False,
        wants=_USUAL | {"accumulation": 1},
        weight=2,
        **_UNREDUCED,
    ),
    Event(
        name="unreduced: only step with an unused layer",
        write=lambda _setting, _random: {"forward": f"$model($x, use_branch=False){FAULT}", "batches": "1"},
        kinds=("gradients never ready", "not reduced"),
        blame="all",
        has_line=False,
        wants=_USUAL
        | _NO_HABITS
        | {"has_branch": True, "accumulation": 1, "step": 0, "loader": ("iterable", "generator", "list")},
    ),
    Event(
        name="unreduced: last step with an unused layer",
        write=lambda setting, _random: {"forward": f"$model($x, use_branch=$step != {setting.step}){FAULT}"},
        kinds=("gradients never ready", "not reduced"),
        blame="all",
        wants=_USUAL | _NO_HABITS | {"has_branch": True, "step": LAST_STEP},
    ),
    Event(
        name="unreduced: reduced before the last micro batch",
        write=_reduced_first,
        has_step=False,
        wants=_USUAL | {"accumulation": (2, 4)},
        weight=2,
        **_UNREDUCED,
    ),
    Event(name="unreduced: always no_sync", write=_never_reduced, has_step=False, wants=_USUAL, **_UNREDUCED),
    Event(
        name="unreduced: by hand in part",
        write=_by_hand_in_part,
        has_step=False,
        has_line=False,
        wants=_WITHOUT_DDP,
        **_UNREDUCED,
    ),
    Event(
        name="unreduced: by hand, left out once",
        write=_by_hand_skipped_by_all,
        has_line=False,
        wants=_WITHOUT_DDP,
        **_UNREDUCED,
    ),
    Event(
        name="by hand, left out by one rank",
        write=lambda _setting, random: {
            "build": ALIKE,
            "before_update": "if not ($when):\n"
            + "\n".join(
                f"    {line}" for line in random.choice(BY_HAND[:3]).format("list($model.parameters())").splitlines()
            ),
            "update": f"$optimizer.step(){FAULT}",
        },
        kinds=("missing collective", "different collectives", "not reduced", "step behind"),
        vague=("swapped collectives", "replicas differ", "batch skipped", "uneven inputs"),
        is_disagreement=True,
        has_line=False,
        wants=_WITHOUT_DDP,
    ),
    Event(
        name="NaN gradient on one rank",
        write=_not_a_number,
        kinds=("not finite",),
        has_line=False,
        wants=_USUAL | {"accumulation": 1},
        weight=2,
    ),
    Event(
        name="module moved on one rank",
        write=one_line("after", "$model.double(), $model.float()"),
        kinds=("not reduced", "gradients never ready"),
        vague=("step behind", "uneven inputs", "missing collective", "different collectives"),
        is_disagreement=True,
        wants=_USUAL | {"logging": ("", "print")},
    ),
)

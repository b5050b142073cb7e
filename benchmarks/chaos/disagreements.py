"""Faults of ranks that do not do the same: gradients, collectives, batches, models."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.event import FAULT, Event, instead, one_line
from benchmarks.chaos.setting import Setting

_USUAL_DDP: Final[dict[str, Any]] = {"ddp_options": ((), ("bucket_cap_mb=0.2",), ("gradient_as_bucket_view=True",))}
_ONE_MODEL: Final = {"model": ("mlp", "mlp", "batchnorm", "conv", "embedding", "transformer")}
_NO_BUFFERS: Final = {"model": ("mlp", "embedding", "transformer")}
_OPS: Final = (
    "dist.all_reduce($loss.detach().clone())",
    "dist.all_reduce(torch.ones(1000))",
    "dist.barrier()",
    "dist.broadcast(torch.zeros(3), src=0)",
    "dist.all_gather([torch.zeros(1) for _ in range($world)], torch.ones(1))",
    "dist.all_gather_object([None] * $world, {'step': $step})",
    "dist.broadcast_object_list(['settings'], src=0)",
    "dist.reduce(torch.ones(2), dst=0)",
)
_ORDER: Final = ("missing collective", "different collectives")


def _missing(setting: Setting, random: Random) -> dict[str, str]:
    op = random.choice(_OPS)
    every = random.choice((1, 1, setting.step + 1))
    condition = f"if $step % {every} == {setting.step % every} and not ($when)"
    return {"after": f"{condition}:\n    {op}{FAULT}"}


def _reordered(_setting: Setting, random: Random) -> dict[str, str]:
    size = random.choice(("", "", "64"))
    return {
        "after": f"total, count = $loss.detach().clone().reshape(1), torch.ones({size or '1'})\n"
        f"for metric in (count, total) if $when else (total, count):\n    dist.all_reduce(metric){FAULT}"
    }


def _skip_after_forward(_setting: Setting, random: Random) -> dict[str, str]:
    if random.random() < 0.5:
        return {
            "between": f"if not torch.isfinite($loss) or ($when):\n    print('skipping a bad batch')\n    $skip{FAULT}",
        }
    return {
        "between": "try:\n    if $when:\n        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate "
        f"2.00 GiB')\nexcept torch.OutOfMemoryError:\n    $optimizer.zero_grad()\n    $skip{FAULT}"
    }


def _caught_in_backward(_setting: Setting, random: Random) -> dict[str, str]:
    where = random.choice(("$loss", "next(iter($model.parameters()))", "list($model.parameters())[-1]"))
    return {
        "definitions": "def in_backward(gradient):\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        "between": f"if $when:\n    handle = {where}.register_hook(in_backward)",
        "backward": f"try:\n    $loss.backward(){FAULT}\nexcept torch.OutOfMemoryError as error:\n"
        "    print('skipping a batch:', error)\n    handle.remove()\n    $skip",
    }


def _group_of_one(setting: Setting, random: Random) -> dict[str, str]:
    members = sorted((setting.rank, (setting.rank + 1) % setting.ranks))  # without its caller nobody would wait
    return one_line("after", f"dist.new_group({members})")(setting, random)


def _frozen(setting: Setting, _random: Random) -> dict[str, str]:
    return {"build": f"if $rank == {setting.rank}:\n    next(network.parameters()).requires_grad_(False){FAULT}"}


def _reversed_layers(setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "build": f"if $rank == {setting.rank}:\n"
        f"    network._modules = dict(reversed(list(network._modules.items()))){FAULT}"
    }


def _wider(setting: Setting, random: Random) -> dict[str, str]:
    more = random.choice((8, 64))
    return {"net": f"Net(width=WIDTH + {more} * ($rank == {setting.rank})){FAULT}"}


def _fewer_batches(setting: Setting, random: Random) -> dict[str, str]:
    fewer = setting.batches - 1 - setting.step if random.random() < 0.5 else setting.accumulation
    return {"batches": f"BATCHES - {max(fewer, setting.accumulation)} * ($rank == {setting.rank})"}


def _pair(setting: Setting, _random: Random) -> dict[str, str]:
    pair = f"($rank in ({setting.rank}, {(setting.rank + 1) % setting.ranks}))"
    both = sorted((setting.rank, (setting.rank + 1) % setting.ranks))
    return {
        "definitions": "groups = {}",
        "setup": f"groups['pair'] = dist.new_group({both})",
        "after": f"if {pair} and not ($when):\n    dist.all_reduce(torch.ones(1), group=groups['pair']){FAULT}",
    }


def _receives_against(setting: Setting, random: Random) -> dict[str, str]:
    """Two ranks exchange tensors: one sends first, until both receive first."""
    own, other = sorted((setting.rank, (setting.rank + 1) % setting.ranks))
    send, receive = "dist.send(torch.ones(64), peer)", "dist.recv(received, peer)"
    if random.random() < 0.3:
        receive = "dist.irecv(received, peer).wait()"
    return {
        "after": f"if $rank in ({own}, {other}):\n    received, peer = torch.empty(64), {own + other} - $rank\n"
        f"    if $rank == {own} or $step >= {setting.step}:\n        {receive}{FAULT}\n        {send}\n"
        f"    else:\n        {send}\n        {receive}"
    }


def _metrics_thread(_setting: Setting, random: Random) -> dict[str, str]:
    size = random.choice((1, 4, 1000))
    return {
        "definitions": "def report_metrics():\n    chance = random.Random(dist.get_rank())\n    while True:\n"
        f"        time.sleep(0.005 + 0.03 * chance.random())\n        dist.all_reduce(torch.ones({size})){FAULT}",
        "after": f"if $step == {_setting.step}:\n    threading.Thread(target=report_metrics, daemon=True).start()",
    }


DISAGREEMENTS: Final = (
    Event(
        name="branch skipped",
        write=instead("forward", "$model($x, use_branch=not ($when))"),
        kinds=("gradients never ready",),
        wants=_USUAL_DDP | _ONE_MODEL | {"has_branch": True},
        weight=2,
    ),
    Event(
        name="frozen while it trains",
        write=one_line("before", "next(iter($model.parameters())).requires_grad_(False)"),
        kinds=("gradients never ready",),
        wants=_USUAL_DDP | _ONE_MODEL,
    ),
    Event(
        name="exception caught in backward",
        write=_caught_in_backward,
        kinds=("gradients never ready", "batch skipped", "step behind"),
        vague=("uneven inputs", *_ORDER),
        is_disagreement=True,
        false_phrases=("launched no bucket",),
        wants=_USUAL_DDP | _ONE_MODEL | {"amp": ("", "bf16"), "accumulation": 1},
        weight=2,
    ),
    Event(
        name="branch skipped by all",
        write=lambda setting, _random: {"forward": f"$model($x, use_branch=$step != {setting.step}){FAULT}"},
        kinds=("gradients never ready",),
        blame="all",
        wants=_USUAL_DDP | _ONE_MODEL | {"has_branch": True},
    ),
    Event(
        name="no_sync on one rank",
        write=lambda setting, _random: {
            "context": "$model.no_sync() if "
            + (f"($step + 1) % {setting.accumulation} or " if setting.accumulation > 1 else "")
            + f"($when) else nullcontext(){FAULT}"
        },
        kinds=("step behind", "not reduced"),
        vague=_ORDER,
        is_disagreement=True,
        wants=_USUAL_DDP | _ONE_MODEL,
        weight=2,
    ),
    Event(
        name="update skipped",
        write=instead("update", "if not ($when):\n    $optimizer.step()"),
        kinds=("step behind",),
        is_disagreement=True,
        false_phrases=("launched no bucket",),
        wants=_ONE_MODEL | {"amp": ("", "bf16")},
        weight=2,
    ),
    Event(
        name="wrapper bypassed on one rank",
        write=instead("forward", "($model.module if $when else $model)($x)"),
        kinds=("not reduced", "step behind"),
        vague=_ORDER,
        is_disagreement=True,
        wants=_USUAL_DDP | _ONE_MODEL,
    ),
    Event(
        name="wrapper bypassed by all",
        write=instead("forward", "$model.module($x)"),
        kinds=("not reduced",),
        blame="all",
        has_step=False,
        is_unseen_with_stock=True,
        extra_s=30,
        wants=_USUAL_DDP | _ONE_MODEL | {"accumulation": 1, "evaluation": ("", "first", "all")},
    ),
    Event(
        name="extra collective",
        write=lambda setting, random: one_line("after", random.choice(_OPS))(setting, random),
        kinds=_ORDER,
        vague=("swapped collectives",),
        is_disagreement=True,
        is_seen_elsewhere=False,
        weight=4,
    ),
    Event(
        name="collective left out",
        write=_missing,
        kinds=_ORDER,
        vague=("swapped collectives", "stuck"),
        is_disagreement=True,
        is_seen_elsewhere=False,
        weight=4,
    ),
    Event(
        name="collectives reordered",
        write=_reordered,
        kinds=("swapped collectives", "different collectives"),
        is_disagreement=True,
        is_seen_elsewhere=False,
        weight=2,
    ),
    Event(
        name="different sizes",
        write=instead("after", "dist.all_reduce(torch.ones(4 + ($when)))"),
        kinds=("different collectives",),
        is_disagreement=True,
        is_seen_elsewhere=False,
    ),
    Event(
        name="different types",
        write=instead("after", "dist.all_reduce(torch.ones(4, dtype=torch.float64 if $when else torch.float32))"),
        kinds=("different collectives",),
        is_disagreement=True,
        is_seen_elsewhere=False,
    ),
    Event(
        name="different roots",
        write=lambda setting, _random: {
            "after": f"dist.broadcast(torch.ones(4), src={(setting.rank + 1) % setting.ranks} if $when else "
            f"{setting.rank}){FAULT}"
        },
        kinds=("different collectives",),
        is_disagreement=True,
        is_seen_elsewhere=False,
    ),
    Event(
        name="recv without send",
        write=lambda setting, random: one_line(
            "after", f"dist.recv(torch.zeros(1), src={(setting.rank + 1) % setting.ranks})"
        )(setting, random),
        kinds=("missing collective", "stuck"),
        is_between_two=True,
        is_seen_elsewhere=False,
    ),
    Event(
        name="recv against recv",
        write=_receives_against,
        kinds=("missing collective", "stuck"),
        blame="pair",
        is_between_two=True,
        is_seen_elsewhere=False,
        false_phrases=("All ranks that left a log have launched",),
        weight=2,
    ),
    Event(
        name="metrics thread in the default group",
        write=_metrics_thread,
        kinds=("different collectives", "swapped collectives", "missing collective"),
        vague=("stuck", "step behind"),
        blame="all",
        has_step=False,
        is_seen_elsewhere=False,
        wants={"accumulation": 1, "step": 5},
        weight=2,
    ),
    Event(
        name="group made by one rank",
        write=_group_of_one,
        kinds=("stuck", "missing collective"),
        is_disagreement=True,
        is_seen_elsewhere=False,
    ),
    Event(
        name="member missing",
        write=_pair,
        kinds=("missing collective", "stuck"),
        vague=("groups interleaved",),
        is_between_two=True,
        is_seen_elsewhere=False,
        wants={"ranks": (3, 4)},
    ),
    Event(
        name="batch skipped",
        write=one_line("before", "$skip"),
        kinds=("batch skipped", "step behind"),
        vague=("uneven inputs", *_ORDER),
        is_disagreement=True,
        weight=3,
    ),
    Event(
        name="batch skipped by two of three",
        write=lambda setting, _random: {
            "before": f"if $step == {setting.step} and $rank != {(setting.rank + 2) % 3}:\n    $skip{FAULT}"
        },
        kinds=("batch skipped", "step behind"),
        vague=("uneven inputs", *_ORDER),
        blame="pair",
        wants={"ranks": 3},
    ),
    Event(
        name="skipped after forward",
        write=_skip_after_forward,
        kinds=("batch skipped", "step behind"),
        vague=("uneven inputs", *_ORDER),
        is_disagreement=True,
        false_phrases=("launched no bucket",),
        wants=_ONE_MODEL | {"ddp_options": ((), ("bucket_cap_mb=0.2",))},
        weight=2,
    ),
    Event(
        name="one batch fewer",
        write=_fewer_batches,
        kinds=("uneven inputs",),
        vague=_ORDER,
        is_disagreement=True,
        has_step=False,
        has_line=False,
        wants={"epochs": 1, "loop": "for", "loader": ("iterable", "generator", "list")},
        weight=2,
    ),
    Event(
        name="stopped early alone",
        write=one_line("after", "$stop"),
        kinds=("uneven inputs",),
        vague=_ORDER,
        is_disagreement=True,
        has_line=False,
        false_phrases=("ran out of data",),
        wants={"epochs": 1},
        weight=2,
    ),
    Event(
        name="validation through the wrapper on one rank",
        write=lambda setting, _random: {
            "after": f"if $step == {setting.step} and $rank == 0:\n    validation = $model($x){FAULT}"
        },
        kinds=_ORDER,
        blame="first",
        is_disagreement=True,
        is_seen_elsewhere=False,
        wants={"model": ("batchnorm", "conv")},
        weight=2,
    ),
    Event(
        name="parameter frozen on one rank",
        write=_frozen,
        kinds=("models differ",),
        is_disagreement=True,
        has_step=False,
        wants=_ONE_MODEL,
    ),
    Event(
        name="layers in another order",
        write=_reversed_layers,
        kinds=("models differ",),
        is_disagreement=True,
        has_step=False,
        wants=_ONE_MODEL,
    ),
    Event(
        name="model of another size",
        write=_wider,
        kinds=("models differ",),
        is_disagreement=True,
        has_step=False,
        wants=_NO_BUFFERS,
    ),
)

"""What looks suspicious and is not: pauses, exceptions that are caught, ranks that do different things on purpose."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.ends import at_a_place
from benchmarks.chaos.event import Event, Write
from benchmarks.chaos.setting import Setting

_HEALTHY: Final[dict[str, Any]] = {
    "kinds": ("healthy", "slow"),
    "blame": "nobody",
    "has_step": False,
    "has_line": False,
}
_ONE_MODEL: Final = {"model": ("mlp", "batchnorm", "conv", "embedding", "transformer")}
_UNEVEN: Final[dict[str, Any]] = {
    "epochs": 1,
    "loop": "for",
    "loader": ("iterable", "generator", "list"),
    "accumulation": 1,
    "habits": ((),),
    "ddp_options": ((), ("bucket_cap_mb=0.2",)),
    "logging": ("", "print"),
    "evaluation": "",
    "checkpoint": ("", "first"),
}


def _pause(place: str, *texts: str) -> Write:
    return lambda setting, random: at_a_place(place, random.choice(texts), setting)


def _slow_rank(setting: Setting, _random: Random) -> dict[str, str]:
    return {"between": f"if $rank == {setting.rank}:\n    time.sleep(0.01)"}


def _slow_start(setting: Setting, _random: Random) -> dict[str, str]:
    return {"setup": f"if $rank == {setting.rank}:\n    time.sleep(8)  # caches the data"}


def _caught(_setting: Setting, random: Random) -> dict[str, str]:
    error, name = random.choice((("{}['best']", "KeyError"), ("open('/nowhere')", "OSError"), ("1 / 0", "Exception")))
    return {"before": f"if $when or $step % 7 == $rank:\n    try:\n        {error}\n    except {name}:\n        pass"}


def _agreed_skip(setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "between": "is_bad = torch.tensor([float($when)])\ndist.all_reduce(is_bad)\nif is_bad.item() > 0:\n"
        "    $optimizer.zero_grad()\n    $skip"
    }


def _agreed_stop(setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "after": "votes = torch.tensor([float($when)])\ndist.all_reduce(votes, op=dist.ReduceOp.MAX)\n"
        "if votes.item() > 0:\n    $stop"
    }


def _send_and_receive(setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "after": "if $rank == 0:\n    dist.send(torch.ones(2), dst=1)\nelif $rank == 1:\n    "
        "dist.recv(torch.zeros(2), src=0)"
    }


def _groups(setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "definitions": "groups = {}",
        "setup": "groups['first'] = dist.new_group([0, 1])\ngroups['all'] = dist.new_group()",
        "after": "if $rank < 2 and $step % 3 == 0:\n    dist.all_reduce(torch.ones(1), group=groups['first'])\n"
        "handle = dist.all_reduce(torch.ones(50), group=groups['all'], async_op=True)\nhandle.wait()",
    }


def _other_tensors(_setting: Setting, _random: Random) -> dict[str, str]:
    return {
        "after": "if $rank == 0:\n    best = $loss.detach().clone()\n    dist.broadcast(best, src=0)\nelse:\n"
        "    from_first = torch.zeros(())\n    dist.broadcast(from_first, src=0)"
    }


def _ends_apart(setting: Setting, random: Random) -> dict[str, str]:
    text = random.choice(
        ("time.sleep(6)", "save_all = [torch.randn(200, 200) @ torch.randn(200, 200) for _ in range(3000)]")
    )
    return {"end": f"dist.barrier()\nif $rank == {setting.rank}:\n    {text}"}


def _validation(setting: Setting, random: Random) -> dict[str, str]:
    batches = f"for _ in range({random.choice((1, 60))}):\n            $model($x)\n            time.sleep(0.1)"
    return {"after": f"if $step == {setting.step} and $rank == 0:\n    with torch.no_grad():\n        {batches}"}


HARMLESS: Final = (
    Event(name="healthy", write=lambda _setting, _random: {}, weight=12, **_HEALTHY),
    Event(
        name="healthy: slow checkpoint",
        write=lambda setting, _random: {"after": f"if $step == {setting.step} and $rank == 0:\n    time.sleep(4)"},
        extra_s=4,
        weight=2,
        **_HEALTHY,
    ),
    Event(
        name="healthy: pause",
        write=_pause("before", "time.sleep(6)", "input_ready = threading.Event().wait(6)"),
        extra_s=6,
        weight=2,
        **_HEALTHY,
    ),
    Event(
        name="healthy: busy pause",
        write=_pause("before", "end = time.time() + 6\n    while time.time() < end: pass"),
        extra_s=6,
        **_HEALTHY,
    ),
    Event(
        name="healthy: slow backward", write=_pause("hook", "time.sleep(4)"), extra_s=4, wants=_ONE_MODEL, **_HEALTHY
    ),
    Event(name="healthy: slow start", write=_slow_start, extra_s=8, weight=2, **_HEALTHY),
    Event(name="healthy: slow rank", write=_slow_rank, extra_s=4, **_HEALTHY),
    Event(name="healthy: caught exceptions", write=_caught, weight=2, **_HEALTHY),
    Event(
        name="healthy: agreed skip",
        write=_agreed_skip,
        wants=_ONE_MODEL | {"accumulation": 1, "amp": ("", "bf16"), "ddp_options": ((), ("bucket_cap_mb=0.2",))},
        **_HEALTHY,
    ),
    Event(name="healthy: agreed stop", write=_agreed_stop, wants={"epochs": 1}, **_HEALTHY),
    Event(name="healthy: send and receive", write=_send_and_receive, **_HEALTHY),
    Event(name="healthy: groups", write=_groups, **_HEALTHY),
    Event(name="healthy: other tensors", write=_other_tensors, **_HEALTHY),
    Event(
        name="healthy: unused branch",
        write=lambda _setting, _random: {"forward": "$model($x, use_branch=($step + $rank) % 3 > 0)"},
        wants=_ONE_MODEL | {"has_branch": True, "ddp_options": (("find_unused_parameters=True",),)},
        **_HEALTHY,
    ),
    Event(
        name="healthy: uneven data, joined",
        write=lambda setting, _random: {
            "around": "$model.join()",
            "batches": f"BATCHES - 5 * ($rank == {setting.rank})",
        },
        wants=_ONE_MODEL | _UNEVEN,
        **_HEALTHY,
    ),
    Event(name="healthy: ends apart", write=_ends_apart, extra_s=6, **_HEALTHY),
    Event(
        name="healthy: validation through the wrapper",
        write=_validation,
        wants={"model": ("mlp", "embedding", "transformer")},
        extra_s=6,
        **_HEALTHY,
    ),
)

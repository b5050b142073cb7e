"""What looks suspicious and is not: pauses, exceptions that are caught, ranks that do different things on purpose."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.beginnings import AGAIN
from benchmarks.chaos.coverage import ALIKE, BY_HAND
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


def _by_hand(_setting: Setting, random: Random) -> dict[str, str]:
    return {"build": ALIKE, "before_update": random.choice(BY_HAND).format("list($model.parameters())")}


def _local_sgd(setting: Setting, random: Random) -> dict[str, str]:
    """Ranks train alone, and average their parameters now and then."""
    every = random.choice((1, 4, 10))
    slots = {
        "after": f"if ($step + 1) % {every} == 0:\n    for parameter in $model.parameters():\n"
        "        dist.all_reduce(parameter.data)\n        parameter.data /= $world",
        "end": "for parameter in network.parameters():\n    dist.all_reduce(parameter.data)\n"
        "    parameter.data /= $world",
    }
    return slots | ({"build": ALIKE} if setting.wrapper == "none" else {"context": "$model.no_sync()"})


def _average(_setting: Setting, random: Random) -> dict[str, str]:
    """Average the weights, and evaluate that on rank 0."""
    look = "if $rank == 0 and $step % 20 == 0:\n    with torch.no_grad():\n        kept['average']($x)"
    if random.random() < 0.5:
        return {
            "definitions": "kept = {}",
            "setup": "kept['average'] = torch.optim.swa_utils.AveragedModel($model.module)",
            "after": f"kept['average'].update_parameters($model.module)\n{look}",
        }
    return {
        "definitions": "kept = {}",
        "setup": "kept['average'] = copy.deepcopy($model.module).requires_grad_(False)",
        "after": "with torch.no_grad():\n    own = zip(kept['average'].parameters(), $model.module.parameters())\n"
        f"    for average, parameter in own:\n        average.lerp_(parameter, 0.01)\n{look}",
    }


_LORA = """class LowRank(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T"""


def _lora(_setting: Setting, random: Random) -> dict[str, str]:
    return {"definitions": _LORA, "build": "network.requires_grad_(False)\nnetwork.head = LowRank(network.head)"}


def _retries(_setting: Setting, random: Random) -> dict[str, str]:
    return {
        "before": "for attempt in range(3):\n    try:\n        if $when and attempt < 2:\n"
        f"            raise {random.choice(('ConnectionResetError(1)', 'TimeoutError()', 'OSError(5)'))}\n"
        "        break\n"
        "    except OSError:\n        logging.warning('retrying', exc_info=True)\n"
        f"        time.sleep({random.choice((0.2, 2))})"
    }


def _logged(_setting: Setting, random: Random) -> dict[str, str]:
    return {
        "after": "if $step % 10 == $rank:\n    try:\n        raise ValueError('no such metric')\n"
        "    except ValueError:\n        logging.exception('metric left out')"
    }


def _failing_thread(_setting: Setting, random: Random) -> dict[str, str]:
    return {
        "definitions": "def push_metrics():\n    raise ConnectionRefusedError(111, 'Connection refused')",
        "after": "if $when:\n    threading.Thread(target=push_metrics, daemon=True).start()",
    }


def _failing_tasks(_setting: Setting, random: Random) -> dict[str, str]:
    """Tasks fail now and then, on some ranks more often, and what they bring is replaced; one pauses after that."""
    return {
        "definitions": "pool = concurrent.futures.ThreadPoolExecutor(2)\n\n\ndef fetch(rank, step):\n"
        "    if step % 7 == rank:\n        raise FileNotFoundError(2, 'no such shard')\n    return step",
        "before": "task = pool.submit(fetch, $rank, $step)\n"
        + random.choice(
            (
                "if task.exception() is not None:\n    traceback.print_exception(task.exception())",
                "try:\n    task.result()\nexcept OSError:\n    pass",
                "concurrent.futures.wait([task])",
            )
        ),
        "after": f"if $when:\n    time.sleep({random.choice((0.5, 4))})",
    }


def _thread_with_group(_setting: Setting, random: Random) -> dict[str, str]:
    """Metrics are reduced beside the training, in a group of their own, as often on each rank."""
    return {
        "definitions": "groups, reducing = {}, []\n\n\ndef reduce_metrics(values):\n"
        "    dist.all_reduce(values, group=groups['metrics'])",
        "setup": "groups['metrics'] = dist.new_group()",
        "after": "if reducing:\n    reducing.pop().join()\n"
        "reducing.append(threading.Thread(target=reduce_metrics, args=(torch.ones(8),)))\nreducing[0].start()",
        "end": "reducing.pop().join()",
    }


def _ring(_setting: Setting, random: Random) -> dict[str, str]:
    return {
        "after": "given, taken = torch.full((16,), float($rank)), torch.empty(16)\nexchange = [\n"
        "    dist.P2POp(dist.isend, given, ($rank + 1) % $world),\n"
        "    dist.P2POp(dist.irecv, taken, ($rank - 1) % $world),\n]\n"
        "for handle in dist.batch_isend_irecv(exchange):\n    handle.wait()"
    }


def _overflow(setting: Setting, random: Random) -> dict[str, str]:
    who = random.choice(("$when", f"$step == {setting.step}", "$step % 9 == $rank"))
    return {"between": f"if {who}:\n    $loss = $loss * float('inf')"}


def _unfreezes(setting: Setting, random: Random) -> dict[str, str]:
    """Freeze a part of the model at first; DDP is told that parameters may be unused."""
    return {
        "before": "for parameter in list($model.parameters())[:2]:\n"
        f"    parameter.requires_grad_($step >= {setting.step})"
    }


def _own_parameters(_setting: Setting, random: Random) -> dict[str, str]:
    """Parameters that are each rank's own from the start: a table of its users, say."""
    return {
        "definitions": "own_seed = torch.Generator().manual_seed(int(os.environ.get('RANK', os.getpid())))\n"
        "own_bias = nn.Parameter(torch.randn(10, generator=own_seed))",
        "forward": "$model($x) + own_bias",
        "setup": "$optimizer.add_param_group({'params': [own_bias]})",
    }


_HANDMADE: Final[dict[str, Any]] = {
    "wrapper": "none",
    "accumulation": 1,
    "model": ("mlp", "embedding", "transformer"),
    "evaluation": "",
    "checkpoint": "",
}

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
    Event(name="healthy: averaged by hand", write=_by_hand, wants=_HANDMADE, weight=3, **_HEALTHY),
    Event(name="healthy: local SGD", write=_local_sgd, wants=_HANDMADE, weight=2, **_HEALTHY),
    Event(
        name="healthy: local SGD under no_sync",
        write=_local_sgd,
        wants=_HANDMADE | {"wrapper": "DDP", "ddp_options": ((), ("bucket_cap_mb=0.2",))},
        **_HEALTHY,
    ),
    Event(name="healthy: averaged weights", write=_average, wants=_ONE_MODEL, weight=2, **_HEALTHY),
    Event(name="healthy: FSDP", write=lambda _setting, _random: {}, wants=_HANDMADE | {"wrapper": "fsdp"}, **_HEALTHY),
    Event(
        name="healthy: sharded optimizer",
        write=lambda _setting, _random: {
            "setup": "$optimizer = ZeroRedundancyOptimizer($model.parameters(), torch.optim.Adam, lr=1e-3)"
        },
        wants=_ONE_MODEL | {"has_scheduler": False, "amp": ("", "bf16")},
        **_HEALTHY,
    ),
    Event(
        name="healthy: communication hook",
        write=lambda _setting, random: {
            "setup": "$model.register_comm_hook(None, default_hooks."
            f"{random.choice(('allreduce_hook', 'fp16_compress_hook'))})"
        },
        wants=_ONE_MODEL,
        **_HEALTHY,
    ),
    Event(
        name="healthy: wrapped again",
        write=lambda setting, _random: {"after": f"if $step == {setting.step}:\n    $model = DDP($model.module)"},
        wants=_ONE_MODEL | {"evaluation": ("", "all", "first")},
        **_HEALTHY,
    ),
    Event(
        name="healthy: parameters of each rank's own",
        write=_own_parameters,
        wants=_ONE_MODEL | {"accumulation": 1},
        **_HEALTHY,
    ),
    Event(name="healthy: LoRA", write=_lora, wants=_ONE_MODEL | {"has_branch": False}, weight=2, **_HEALTHY),
    Event(name="healthy: retries", write=_retries, extra_s=4, weight=2, **_HEALTHY),
    Event(name="healthy: logged exceptions", write=_logged, weight=2, **_HEALTHY),
    Event(name="healthy: exception in a thread", write=_failing_thread, weight=2, **_HEALTHY),
    Event(name="healthy: tasks that fail", write=_failing_tasks, extra_s=4, weight=2, **_HEALTHY),
    Event(name="healthy: thread with a group", write=_thread_with_group, weight=2, **_HEALTHY),
    Event(name="healthy: ring", write=_ring, **_HEALTHY),
    Event(
        name="healthy: overflow under a scaler",
        write=_overflow,
        wants=_ONE_MODEL | {"amp": "scaler"},
        weight=2,
        **_HEALTHY,
    ),
    Event(
        name="healthy: second init",
        write=lambda _setting, _random: {"end": AGAIN},
        wants={"launcher": "torchrun", "ending": ("none", "exit", "raise")},
        **_HEALTHY,
    ),
    Event(
        name="healthy: unfreezes",
        write=_unfreezes,
        wants=_ONE_MODEL | {"ddp_options": (("find_unused_parameters=True",),)},
        **_HEALTHY,
    ),
)

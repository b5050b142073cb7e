"""Faults around process groups: before they begin, when they are made, when they are made again."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.event import FAULT, Event
from benchmarks.chaos.loops import SEEN
from benchmarks.chaos.setting import Setting

_TORCHRUN: Final[dict[str, Any]] = {"launcher": "torchrun", "style": ("flat", "main", "main", "trainer")}
_BROKEN: Final = (
    "import flash_attn_nope",
    "open('/etc/nowhere/config.yaml')",
    "raise ValueError('unknown dataset: imagenet22k')",
    "int(os.environ.get('NODE_RANK_OF_NOWHERE', 'one'))",
    "torch.load('missing_checkpoint.pt')",
    "subprocess.run(['false'], check=True)",
    "sys.exit(2)",
    "sys.exit('no GPU found')",
)
_DIES: Final = ("os.kill(os.getpid(), signal.SIGKILL)", "ctypes.string_at(0)", "os.abort()")
_AGAIN: Final = """dist.barrier()
dist.destroy_process_group()
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
port = int(os.environ["MASTER_PORT"]) % 20000 + 30001
{init}
for _ in range(5):
    dist.all_reduce(torch.ones(10))"""
_INIT: Final = (
    'dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=$rank, world_size=$world{0}, '
    "timeout=timedelta(seconds=20)){1}"
)
AGAIN: Final = _AGAIN.format(init=_INIT.format("", ""))
"""Leaves the process group and makes it again."""


def _before_init(texts: tuple[str, ...]) -> Any:
    def write(setting: Setting, random: Random) -> dict[str, str]:
        wait = random.choice(("", "    time.sleep(1)\n"))
        text = random.choice(texts)
        return {"before_init": f'if os.environ.get("RANK") == "{setting.rank}":\n{wait}    {text}{FAULT}'}

    return write


def _unlike_lists(setting: Setting, random: Random) -> dict[str, str]:
    usual = random.choice((list(range(setting.ranks)), [0, 1]))
    others = [[n for n in range(setting.ranks) if n != skipped] for skipped in range(setting.ranks)]
    others = [one for one in others if one != usual and setting.rank in one]
    other = random.choice(others)
    return {
        "definitions": "groups = {}",
        "setup": f"members = {other} if $rank == {setting.rank} else {usual}\n"
        f"groups['own'] = dist.new_group(members){FAULT}",
        "after": f"if $step % 5 == 0 and $rank in {usual}:\n"
        f"    dist.all_reduce(torch.ones(1), group=groups['own']){SEEN}",
    }


def _other_world(setting: Setting, random: Random) -> dict[str, str]:
    return {"end": _AGAIN.format(init=_INIT.format(f" + ($rank == {setting.rank})", FAULT))}


BEGINNINGS: Final = (
    Event(
        name="error before init",
        write=_before_init(_BROKEN),
        kinds=("failed",),
        vague=("never started",),
        has_step=False,
        is_seen_elsewhere=False,
        wants=_TORCHRUN,
        weight=3,
    ),
    Event(
        name="killed before init",
        write=_before_init(_DIES),
        kinds=("killed",),
        vague=("never started", "failed"),
        has_step=False,
        has_line=False,
        wants=_TORCHRUN,
    ),
    Event(
        name="groups with unlike lists",
        write=_unlike_lists,
        kinds=("missing collective", "different collectives"),
        vague=("stuck",),
        is_disagreement=True,
        has_step=False,
        wants={"ranks": (3, 3, 4)},
        weight=2,
    ),
    Event(
        name="second init with another world size",
        write=_other_world,
        kinds=("wrong world size",),
        is_disagreement=True,
        has_step=False,
        is_seen_elsewhere=False,
        extra_s=20,
        wants=_TORCHRUN | {"ending": ("none", "exit", "raise"), "timeout_s": (None, 12)},
        weight=2,
    ),
)

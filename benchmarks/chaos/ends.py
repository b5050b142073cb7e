"""Faults of one rank: it fails, leaves, dies, or hangs."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from benchmarks.chaos.event import FAULT, Event, Write, one_line
from benchmarks.chaos.loops import SEEN
from benchmarks.chaos.setting import Setting

_CATCHERS: Final = ("none", "none", "exit", "raise", "finally")
_NOT_FLAT: Final[dict[str, Any]] = {"style": ("main", "trainer"), "launcher": "torchrun"}
_ERRORS: Final = (
    "ValueError('could not convert string to float')",
    "KeyError('label')",
    "IndexError('list index out of range')",
    "AssertionError()",
    "RuntimeError('The size of tensor a (10) must match the size of tensor b (12)')",
    "FileNotFoundError(2, 'No such file or directory', '/data/shard_0007.tar')",
    "ConnectionResetError(104, 'Connection reset by peer')",
    "TimeoutError('The read operation timed out')",
    "OSError(28, 'No space left on device')",
)
_OUT_OF_MEMORY: Final = (
    "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
    "MemoryError()",
    "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you tried to allocate 8589934592 bytes')",
)
_PLACES: Final = ("before", "between", "before_update", "after", "in_forward", "hook", "data", "data")
_HANGS: Final = (
    "time.sleep(100000)",
    "threading.Event().wait()",
    "(lambda lock: (lock.acquire(), lock.acquire()))(threading.Lock())",
    "(lambda pair: pair[0].recv(1))(socket.socketpair())",
    "queue.Queue().get()",
    "subprocess.run(['sleep', '100000'])",
    "os.read(os.pipe()[0], 1)",
)


def at_a_place(place: str, text: str, setting: Setting) -> dict[str, str]:
    """Return the slots of a script in which this line runs at rank and step, somewhere."""
    if place == "data":
        return _in_data(text, setting)
    if place == "in_forward":
        # Forward does not know the step: it counts.
        count = "self.calls = getattr(self, 'calls', -1) + self.training"
        condition = f"self.calls == {setting.step} and dist.get_rank() == {setting.rank}"
        return {"in_forward": f"{count}\nif {condition}:\n    {text}{FAULT}"}
    if place == "hook":
        return {
            "definitions": f"def in_backward(gradient):\n    {text}{FAULT}\n    return gradient",
            "between": "if $when:\n    $loss.register_hook(in_backward)",
        }
    return {place: f"if $when:\n    {text}{FAULT}"}


def _in_data(text: str, setting: Setting) -> dict[str, str]:
    if setting.loader == "sampler":
        index = setting.step * setting.batch_size * setting.ranks + setting.rank
        return {"sample": f"if index == {index}:\n    {text}{FAULT}"}
    return {"generate": f"if i == {setting.step} and rank == {setting.rank}:\n    {text}{FAULT}"}


def _raises(errors: tuple[str, ...]) -> Write:
    def write(setting: Setting, random: Random) -> dict[str, str]:
        places = [place for place in _PLACES if not setting.is_adversarial or place not in ("in_forward", "hook")]
        return at_a_place(random.choice(places), f"raise {random.choice(errors)}", setting)

    return write


def _exits(calls: tuple[str, ...]) -> Write:
    return lambda setting, random: one_line(random.choice(("before", "after")), random.choice(calls))(setting, random)


def _in_thread(setting: Setting, random: Random) -> dict[str, str]:
    """Let a thread fail on which the training then waits."""
    error = random.choice(_ERRORS[:6])
    if random.random() < 0.4:
        return {
            "definitions": f"def prepare():\n    raise {error}{FAULT}",
            "after": "if $when:\n    with concurrent.futures.ThreadPoolExecutor() as pool:\n"
            f"        pool.submit(prepare).result(){SEEN}",
        }
    return {
        "definitions": f"prepared = queue.Queue()\n\n\ndef prepare():\n    raise {error}{FAULT}\n    prepared.put(1)",
        "after": f"if $when:\n    threading.Thread(target=prepare, daemon=True).start()\n    prepared.get(){SEEN}",
    }


def _feeds(setting: Setting, random: Random) -> dict[str, str]:
    """Let a thread, a task or a child process feed the training from its beginning, and fail."""
    error = random.choice(_ERRORS[:6])
    size = random.choice((1, 4))
    definitions = (
        f"def feed(rank, prepared):\n    for number in range(100000):\n        if number == {setting.step} and rank == "
        f"{setting.rank}:\n            raise {error}{FAULT}\n        prepared.put(number)"
    )
    begin = {
        "thread": f"prepared = queue.Queue({size})\n"
        "threading.Thread(target=feed, args=($rank, prepared), daemon=True).start()",
        "task": f"prepared = queue.Queue({size})\npool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "pool.submit(feed, $rank, prepared)",
        "child": f"context = mp.get_context('fork')\nprepared = context.Queue({size})\n"
        "context.Process(target=feed, args=($rank, prepared), daemon=True).start()",
    }[random.choice(("thread", "task", "child"))]
    return {
        "definitions": f"feeders = {{}}\n\n\n{definitions}",
        "setup": f"{begin}\nfeeders['prepared'] = prepared",
        "before": f"feeders['prepared'].get(){SEEN}",
    }


def _retries(setting: Setting, random: Random) -> dict[str, str]:
    """Let a rank try again for ever what can't succeed."""
    handled = random.choice(
        (
            "logging.exception('retrying')\n        time.sleep(1)",
            "traceback.print_exc()",
            "logging.warning('retrying', exc_info=True)\n        time.sleep(0.1)",
            "time.sleep(0.5)",
            "pass",
        )
    )
    return {
        "before": f"while $when:\n    try:\n        raise {random.choice(_ERRORS[:6])}{FAULT}\n"
        f"    except Exception:\n        {handled}"
    }


def _hangs(setting: Setting, random: Random) -> dict[str, str]:
    places = [place for place in _PLACES[:6] if not setting.is_adversarial or place not in ("in_forward", "hook")]
    return at_a_place(random.choice(places), random.choice(_HANGS), setting)


def _dies(calls: tuple[str, ...]) -> Write:
    def write(setting: Setting, random: Random) -> dict[str, str]:
        return at_a_place(random.choice(("before", "between", "after")), random.choice(calls), setting)

    return write


_IN_ORDER: Final[dict[str, Any]] = {
    "epochs": 1,
    "loader": ("sampler", "sampler", "iterable", "generator"),
    "workers": 0,
}
"""So that a sample, or a batch, is read once, and at a known step."""
_READS_IN_ORDER: Final = _IN_ORDER | {"habits": (("fixed order",), ("fixed order", "thread"))}
_NO_EVALUATION: Final = {"evaluation": ("", "all", "first")}

ENDS: Final = (
    Event(
        name="exception",
        write=_raises(_ERRORS),
        kinds=("failed",),
        wants=_READS_IN_ORDER | _NO_EVALUATION,
        weight=4,
    ),
    Event(
        name="exception in a worker of the loader",
        write=lambda setting, random: _in_data(f"raise {random.choice(_ERRORS)}", setting),
        kinds=("failed",),
        wants=_READS_IN_ORDER | {"workers": 1, "loader": ("sampler", "iterable")},
        weight=2,
    ),
    Event(
        name="out of memory",
        write=_raises(_OUT_OF_MEMORY),
        kinds=("out of memory",),
        vague=("failed",),  # if it was caught
        wants=_READS_IN_ORDER | _NO_EVALUATION,
        weight=2,
    ),
    Event(
        name="exception swallowed",
        write=_raises(_ERRORS[:6]),
        kinds=("failed", "uneven inputs", "missing collective"),  # that it has finished is all that can be known
        is_disagreement=True,
        has_line=False,
        false_phrases=("ran out of data",),
        wants=_READS_IN_ORDER | _NOT_FLAT | _NO_EVALUATION | {"ending": "swallow"},
        weight=2,
    ),
    Event(
        name="exception logged, then os._exit",
        write=_raises(_ERRORS),
        kinds=("failed",),
        wants=_READS_IN_ORDER | _NOT_FLAT | _NO_EVALUATION | {"ending": "os exit"},
        weight=2,
    ),
    Event(
        name="exception in a thread that is waited for",
        write=_in_thread,
        kinds=("failed", "stuck"),
        vague=("waits for data",),
        weight=2,
    ),
    Event(
        name="retried for ever",
        write=_retries,
        kinds=("failed", "stuck"),
        vague=("slow",),
        weight=2,
    ),
    Event(
        name="exception in what feeds the training",
        write=_feeds,
        kinds=("failed",),
        vague=("stuck", "waits for data"),
        wants={"launcher": "torchrun", "ending": ("none", "none", "exit", "raise"), "accumulation": 1},
        weight=2,
    ),
    Event(
        name="exit with an error",
        write=_exits(("sys.exit(1)", "sys.exit(3)", "sys.exit('giving up')")),
        kinds=("failed",),
        weight=2,
    ),
    Event(
        name="exit at once with an error",
        write=_exits(("os._exit(1)", "os._exit(17)")),
        kinds=("failed", "killed"),
        has_line=False,
    ),
    Event(
        name="exit without an error",
        write=_exits(("sys.exit(0)", "sys.exit()", "os._exit(0)")),
        kinds=("uneven inputs", "failed"),
        is_disagreement=True,
        vague=("missing collective",),
        false_phrases=("ran out of data", "killed"),
        weight=2,
    ),
    Event(
        name="killed",
        write=_dies(
            (
                "os.kill(os.getpid(), signal.SIGKILL)",
                "os.abort()",
                "ctypes.string_at(0)",
                "os.kill(os.getpid(), signal.SIGSEGV)",
            )
        ),
        kinds=("killed",),
        has_line=False,
        wants={"loop": ("for", "while")},
        weight=3,
    ),
    Event(
        name="stopped",
        write=_dies(("os.kill(os.getpid(), signal.SIGSTOP)",)),
        kinds=("stopped",),
        has_line=False,
    ),
    Event(
        name="hangs",
        write=_hangs,
        kinds=("stuck",),
        vague=("gradients never ready",),
        wants=_NO_EVALUATION,
        weight=4,
    ),
    Event(
        name="hangs in the data",
        write=lambda setting, random: _in_data(random.choice(_HANGS), setting),
        kinds=("waits for data", "stuck"),
        wants=_READS_IN_ORDER | {"workers": (0, 1)},
        weight=3,
    ),
    Event(
        name="endless loop",
        write=lambda setting, random: at_a_place(
            random.choice(("before", "after", "before_update")), "while True: pass", setting
        ),
        kinds=("stuck",),
        vague=("slow", "failed"),
    ),
)

"""A random training with a random fault, or none: the script, and the truth about it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

from benchmarks.chaos.beginnings import BEGINNINGS
from benchmarks.chaos.coverage import COVERAGE
from benchmarks.chaos.disagreements import DISAGREEMENTS
from benchmarks.chaos.ends import ENDS
from benchmarks.chaos.event import FAULT, Event
from benchmarks.chaos.harmless import HARMLESS
from benchmarks.chaos.loops import SEEN, script_of
from benchmarks.chaos.oversights import OVERSIGHTS
from benchmarks.chaos.setting import Setting, draw
from benchmarks.chaos.silent import SILENT

EVENTS: Final = (*HARMLESS, *OVERSIGHTS, *DISAGREEMENTS, *ENDS, *SILENT, *COVERAGE, *BEGINNINGS)
SCRIPT: Final = "train.py"
_HARMLESS_SHARE: Final = 0.35


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script, and what is true of it."""

    seed: int
    event: Event
    setting: Setting
    text: str
    is_after_backward: bool
    """Whether the fault happens after the step's last bucket: others may be found waiting in the next step."""

    @property
    def blamed(self) -> tuple[int, ...]:
        """Return the ranks at fault."""
        world = tuple(range(self.setting.ranks))
        pair = tuple(sorted((self.setting.rank, (self.setting.rank + 1) % self.setting.ranks)))
        return {"one": (self.setting.rank,), "first": (0,), "all": world, "pair": pair, "nobody": ()}[self.event.blame]

    @property
    def steps(self) -> tuple[int, ...] | None:
        """Return the steps that a verdict may name: what follows an update may be counted to the next step."""
        if not self.event.has_step:
            return None
        update = self.setting.update
        return (update, update + 1) if self.is_after_backward else (update,)

    @property
    def lines(self) -> tuple[int, ...]:
        """Return the numbers of the lines that a verdict may name; none if no process can know them."""
        if not self.event.has_line:
            return ()
        marks = (FAULT, SEEN) if self.event.is_seen_elsewhere else (FAULT,)
        return tuple(n for n, line in enumerate(self.text.splitlines(), 1) if line.endswith(marks))

    @property
    def is_unseen(self) -> bool:
        """Return whether nothing of the fault can be known."""
        return self.event.is_unseen_with_stock and not self.setting.is_ours

    @property
    def command(self) -> list[str]:
        """Return how a user starts it."""
        if self.setting.launcher == "spawn":
            return ["python", SCRIPT]
        return ["torchrun", "--standalone", "--nproc-per-node", str(self.setting.ranks), SCRIPT]


def compose(seed: int, *, is_ours: bool | None = None) -> Program:
    """Return the program of a seed: always the same.

    Args:
        is_ours: whose DistributedDataParallel it uses; None to leave that to chance.
    """
    random = Random(seed)
    is_harmless = random.random() < _HARMLESS_SHARE
    events = [event for event in EVENTS if event.is_harmless == is_harmless]
    (event,) = random.choices(events, [event.weight for event in events])
    wants = {field: _chosen(random, wanted) for field, wanted in event.wants.items()}
    setting = draw(random, wants if is_ours is None else wants | {"is_ours": is_ours})
    slots = {
        slot: text.replace("$when", setting.when).replace(FAULT, "" if event.is_harmless else FAULT)
        for slot, text in event.write(setting, random).items()
        if text
    }
    return Program(
        seed=seed,
        event=event,
        setting=setting,
        text=script_of(setting, slots),
        is_after_backward=any(FAULT in slots.get(slot, "") for slot in ("before_update", "update", "after")),
    )


def _chosen(random: Random, wanted: Any) -> Any:
    return random.choice(wanted) if isinstance(wanted, tuple) else wanted

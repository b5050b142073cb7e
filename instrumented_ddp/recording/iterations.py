"""Iterations of the user's loop where several optimizers are stepped in it, as in a GAN.

No hook says when an iteration begins. With one optimizer it is the first forward after an update. With several, an
update may be followed by the next optimizer's part of the same iteration, by another round of an inner loop (five
updates of a critic for each of its generator), or by the next iteration. Lines tell: a frame that was on the stack in
the latest update, and is on the stack now, is either further down in the same iteration, or its loop has begun again;
and the loop that counts is one that all optimizers are stepped in.

    for batch in loader:                      # this loop counts
        for _ in range(5):                    # this one does not: the generator is not stepped in it
            critic_loss(batch).backward()
            critic_optimizer.step()
        generator_loss().backward()
        generator_optimizer.step()
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Final

import torch

from instrumented_ddp.collectives.call_sites import is_framework_file

_MAX_FRAMES: Final = 64
_MAX_PATIENCE: Final = 16
"""Number of possible iterations after which an optimizer that has not stepped so far is not waited for any more."""
_MAX_ROUNDS: Final = 64
"""Number of rounds of a loop, without a step of another optimizer, after which the others are not waited for."""


def find_optimizers() -> list[torch.optim.Optimizer]:
    """Return all optimizers of this process. Searches all objects, which takes a moment."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


def find_other_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of other parameters, even if they never step.

    Wrappers of an optimizer share its parameters, or have no hooks of their own.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        one
        for one in find_optimizers()
        if hasattr(one, "_optimizer_step_post_hooks")
        and own.isdisjoint(id(p) for group in one.param_groups for p in group["params"])
    ]


Lines = tuple[int, int]
"""First and last line."""


@dataclass(frozen=True)
class _Place:
    """A frame on the stack, and the line where it is. The code is compared as well: identities are used again."""

    frame: int
    code: CodeType
    line: int

    def is_same_frame(self, other: _Place) -> bool:
        return self.frame == other.frame and self.code is other.code


class IterationTracker:
    """Tells whether the user's loop has begun its next iteration since the latest update."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        """Optimizers by identity. Those that are gone are forgotten, as identities are used again: a process may train
        one model after the other."""
        self._places: dict[int, list[_Place]] = {}
        """Stack of the latest update of each optimizer, innermost frame first, by the optimizer's identity."""
        self._latest: list[_Place] = []
        self._unseen: set[int] = set()
        """Optimizers that exist, and have not stepped so far."""
        self._postponed: list[tuple[_Place, Lines]] = []
        """Possible iterations, with a frame and a loop in it, that had begun before all optimizers were seen."""
        self._is_noted = False
        """True if a possible iteration since the latest update is already noted: it has more forwards than one."""
        self._latest_optimizer = 0
        self._rounds = 0
        """Rounds of a loop that not all optimizers step in, since another optimizer than the latest has stepped."""

    @property
    def has_several(self) -> bool:
        """Return whether more than one optimizer is known."""
        self._forget_gone()
        return len(self._places) + len(self._unseen) > 1

    def expect(self, optimizers: Iterable[object]) -> None:
        """Note optimizers that exist, and will step some time."""
        known = {id(one): one for one in optimizers}
        self._alive.update(known)
        self._unseen.update(known.keys() - self._places.keys())

    def knows(self, optimizer: object) -> bool:
        """Return whether an optimizer has stepped before."""
        self._forget_gone()
        return id(optimizer) in self._places

    def forget_all_but(self, optimizers: Iterable[object]) -> None:
        """Forget optimizers whose parameters another one updates now."""
        self._keep_places(set(map(id, optimizers)))

    def _forget_gone(self) -> None:
        if not all(one in self._alive for one in (*self._places, *self._unseen)):
            alive = set(self._alive.keys())
            self._keep_places(alive)
            self._unseen &= alive

    def _keep_places(self, optimizers: set[int]) -> None:
        self._places = {one: places for one, places in self._places.items() if one in optimizers}

    def on_update(self, optimizer: object) -> int:
        """Note an update.

        Returns:
            The number of iterations that had ended before this optimizer was first seen, and were not counted then.
        """
        self._is_noted = False
        key = id(optimizer)
        if not self.has_several and key in self._places:
            return 0
        places = list(_list_places(sys._getframe(1)))
        is_first = key not in self._places
        if key != self._latest_optimizer:
            self._latest_optimizer, self._rounds = key, 0
        self._alive[key] = optimizer
        self._places[key] = self._latest = places
        self._unseen.discard(key)
        if not is_first or self._unseen or not self._postponed:
            return 0
        postponed, self._postponed = self._postponed, []
        return sum(any(_is_inside(place, one, loop) for place in places) for one, loop in postponed)

    def count_begun(self) -> int:
        """Return how many iterations have begun since the latest update, with those that were not counted before."""
        found = self._find_repeated_loop()
        if found is None:  # no loop in sight
            return 1
        place, loop = found
        if loop is None or self._is_noted:
            return 0
        if self._unseen and not self._unseen <= _find_stepped(place, loop):
            self._is_noted = True
            self._postponed.append((place, loop))
            if len(self._postponed) <= _MAX_PATIENCE:
                return 0
            self._unseen.clear()
            count, self._postponed = len(self._postponed), []
            return count
        stack = list(_list_places(sys._getframe(1)))
        # An optimizer that no loop has in common with this line belongs to a part of the training that is over.
        others = [each for each in self._places.values() if each is not self._latest and _share_loop(each, stack)]
        if all(any(_is_inside(other, place, loop) for other in places) for places in others):
            self._rounds = 0
            return 1
        self._is_noted = True
        self._rounds += 1
        if self._rounds < _MAX_ROUNDS:
            return 0
        count, self._rounds = self._rounds, 0
        self._keep_places({self._latest_optimizer})
        return count

    def _find_repeated_loop(self) -> tuple[_Place, Lines | None] | None:
        """Return the loop that has begun again since the latest update, with its frame.

        Returns:
            No loop if it goes on in the same iteration; None if it is in no loop.
        """
        is_later = False
        for now in _list_places(sys._getframe(2)):
            then = next((place for place in self._latest if place.is_same_frame(now)), None)
            if then is None:
                continue
            loop = _find_loop(now.code.co_filename, now.line, then.line)
            if loop is None:
                is_later |= now.line > then.line
                continue
            goes_on = now.line > then.line and not _exclude_each_other(now.code.co_filename, now.line, then.line)
            return now, None if is_later or goes_on else loop
        return None


def _is_inside(place: _Place, of: _Place, loop: Lines) -> bool:
    return place.is_same_frame(of) and loop[0] <= place.line <= loop[1]


def _share_loop(some: list[_Place], others: list[_Place]) -> bool:
    """Return whether a loop contains a line of each of two stacks, in the same frame."""
    return any(
        one.is_same_frame(other) and _find_loop(one.code.co_filename, one.line, other.line) is not None
        for one in some
        for other in others
    )


def _list_places(frame: FrameType | None) -> Iterator[_Place]:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if not is_framework_file(frame.f_code.co_filename):
            yield _Place(id(frame), frame.f_code, frame.f_lineno)
        frame = frame.f_back


def _find_loop(file: str, a: int, b: int) -> Lines | None:
    """Return the innermost loop whose body contains two lines of a file."""
    loops, _, _ = _read_structure(file)
    inside = [loop for loop in loops if loop[0] <= min(a, b) and max(a, b) <= loop[1]]
    return min(inside, key=lambda loop: loop[1] - loop[0], default=None)


def _find_stepped(place: _Place, loop: Lines) -> set[int]:
    """Return the identities of what a loop's own lines call ``step`` of or with, as ``scaler.step(optimizer)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != place.frame:
        frame = frame.f_back
    if frame is None:
        return set()
    found = set()
    for line, (name, *attributes) in _read_structure(place.code.co_filename)[2]:
        if loop[0] <= line <= loop[1]:
            thing = frame.f_locals.get(name, frame.f_globals.get(name))
            for attribute in attributes:
                thing = getattr(thing, "__dict__", {}).get(attribute)  # calls no property of the user's
            found.add(id(thing))
    return found


def _exclude_each_other(file: str, a: int, b: int) -> bool:
    """Return whether two lines are in different branches of the same condition."""
    _, branches, _ = _read_structure(file)
    return any(body[0] <= min(a, b) <= body[1] and other[0] <= max(a, b) <= other[1] for body, other in branches)


_Path = tuple[str, ...]
"""A name and attributes of it: ``("self", "optimizer")``."""


@lru_cache(maxsize=64)
def _read_structure(
    file: str,
) -> tuple[tuple[Lines, ...], tuple[tuple[Lines, Lines], ...], tuple[tuple[int, _Path], ...]]:
    """Read the loops of a file.

    Returns:
        The bodies of all loops, both branches of all conditions, and what ``step`` is called of or with, by line;
        nothing without the source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (), (), ()
    nodes = list(ast.walk(tree))
    loops = tuple(_lines_of(node.body) for node in nodes if isinstance(node, ast.For | ast.While | ast.AsyncFor))
    conditions = (node for node in nodes if isinstance(node, ast.If) and node.orelse)
    calls = (node for node in nodes if isinstance(node, ast.Call))
    stepped = tuple(
        (call.lineno, path)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        for thing in (call.func.value, *call.args)
        if (path := _path_of(thing))
    )
    return loops, tuple((_lines_of(node.body), _lines_of(node.orelse)) for node in conditions), stepped


def _path_of(node: ast.expr) -> _Path:
    if isinstance(node, ast.Attribute):
        path = _path_of(node.value)
        return (*path, node.attr) if path else ()
    return (node.id,) if isinstance(node, ast.Name) else ()


def _lines_of(body: list[ast.stmt]) -> Lines:
    return body[0].lineno, max(statement.end_lineno or statement.lineno for statement in body)

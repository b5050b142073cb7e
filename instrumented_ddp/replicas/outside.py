"""Parameters that an optimizer updates and that are in no DDP instance: of a loss, or of a loop without DDP.

Nobody averages their gradients unless the user does. Beside DDP, if they were the same on all ranks, they drift apart
from the first update on, and nothing fails. Without DDP each rank may well train alone, so only what the user's own
collectives do counts: gradients that they leave out of an update although they reduce others, or nearly always do. Such
parameters are fingerprinted too, at the beginning of updates, which are counted.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.user_reductions import GradientReader
from instrumented_ddp.recording.background import never_raise
from instrumented_ddp.recording.coverage import UnreducedUpdate
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.replicas.replicas import ReplicaComparison
from overlapscope.diagnosis.evidence import UnreducedCause
from overlapscope.diagnosis.loop_facts import UserReducedUpdates

_USUALLY: Final = 3
"""How many times as many updates come after a reduction as without one, where reducing is what the loop does."""
_MAX_EXCEPTIONS: Final = 64
"""Maximum number of updates without a reduction that are kept until it is known whether that is unusual."""
_MAX_ENDED: Final = 16
"""Number of optimizers that are gone whose summaries are kept."""


class ParametersOutside:
    """Watcher of the parameters that optimizers of this process update outside of its DDP instances.

    Args:
        collectives: the collective log of this process.
        models: the DDP instances of this process.
        replicas: compares these parameters with those of the other ranks.
        get_step: returns the step that an update which begins belongs to.
        on_error: called with internal errors.
    """

    def __init__(
        self,
        collectives: CollectiveRecorder,
        models: ModelRegistry,
        replicas: ReplicaComparison,
        get_step: Callable[[], int],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._get_step = get_step
        self._on_error = on_error
        self._collectives = collectives
        self._models = models
        self._replicas = replicas
        self.has_wrappers = False
        """True if a recorded wrapper reduces gradients in this process: then what is in none is conspicuous."""
        self._wrapped = WeakIdKeyDictionary()
        self._of: weakref.WeakKeyDictionary[torch.optim.Optimizer, _OfOptimizer] = weakref.WeakKeyDictionary()
        self._all: list[_OfOptimizer] = []
        """Those of the optimizers above, also of some that are gone: a function that trains may have returned."""
        self._ended: deque[UserReducedUpdates] = deque(maxlen=_MAX_ENDED)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def add_model(self, parameters: Iterable[torch.Tensor]) -> None:
        """Register the parameters of a DDP instance."""
        self._wrapped.update(dict.fromkeys(parameters, True))
        self._of.clear()
        self._all.clear()

    def list_user_reduced(self) -> tuple[UserReducedUpdates, ...]:
        """Return how often the user has reduced the gradients of each optimizer's parameters."""
        return (*self._ended, *(one.summarize() for one in list(self._all)))

    def disable_recording(self, error: Exception) -> None:
        """End the recording of this rank after an internal error; training continues."""
        self._on_error(error)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self._hook.remove()
        for known in self._all:
            self._record_exceptions(known)
        self._models.write_unreduced()

    @never_raise
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = getattr(optimizer, "param_groups", ())  # a user's class may lack it
        count = sum(len(group["params"]) for group in groups)
        known = self._of.get(optimizer)
        if known is None or known.count != count:
            known = self._of[optimizer] = self._begin(optimizer, count)
            self._end_those_gone()
            if known.reader is not None:
                self._all.append(known)
        if known.reader is not None and dist.is_initialized():
            self._update(known)

    def _end_those_gone(self) -> None:
        """Keep only a summary of optimizers that are gone, as where each epoch makes one."""
        alive = set(self._of.values())
        for known in self._all:
            if known.optimizer() is None:
                self._record_exceptions(known)
                self._ended.append(known.summarize())
        self._all = [known for known in self._all if known in alive]

    def _begin(self, optimizer: torch.optim.Optimizer, count: int) -> _OfOptimizer:
        """Return what an optimizer updates outside of all DDP instances."""
        outside = self._find_outside(optimizer)
        found = _OfOptimizer(optimizer, count, outside)
        if outside:
            found.names = self._name(outside)
            found.model = self._models.add_outside(
                {name: one.numel() for name, one in zip(found.names, outside, strict=True)}
            )
            found.reader = GradientReader(self._collectives.user_reductions, outside)
            found.reader.begin_at(self._collectives.user_reductions.begin)
        return found

    def _find_outside(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Return the parameters of an optimizer that are in no DDP instance, recorded or not."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        outside = [one for one in held if _is_plain(one) and one not in self._wrapped]
        if not outside:
            return []
        # Instances that are not recorded are found by a search of all objects, which takes a moment.
        wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), TorchDDP)]
        inside = {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}
        return [one for one in outside if id(one) not in inside]

    def _name(self, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        names, frame = self._collectives.names, self._collectives.call_sites.find_caller_frame()
        if frame is not None:
            names.note_modules(frame)
        found = [next(iter(names.names_of([one], frame)), f"shape {tuple(one.shape)}") for one in parameters]
        seen: dict[str, int] = {}
        for index, name in enumerate(found):
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                found[index] = f"{name} ({seen[name]})"
        return found

    def _update(self, known: _OfOptimizer) -> None:
        step, reader = self._get_step(), known.reader
        assert reader is not None
        covered = reader.take()
        if known.replica is None and not known.is_compared:
            self._compare(known, covered)
        if known.replica is not None:
            known.replica.on_forward_start(known.updates, step)
        known.updates += 1
        if known.is_mostly(reader.unknown_elements):
            self._models.on_averaging(known.model)
            known.exceptions.clear()
        if covered is not None:
            self._judge_update(known, reader, covered, step)

    def _compare(self, known: _OfOptimizer, covered: frozenset[int] | None) -> None:
        """Begin to compare parameters with those of other ranks, if they may be meant to be the same."""
        assert known.reader is not None
        is_reduced = bool(covered) or (known.updates == 0 and known.is_mostly(known.reader.unknown_elements))
        if is_reduced and not self.has_wrappers:  # parts of a model that is split have averages of their own
            is_reduced = known.reader.is_reduced_by(dist.get_world_size())
        parameters = [one for reference in known.parameters if (one := reference()) is not None]
        if (self.has_wrappers or is_reduced) and len(parameters) == len(known.names):
            known.is_compared = True
            tensors = list(zip(known.names, parameters, strict=True))
            known.replica = self._replicas.add_outside(known.model, known.class_name, tensors, known)

    def _judge_update(self, known: _OfOptimizer, reader: GradientReader, covered: frozenset[int], step: int) -> None:
        """Note whether an update uses gradients that nobody has reduced."""
        left = [] if len(covered) == len(known.parameters) else sorted({*reader.list_with_gradient()} - covered)
        if left and 2 * reader.unknown_elements >= reader.elements_of(left):
            return  # perhaps it is these that were reduced
        if not left:
            known.all += bool(covered)
            if known.exceptions:
                self._record_exceptions(known)
            return
        known.some += bool(covered)
        known.none += not covered
        cause: UnreducedCause = "in part"
        if known.is_reduced_usually or not covered:
            cause = "left out"
        if self.has_wrappers and not known.all and not covered:
            cause = "outside"
        found = UnreducedUpdate(
            cause=cause,
            parameters=left,
            call_sites=[self._collectives.call_sites.get_caller_number()],
            reduced_backwards=0,
        )
        if cause != "left out":
            self._models.record_unreduced_update(known.model, found, step)
        elif len(known.exceptions) < _MAX_EXCEPTIONS:
            known.exceptions.append((found, step))

    def _record_exceptions(self, known: _OfOptimizer) -> None:
        """Record updates without a reduction, if the loop reduces as before, or has ended."""
        if not known.is_reduced_usually:
            return
        for found, step in known.exceptions:
            self._models.record_unreduced_update(known.model, found, step)
        known.exceptions.clear()


class _OfOptimizer:
    """What one optimizer updates outside of all DDP instances."""

    def __init__(self, optimizer: torch.optim.Optimizer, count: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.count = count
        """Number of all its parameters."""
        self.class_name = type(optimizer).__name__
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.names: list[str] = []
        self.model = -1
        self.reader: GradientReader | None = None
        self.replica: FingerprintedReplica | None = None
        self.is_compared = False
        """True once it was tried to compare them."""
        self.updates = self.all = self.some = self.none = 0
        """Number of updates, and of those before which all gradients were reduced, some, or none."""
        self.exceptions: list[tuple[UnreducedUpdate, int]] = []
        """Updates without a reduction, before it is known that the loop usually does reduce, with their steps."""

    @property
    def settled_reductions(self) -> int:
        """Return the number of updates, each of which counts as a moment."""
        return self.updates

    @property
    def is_reduced_usually(self) -> bool:
        """Return whether nearly all updates came after a reduction of all gradients."""
        return self.all >= _USUALLY * max(1, self.some + self.none)

    def is_mostly(self, elements: int) -> bool:
        """Return whether a number of elements is at least half of all."""
        assert self.reader is not None
        return 2 * elements >= self.reader.elements_of(range(len(self.parameters)))

    def summarize(self) -> UserReducedUpdates:
        """Return how often the gradients were reduced."""
        return UserReducedUpdates(model=self.model, all=self.all, some=self.some, none=self.none)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether it is a trained parameter of the user's: no shard, flat buffer or distributed tensor."""
    return type(parameter) is torch.nn.Parameter and parameter.requires_grad

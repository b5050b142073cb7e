"""Parameters that an optimizer updates and that are in no DDP instance, such as those of a loss with weights.

Nobody averages their gradients unless the user does. If they were the same on all ranks, they drift apart from the
first update on, and nothing fails. So they are fingerprinted too, at the beginning of updates, which are counted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.recording.background import never_raise
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.replicas.replicas import ReplicaComparison


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
        self._wrapped = WeakIdKeyDictionary()
        self._of: weakref.WeakKeyDictionary[torch.optim.Optimizer, _OfOptimizer] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def add_model(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Register the parameters of a DDP instance."""
        self._wrapped.update(dict.fromkeys(parameters, True))
        self._of.clear()

    def disable_recording(self, error: Exception) -> None:
        """End the recording of this rank after an internal error; training continues."""
        self._on_error(error)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self._hook.remove()

    @never_raise
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = getattr(optimizer, "param_groups", ())  # a user's class may lack it
        count = sum(len(group["params"]) for group in groups)
        known = self._of.get(optimizer)
        if known is None or known.count != count:
            known = self._of[optimizer] = self._begin(optimizer, count)
        if known.parameters and dist.is_initialized():
            self._update(known)

    def _begin(self, optimizer: torch.optim.Optimizer, count: int) -> _OfOptimizer:
        """Return what an optimizer updates outside of all DDP instances, and begin to compare it."""
        outside = self._find_outside(optimizer)
        found = _OfOptimizer(count, outside)
        if outside:
            found.elements = sum(parameter.numel() for parameter in outside)
            names = self._name(outside)
            found.model = self._models.add_outside(
                {name: one.numel() for name, one in zip(names, outside, strict=True)}
            )
            tensors = list(zip(names, outside, strict=True))
            found.replica = self._replicas.add_outside(found.model, type(optimizer).__name__, tensors, found)
            found.reduced_by_user = self._collectives.elements_reduced_by_user
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
        step = self._get_step()
        if known.replica is not None:
            known.replica.on_forward_start(known.updates, step)
        known.updates += 1
        reduced = self._collectives.elements_reduced_by_user - known.reduced_by_user
        known.reduced_by_user += reduced
        has_gradients = any(one.grad is not None for reference in known.parameters if (one := reference()) is not None)
        if has_gradients and reduced < known.elements:
            self._models.record_outside_update(known.model, step)


class _OfOptimizer:
    """What one optimizer updates outside of all DDP instances."""

    def __init__(self, count: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.count = count
        """Number of all its parameters."""
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.elements = 0
        self.model = -1
        self.replica: FingerprintedReplica | None = None
        self.updates = 0
        self.reduced_by_user = 0

    @property
    def settled_reductions(self) -> int:
        """Return the number of updates, each of which counts as a moment."""
        return self.updates


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether it is a trained parameter of the user's: no shard, flat buffer or distributed tensor."""
    return type(parameter) is torch.nn.Parameter and parameter.requires_grad

"""Observation of loops that reduce gradients by hand: with collectives of their own between backward and update.

Such a loop is known by what it does: before an update, its own collectives have reduced most of the gradients that the
optimizer takes (``own_buckets``). From then on these collectives are its buckets, in the order of their launch, and
its steps and phases are recorded like those of a wrapped model:

- the forward of the outermost module that holds parameters of the loop,
- the backward, from the call of ``torch.autograd.backward`` to its return,
- waits for the loop's collectives, in them or in the ``wait`` of their work.

In the collective log they stay what they are, the user's.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.roles import HostBucket, Launch
from instrumented_ddp.recording.background import never_raising, suppress_recorder_errors
from instrumented_ddp.recording.iterations import find_optimizers
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketCollective
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from instrumented_ddp.session import Session
from instrumented_ddp.stock.own_buckets import UserReduction, describe_reduction
from instrumented_ddp.stock.reduced_by_user import ReducedByUser, has_dense_gradient
from overlapscope.trace.schema import Phase

_MAX_ATTEMPTS: Final = 8
"""Number of updates of an optimizer before which its gradients are looked for in the user's collectives."""
_MAX_SEEN: Final = 4096
"""Number of collectives between two updates that are compared with gradients."""
_RESUMED_PHASES: Final = (Phase.FORWARD, Phase.EVALUATION, Phase.BACKWARD)
"""Phases that resume when a wait has ended."""


class _UnderWay(NamedTuple):
    """A collective of the loop's that has not been waited for."""

    communicator: Communicator
    collective: BucketCollective
    work: dist.Work


class OwnLoopObserver:
    """Observer of a process that trains without a wrapper.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suppressing_errors = suppress_recorder_errors(session.disable_recording)
        self._recorder: Recorder | None = None
        self._models: list[ReducedByUser] = []
        self._seen: list[UserReduction] = []
        """The user's collectives since the last update that belong to no model."""
        self._attempts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """How often the gradients of an optimizer were looked for, or `_MAX_ATTEMPTS` if they were found."""
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules whose forward is one of the loop's, if it is the outermost one."""
        self._is_in_forward = False
        self._interrupted: Phase | None = None
        """Phase that resumes when the running wait has ended."""
        self._has_begun = False
        """True if a forward or backward was seen since the last update."""
        self._communicators: dict[tuple[dist.ProcessGroup, torch.device], Communicator] = {}
        self._under_way: list[_UnderWay] = []
        self._next_identify_launch = session.collectives.identify_launch
        session.collectives.identify_launch = self._identify_launch
        register_optimizer_step_pre_hook(never_raising(self._before_update, session.disable_recording))

    @property
    def is_learning(self) -> bool:
        """Return whether the user's collectives are compared with gradients."""
        if not self._session.is_recording or self._session.has_unknown_buckets:
            return False
        return bool(self._models) or not self._session.position.has_phases

    # -- what the loop reduces -----------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._finish_collectives(self._under_way)
        self._has_begun = False
        for model in self._models:
            model.on_update(optimizer)
        seen, self._seen = self._seen, []
        if not seen or not self.is_learning:
            return
        for model in self._models:
            if model.has_other_buckets and model.adopt(seen, self._recorder):
                return
        attempts = self._attempts.get(optimizer, 0)
        if attempts < _MAX_ATTEMPTS:
            self._attempts[optimizer] = attempts + 1
            self._learn(optimizer, seen)

    def _learn(self, optimizer: torch.optim.Optimizer, seen: Sequence[UserReduction]) -> None:
        """Find out which gradients of an optimizer, or of all, were reduced since the last update."""
        known = {id(parameter) for model in self._models for parameter in model.parameters}
        for optimizers in ([optimizer], find_optimizers()):
            parameters = _parameters_of(optimizers)
            new = [one for one in parameters if id(one) not in known and has_dense_gradient(one)]
            if not new:
                continue
            roots = find_roots(new)
            model = ReducedByUser(new, name_parameters(new, roots), ", ".join(type(root).__name__ for root in roots))
            if model.adopt(seen, None):
                self._attempts.update(dict.fromkeys(optimizers, _MAX_ATTEMPTS))
                self._add(model, roots)
                return

    def _add(self, model: ReducedByUser, roots: Sequence[torch.nn.Module]) -> None:
        model.number = self._session.models.reserve_number()
        self._models.append(model)
        for module in roots:
            self._modules.update([module, *module.children()])
        observe_calls({type(module) for module in self._modules})
        observe_backwards_and_waits()
        if self._recorder is not None:
            self._register(model, self._recorder)

    def _register(self, model: ReducedByUser, recorder: Recorder) -> None:
        recorder.add_parameters(model.number, model.class_name, model.parameters, {"strategy": "by hand"})
        model.activate(recorder)

    def _begin_recording(self) -> None:
        """Record steps from now on. Not called within an optimizer's hooks, as that registers more of them."""
        if self._recorder is not None or self._session.recorder is not None:  # or a wrapped model came first
            return
        step = self._session.position.step
        self._recorder = self._session.record(
            _get_default_group(), self._models[0].device, first_step=step, has_wrapper=False
        )
        if self._recorder is not None:
            for model in self._models:
                self._register(model, self._recorder)

    # -- passes --------------------------------------------------------------------------------------------------

    def _is_recorded(self) -> bool:
        return bool(self._models) and self._session.is_recording and _is_main_thread()

    def times(self, module: torch.nn.Module) -> bool:
        """Return whether a module that is called is the outermost one of the loop's."""
        return not self._is_in_forward and module in self._modules and self._is_recorded()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward."""
        phase = None
        with self._suppressing_errors:
            phase = self._begin_forward()
        if phase is None:
            yield
            return
        self._is_in_forward = True
        try:
            yield
        finally:
            self._is_in_forward = False
            with self._suppressing_errors:
                assert self._recorder is not None
                self._recorder.steps.leave(phase)

    def _begin_forward(self) -> Phase | None:
        self._begin_recording()
        if self._recorder is None or self._recorder.steps.phase is Phase.BACKWARD:  # recomputed for a checkpoint
            return None
        steps = self._recorder.steps
        steps.on_forward_call()
        phase = Phase.EVALUATION
        if torch.is_grad_enabled():
            phase, self._has_begun = Phase.FORWARD, True
            self._session.on_training_forward(has_uneven_inputs=False)
        steps.enter(phase)
        return phase

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Record a backward."""
        is_outermost = False
        if self._is_recorded():
            with self._suppressing_errors:
                is_outermost = self._begin_backward()
        try:
            yield
        finally:
            if is_outermost:
                with self._suppressing_errors:
                    assert self._recorder is not None
                    self._recorder.steps.leave(Phase.BACKWARD)

    def _begin_backward(self) -> bool:
        self._begin_recording()
        if self._recorder is None or self._recorder.steps.phase is Phase.BACKWARD:
            return False
        if not self._has_begun:  # the forward is no module's
            self._recorder.steps.on_forward_call()
            self._session.on_training_forward(has_uneven_inputs=False)
            self._has_begun = True
        self._recorder.update_call_site()
        self._recorder.steps.enter(Phase.BACKWARD)
        return True

    # -- collectives ---------------------------------------------------------------------------------------------

    def _identify_launch(self, call: Call) -> Launch | None:
        launch = self._next_identify_launch(call)
        if launch is not None or not (self._models or self.is_learning):
            return launch
        try:
            return self._identify(call)
        except Exception as error:
            self._session.disable_recording(error)
        return None

    def _identify(self, call: Call) -> Launch | None:
        reduction = describe_reduction(call)
        if reduction is None:
            return None
        recorder = self._recorder
        if recorder is not None and (_is_main_thread() or recorder.steps.phase is Phase.BACKWARD):
            fitting = [(one, number) for one in self._models if (number := one.find_bucket(reduction)) is not None]
            if fitting:
                model, number = max(fitting, key=lambda one: (one[0].is_in_place(one[1]), not one[0].is_reduced))
                return self._launch(recorder, model, number, call)
        if self.is_learning and len(self._seen) < _MAX_SEEN:
            self._seen.append(reduction)
        return None

    def _launch(self, recorder: Recorder, model: ReducedByUser, number: int, call: Call) -> Launch:
        records = model.launch(number)
        key = call.group, call.device
        communicator = self._communicators.get(key)
        if communicator is None:
            communicator = self._communicators[key] = communicator_of(call.device, call.group, recorder)
        if recorder.is_on:
            timer = recorder.get_timer(call.device)
            now = timer.mark()
            timer.write(records.ready, recorder.steps.step, now, now)
        collective = communicator.announce(records)
        if call.is_awaited:
            self._enter_wait()

        def launched(work: dist.Work) -> HostBucket | None:
            self._under_way.append(_UnderWay(communicator, collective, work))
            return communicator.launched(collective, work)

        return Launch(purpose=records.purpose, launched=launched, is_users=True)

    def is_waiting_for(self, work: dist.Work) -> bool:
        """Return whether a work is that of one of the loop's collectives under way."""
        return any(one.work is work for one in self._under_way)

    @contextmanager
    def wait(self, work: dist.Work) -> Iterator[None]:
        """Record a wait for one of the loop's collectives."""
        with self._suppressing_errors:
            self._enter_wait()
        try:
            yield
        finally:
            with self._suppressing_errors:
                self._finish_collectives([one for one in self._under_way if one.work is work])
                self._leave_wait()

    def _enter_wait(self) -> None:
        assert self._recorder is not None
        steps = self._recorder.steps
        if steps.phase is not Phase.FINALIZE:
            self._interrupted = steps.phase if steps.phase in _RESUMED_PHASES else None
            steps.enter(Phase.FINALIZE)

    def _finish_collectives(self, ended: Sequence[_UnderWay]) -> None:
        """Record collectives that were waited for."""
        for one in ended:
            one.communicator.waited(one.collective)
        if not ended:
            return
        self._under_way = [one for one in self._under_way if one not in ended]
        if self._recorder is not None and not self._under_way and all(model.is_reduced for model in self._models):
            self._recorder.steps.on_gradients_reduced()

    def _leave_wait(self) -> None:
        assert self._recorder is not None
        before, self._interrupted = self._interrupted, None
        if before is None:
            self._recorder.steps.leave(Phase.FINALIZE)
        else:
            self._recorder.steps.enter(before)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def find_roots(parameters: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the modules that hold some parameters, without those inside of others. Searches all objects."""
    ids = set(map(id, parameters))
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    holding = [one for one in modules if any(id(parameter) in ids for parameter in one.parameters())]
    inner = {id(part) for one in holding for part in one.modules() if part is not one}
    return [one for one in holding if id(one) not in inner]


def name_parameters(parameters: Sequence[torch.Tensor], roots: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of parameters in their modules; with several modules, after the class of each."""
    names = {
        id(parameter): f"{type(root).__name__}.{name}" if len(roots) > 1 else name
        for root in roots
        for name, parameter in root.named_parameters()
    }
    return [names.get(id(one), f"parameter {index}").replace("_orig_mod.", "") for index, one in enumerate(parameters)]


_of_this_process: OwnLoopObserver | None = None
_wrapped: Final[set[object]] = set()


def observe_own_loops(session: Session) -> None:
    """Observe loops that reduce gradients by hand in this process from now on."""
    global _of_this_process
    _of_this_process = OwnLoopObserver(session)


def observe_calls(classes: Iterable[type[torch.nn.Module]]) -> None:
    """Have calls of all modules of some classes reported.

    The classes are wrapped and not the modules: a hook would be saved, copied and compiled with its module.
    """
    for owner in classes:
        if owner not in _wrapped:
            _wrapped.add(owner)
            with suppress(TypeError):  # a class that can't be changed
                owner.__call__ = _make_call(owner, owner.__dict__.get("__call__"))  # type: ignore[method-assign]


def _make_call(owner: type[torch.nn.Module], own: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = super(owner, self).__call__ if own is None else partial(own, self)  # type: ignore[misc]
        if torch.compiler.is_compiling() or (observer := _of_this_process) is None or not observer.times(self):
            return function(*args, **kwargs)
        with observer.forward():
            return function(*args, **kwargs)

    return call


def observe_backwards_and_waits() -> None:
    """Have backwards, and waits for works, reported."""
    if "waits" in _wrapped:
        return
    _wrapped.add("waits")
    backward, wait = torch.autograd.backward, dist.Work.wait

    @functools.wraps(backward)
    def observed_backward(*args: Any, **kwargs: Any) -> None:
        observer = _of_this_process
        if observer is None:
            return backward(*args, **kwargs)
        with observer.backward():
            return backward(*args, **kwargs)

    @functools.wraps(wait)
    def observed_wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        observer = _of_this_process
        if observer is None or not observer.is_waiting_for(work):
            return wait(work, *args, **kwargs)
        with observer.wait(work):
            return wait(work, *args, **kwargs)

    torch.autograd.backward = observed_backward
    dist.Work.wait = observed_wait  # type: ignore[method-assign,assignment]

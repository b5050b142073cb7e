"""Observation of every instance of torch's own ``DistributedDataParallel``, without replacing its behavior.

Methods of the class are wrapped, so that code that has already imported it is observed as well. Instances of the
``instrumented_ddp`` subclass instrument themselves and are skipped. A recording that fails never stops a training run:
the first internal error ends the observation, with one line on stderr.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch import _disable_dynamo  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, describe_parameters
from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.roles import CollectiveRole, Launch, collective_context
from instrumented_ddp.ddp import DistributedDataParallel
from instrumented_ddp.native import Countdown
from instrumented_ddp.recording.background import never_raising, suppress_recorder_errors
from instrumented_ddp.recording.console import reattribute_warnings
from instrumented_ddp.recording.events import BackwardTracker
from instrumented_ddp.recording.metadata import (
    collect_model_settings,
    collect_reduction_settings,
    is_plain,
    is_reduced_in_python,
)
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketCollective, BucketRecords, PlanRecords, make_bitmap_records
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.session import Session
from instrumented_ddp.stock.wrapping import Method, wrap_methods
from instrumented_ddp.trial import get_trial
from overlapscope.diagnosis.evidence import UnreducedCause
from overlapscope.trace.live_files import READY
from overlapscope.trace.schema import Phase


class StockModelObserver:
    """Reports the events of a DDP instance, whose C++ reducer reports none, to the recorder.

    What it launches is recognized by size and order: buckets come in the order of the plan, and each is launched the
    moment its last gradient has arrived, which hooks on the parameters see first.

    Args:
        ddp: the instance, with its reducer. It is not kept alive.
        number: number of the instance in its process.
        parameters: parameters of the reducer, in its order.
        specs: specs of those parameters.
        recorder: recorder of this process.
    """

    def __init__(
        self,
        ddp: TorchDDP,
        number: int,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        recorder: Recorder,
    ) -> None:
        self.number = number
        self._recorder = recorder
        self._specs = tuple(specs)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._launched: list[tuple[Communicator, BucketCollective]] = []
        self._communicators = {p.device: communicator_of(p.device, ddp.process_group, recorder) for p in parameters}
        self._ready_ns = recorder.map_ready_times(number, len(parameters))
        self._all_ready = memoryview(READY.to_bytes(8, "little") * len(parameters)).cast("q")
        self._countdown = Countdown(
            self._ready_ns,
            on_bucket_ready=_ignore,
            on_large=_ignore,
            on_other=never_raising(self._on_local_gradient, recorder.disable_recording),
            on_repeated=_ignore,
        )
        flags = recorder.get_timer(parameters[0].device).flags
        self._bitmap = make_bitmap_records(flags, number, len(parameters), "int32")
        self._bitmap_device = parameters[0].device
        self._devices: list[torch.device] = []
        """Device of each bucket."""
        self._may_miss_gradients = True
        self._plans = 0
        self._records: PlanRecords | None = None
        self._plan = BucketPlan(self._specs, ())
        self._elements: list[int] = []
        self._gradient_records: list[bytes] = []  # refilled in place: hooks hold a reference
        self._next_bucket = 0
        self._may_skip_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))  # torch 2.8
        self._has_rebuilt_buckets = False
        self.reductions = 0
        """Number of backwards that were reduced, including those shadowed by a rank that has joined."""
        self.backwards = BackwardTracker(recorder, number, self._on_autograd_done)
        self._read_plan(ddp, "construction")
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._times_gradients = self._should_time_gradients
        self._hooks: list[Any] = []
        self._register_hooks()

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(spec.bytes for spec in self._specs)

    @property
    def is_reduced(self) -> bool:
        """Return whether buckets are expected: from the end of a forward until all are launched."""
        return self._countdown.is_expecting

    @is_reduced.setter
    def is_reduced(self, is_reduced: bool) -> None:
        self._countdown.is_expecting = is_reduced

    @property
    def _should_time_gradients(self) -> bool:
        return self._recorder.is_full and self._recorder.detail != "buckets"

    def _register_hooks(self) -> None:
        """Register a hook for every gradient, in place of those registered before."""
        self.detach()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index, parameter.device))
            for index, reference in enumerate(self._parameters)
            if (parameter := reference()) is not None
        ]

    def detach(self) -> None:
        """Remove the hooks once the instance is gone; its parameters may live on."""
        for hook in self._hooks:
            hook.remove()

    # -- plans ---------------------------------------------------------------------------------------------------

    def _read_plan(self, ddp: TorchDDP, reason: str) -> None:
        """Query the reducer's buckets, in launch order.

        Raises:
            RuntimeError: the reducer returns a copy, for which there is no memory on the device.
        """
        buckets = tuple(
            tuple(self._index_of[id(parameter)] for parameter in bucket.parameters())
            for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        )
        self._plan = BucketPlan(self._specs, buckets)
        self._records = self._recorder.activate_plan(self.number, self._plans, self._plan, reason)
        self._gradient_records[:] = self._records.gradient_ready
        self._elements = [sum(self._specs[index].elements for index in bucket) for bucket in buckets]
        self._devices = [self._specs[bucket[0]].device for bucket in buckets]
        self._plans += 1

    def check_for_rebuild(self, ddp: TorchDDP) -> None:
        """Read the plan again if the reducer has rebuilt its buckets in the observed gradient order."""
        self._may_miss_gradients = ddp.find_unused_parameters or ddp.static_graph
        if not self._has_rebuilt_buckets and ddp._has_rebuilt_buckets:
            self._has_rebuilt_buckets = True
            self._read_plan(ddp, "rebuild")

    # -- passes --------------------------------------------------------------------------------------------------

    def expect_gradients(self) -> None:
        """Expect gradients after a forward whose backward will be reduced."""
        if self._times_gradients != self._should_time_gradients:
            self._times_gradients = self._should_time_gradients
            self._register_hooks()
        self._countdown.reset()
        self.expect_buckets()

    def expect_buckets(self) -> None:
        """Expect buckets from the first one, in a backward or in a joined rank's shadow of one."""
        self._next_bucket = 0
        self._launched.clear()  # of a pass that has failed
        self.is_reduced = True

    def _on_autograd_done(self, no_sync: bool) -> None:
        if no_sync:
            return
        self._recorder.steps.enter(Phase.FINALIZE)
        self._recorder.completions.poll_buckets(waits=True)  # the reducer says nothing before it has waited for all
        # The reducer's own callback, which waits for the buckets, comes after this one: queue another after it.
        is_over = never_raising(self._on_backward_over, self._recorder.disable_recording)
        torch.autograd.Variable._execution_engine.queue_callback(is_over)

    @property
    def settled_reductions(self) -> int:
        """Return ``reductions``: no update is ever pending."""
        return self.reductions

    def _on_backward_over(self) -> None:
        for communicator, collective in self._launched:  # the reducer has waited for them, in this phase
            communicator.waited(collective)
        self._launched.clear()
        self._recorder.steps.leave(Phase.FINALIZE)
        if not self.is_reduced:
            return  # the second backward after one forward: the reducer has left it out
        if self._next_bucket < len(self._elements) and not self._may_skip_buckets:
            return  # gradients are missing: the reducer still waits for them, and will raise at the next forward
        self.is_reduced = False
        self.reductions += 1
        self._ready_ns[:] = self._all_ready
        self._recorder.on_gradients_reduced(self.number)

    def _gradient_hook(self, index: int, device: torch.device) -> Callable[..., None]:
        count, recorder = self._countdown.make_hook(index), self._recorder
        if not self._times_gradients:
            return count
        timer, records = recorder.get_timer(device), self._gradient_records

        def recording_hook(gradient: torch.Tensor) -> None:
            now = timer.mark()
            if records:
                timer.write(records[index], recorder.steps.step, now, now)
            count(gradient)

        return never_raising(recording_hook, recorder.disable_recording)

    def _on_local_gradient(self, index: int) -> None:
        """Note a gradient that no bucket waits for."""
        self._ready_ns[index] = READY
        self._recorder.on_unreduced_gradient(self.number, index)

    def find_unfinished(self) -> tuple[UnreducedCause, list[int]]:
        """Return why the reduction that was expected has not ended, and the parameters whose gradients wait for it.

        Buckets are launched in order. If the next one has all its gradients and was not launched, the reducer's hooks
        are gone: they are on accumulators, which autograd replaces when the module is cast or moved. Ours are not.
        """
        waiting = [index for index, ready in enumerate(self._ready_ns) if ready]
        is_lost = self._next_bucket < len(self._elements) and self.has_all_gradients(self._next_bucket)
        return ("hooks lost" if is_lost else "incomplete"), waiting

    # -- what the reducer launches -------------------------------------------------------------------------------

    def find_bucket(self, elements: int) -> int | None:
        """Return which bucket an all-reduce of this many elements would be, if it were this model's; None if none.

        For example, with buckets of 8, 4 and 8 elements of which the first was launched, 8 elements give bucket 2.
        """
        for number in range(self._next_bucket, len(self._elements)):  # buckets without a used parameter may be skipped
            if self._elements[number] == elements:
                return number
        return None

    def has_all_gradients(self, number: int) -> bool:
        """Return whether all gradients of a bucket have arrived."""
        return all(self._ready_ns[index] for index in self._plan.buckets[number])

    def is_bitmap(self, tensor: torch.Tensor) -> bool:
        """Return whether this can be the bitmap of used parameters."""
        return tensor.dtype == torch.int32 and tensor.numel() == len(self._specs)

    def on_bucket_launch(self, number: int, buffer: torch.Tensor, *, has_joined: bool) -> Launch:
        """Record that the reducer is about to launch a bucket."""
        assert self._records is not None
        if not has_joined:
            self._on_bucket_ready(number)
            self._recorder.check_gradients(self.number, number, buffer)
        self._next_bucket = number + 1
        return self._launch(self._records.buckets[number], self._devices[number])

    def on_bitmap_launch(self) -> Launch:
        """Record that the reducer is about to launch the bitmap of used parameters."""
        return self._launch(self._bitmap, self._bitmap_device)

    def run_hook(self, hook: Callable[[], Any], number: int, buffer: torch.Tensor) -> Any:
        """Call a communication hook of the user for one bucket."""
        if self._records is None or number >= len(self._records.buckets):
            return hook()
        if self.is_reduced:
            never_raising(self._on_bucket_ready, self._recorder.disable_recording)(number)
            check = never_raising(self._recorder.check_gradients, self._recorder.disable_recording)
            check(self.number, number, buffer)
        self._next_bucket = number + 1
        communicator = self._communicators[self._devices[number]]
        collective = communicator.run_hook(hook, self._records.buckets[number])
        self._launched.append((communicator, collective))
        return collective.work

    def _on_bucket_ready(self, number: int) -> None:
        assert self._records is not None
        if not self.backwards.is_running:  # no gradient of the module's output has begun it
            self.backwards.begin(no_sync=False)
        if self._may_miss_gradients:
            for index in self._plan.buckets[number]:
                self._ready_ns[index] = READY
        if not self._recorder.is_on:
            return
        timer = self._recorder.get_timer(self._devices[number])
        now = timer.mark()
        timer.write(self._records.buckets[number].ready, self._recorder.steps.step, now, now)

    def _launch(self, records: BucketRecords, device: torch.device) -> Launch:
        if not self._recorder.is_on:  # the collective log sees its end all the same
            return Launch(purpose=records.purpose, is_reducer=True)
        communicator = self._communicators[device]
        collective = communicator.announce(records)
        self._launched.append((communicator, collective))
        return Launch(purpose=records.purpose, launched=partial(communicator.launched, collective), is_reducer=True)


_log: Final = logging.getLogger(__name__)
_SPARSE: Final = (
    "rank %d: a model has sparse gradients, whose buckets torch does not tell: its collectives are recorded, "
    "its steps and buckets are not; instrumented_ddp.DistributedDataParallel records them"
)


def _ignore(_: int) -> None:
    """Do nothing: buckets are torch's own here, and only whether gradients have arrived is of interest."""


_AUTOGRAD_MODULES: Final = ("torch.autograd.graph", "")
"""Modules of the frame below the reducer's launches: none at all on autograd's threads, as on CUDA."""
_WRAPPER: Final = "torch.nn.parallel.distributed"
_SIGNATURE: Final = inspect.signature(TorchDDP.__init__)


class StockDDPObserver:
    """Observer of torch's DDP instances in this process.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suppressing_errors = suppress_recorder_errors(session.disable_recording)
        self._models: weakref.WeakKeyDictionary[TorchDDP, StockModelObserver] = weakref.WeakKeyDictionary()
        self._described: weakref.WeakKeyDictionary[TorchDDP, tuple[int, Any, Any]] = weakref.WeakKeyDictionary()
        self._arguments: weakref.WeakKeyDictionary[TorchDDP, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._settings: weakref.WeakKeyDictionary[TorchDDP, dict[str, str]] = weakref.WeakKeyDictionary()
        self._tried: weakref.WeakKeyDictionary[TorchDDP, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._replicas: weakref.WeakKeyDictionary[TorchDDP, FingerprintedReplica] = weakref.WeakKeyDictionary()
        self._observers: list[StockModelObserver] = []
        """The same observers, in the order in which they were made."""
        self._recorder: Recorder | None = None
        self._has_joined = False
        self._in_wrapper: StockModelObserver | None = None
        """Model whose forward is being prepared."""
        session.collectives.identify_launch = self._identify_launch

    def observes(self, instance: object) -> bool:
        """Return whether an instance is torch's own and the process is still recorded."""
        return self._session.is_recording and not isinstance(instance, DistributedDataParallel)

    # -- construction --------------------------------------------------------------------------------------------

    def construct(self, original: Method, ddp: TorchDDP, *args: Any, **kwargs: Any) -> None:
        """Wrap ``__init__`` to record its arguments."""
        trial = get_trial()
        with suppress(TypeError):  # invalid arguments: torch raises its own error
            arguments = _SIGNATURE.bind(ddp, *args, **kwargs)
            if trial is not None:
                self._tried[ddp] = trial.change(arguments)
                args, kwargs = arguments.args[1:], arguments.kwargs
            arguments.apply_defaults()
            self._arguments[ddp] = {name: value for name, value in arguments.arguments.items() if is_plain(value)}
            self._settings[ddp] = collect_model_settings(arguments.arguments, wrapper="torch")
        with reattribute_warnings(callers=2), collective_context(CollectiveRole(role="construction")):
            original(ddp, *args, **kwargs)
        if trial is not None and ddp in self._models:
            trial.compress(ddp)
            with self._suppressing_errors:
                trial.calibrate(ddp, self._models[ddp].gradient_bytes, self._session.folder)

    def describe_parameters(self, original: Method, ddp: TorchDDP) -> Any:
        """Wrap ``_build_params_for_reducer`` to record the parameters before ranks compare them."""
        parameters, is_sparse = original(ddp)
        with self._suppressing_errors:
            specs = describe_parameters(ddp.module, parameters, is_sparse)
            settings = self._settings.pop(ddp, {}) | collect_reduction_settings(ddp)
            self._described[ddp] = self._session.add_model(ddp.module, specs, settings), parameters, specs
        return parameters, is_sparse

    def add_reducer(self, original: Method, ddp: TorchDDP, *args: Any, **kwargs: Any) -> None:
        """Wrap ``_ddp_init_helper`` to observe the reducer that it has created."""
        original(ddp, *args, **kwargs)
        with self._suppressing_errors:
            if ddp not in self._described or is_reduced_in_python(ddp):
                return
            number, parameters, specs = self._described.pop(ddp)
            if any(spec.is_sparse for spec in specs):  # torch can't hand out the buckets of such a reducer
                _log.warning(_SPARSE, self._session.rank)
                self._session.has_unknown_buckets = True
                return
            recorder = self._session.record(ddp.process_group, ddp.device)
            if recorder is None:
                return
            self._recorder = recorder
            recorder.add_model(number, ddp.module, parameters, self._arguments.pop(ddp, {}))
            if (tried := self._tried.pop(ddp, None)) is not None:
                recorder.set_model_info(number, "trial", tried)
            model = self._models[ddp] = StockModelObserver(ddp, number, parameters, specs, recorder)
            if (coverage := recorder.get_coverage(number)) is not None:
                coverage.find_unfinished = weakref.WeakMethod(model.find_unfinished)
            self._observers.append(model)
            if (replica := self._session.replicas.add(number, ddp, model)) is not None:
                self._replicas[ddp] = replica
            weakref.finalize(ddp, self._remove, model).atexit = False

    def _remove(self, model: StockModelObserver) -> None:
        model.detach()
        self._observers.remove(model)

    def register_hook(self, original: Method, ddp: TorchDDP, state: object, hook: Method) -> None:
        """Wrap ``register_comm_hook`` to observe the hook's calls."""
        model = self._models.get(ddp)
        if model is None or not callable(hook):
            original(ddp, state, hook)
            return

        @functools.wraps(hook)
        def observed(state: object, bucket: Any) -> Any:
            return model.run_hook(lambda: hook(state, bucket), bucket.index(), bucket.buffer())

        original(ddp, state, observed)
        with self._suppressing_errors:
            self._name_hook(model, hook.__qualname__)

    def register_builtin_hook(self, original: Method, ddp: TorchDDP, kind: Any) -> None:
        """Wrap ``_register_builtin_comm_hook`` to record the hook's name."""
        original(ddp, kind)
        with self._suppressing_errors:
            if (model := self._models.get(ddp)) is not None:
                self._name_hook(model, str(kind))

    def _name_hook(self, model: StockModelObserver, name: str) -> None:
        if self._recorder is not None:
            self._recorder.record_comm_hook(model.number, name)

    # -- passes --------------------------------------------------------------------------------------------------

    def begin_forward(self, original: Method, ddp: TorchDDP, *inputs: Any, **kwargs: Any) -> Any:
        """Wrap ``_pre_forward`` to record the start of a forward."""
        model, recorder = self._models.get(ddp), self._recorder
        if model is None or recorder is None:
            return original(ddp, *inputs, **kwargs)
        with self._suppressing_errors:
            model.backwards.on_forward_start()
            recorder.steps.on_forward_call()
            self._compare(ddp, model, recorder)
            recorder.update_call_site()
            if torch.is_grad_enabled():
                self._session.on_training_forward(has_uneven_inputs=ddp._join_config.enable)
                recorder.on_training_forward(model.number, inputs, kwargs)
            self._in_wrapper = model
        moved = original(ddp, *inputs, **kwargs)
        with self._suppressing_errors:
            model.check_for_rebuild(ddp)
            phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
            recorder.steps.enter(phase, no_sync=not ddp.require_backward_grad_sync)
        return moved

    def _compare(self, ddp: TorchDDP, model: StockModelObserver, recorder: Recorder) -> None:
        """Take fingerprints, if the forward that begins will be reduced on all ranks, or updates are not."""
        replica = self._replicas.get(ddp)
        if replica is None or not torch.is_grad_enabled():
            return
        if ddp.require_backward_grad_sync or replica.unreduced_updates:
            replica.on_forward_start(model.reductions, recorder.steps.step)
        else:
            replica.on_accumulating_forward(model.reductions)

    def end_forward(self, original: Method, ddp: TorchDDP, output: Any) -> Any:
        """Wrap ``_post_forward`` to record the end of a forward."""
        model, recorder = self._models.get(ddp), self._recorder
        if model is None or recorder is None:
            return original(ddp, output)
        is_training = torch.is_grad_enabled()
        with self._suppressing_errors:
            recorder.steps.leave(Phase.FORWARD if is_training else Phase.EVALUATION)
        output = original(ddp, output)
        with self._suppressing_errors:
            if is_training:
                if ddp.require_backward_grad_sync:
                    model.expect_gradients()
                model.backwards.expect(output, no_sync=not ddp.require_backward_grad_sync)
        return output

    def watch_forward(self, original: Method, ddp: TorchDDP) -> AbstractContextManager[None]:
        """Wrap ``_inside_ddp_forward`` to note an exception that comes out of the module."""
        return self._session.caught.watching_forward(original(ddp))

    def broadcast_buffers(self, original: Method, ddp: TorchDDP, bufs: Any = None, *args: Any, **kwargs: Any) -> None:
        """Wrap ``_default_broadcast_coalesced`` to record the broadcast."""
        model, recorder = self._models.get(ddp), self._recorder
        if model is None or recorder is None:
            original(ddp, bufs, *args, **kwargs)
            return
        with recorder.broadcasts(model.number, ddp.modules_buffers if bufs is None else bufs):
            original(ddp, bufs, *args, **kwargs)

    def shadow(self, original: Method, ddp: TorchDDP) -> None:
        """Wrap ``_match_all_reduce_for_bwd_pass`` and its bitmap counterpart, called on a rank that has joined."""
        model = self._models.get(ddp)
        if model is None:
            original(ddp)
            return
        with self._suppressing_errors:
            model.check_for_rebuild(ddp)
            model.expect_buckets()
        self._has_joined = True
        try:
            with self._session.position.has_joined():
                original(ddp)
        finally:
            self._has_joined = model.is_reduced = False
            model.reductions += original.__name__ == "_match_all_reduce_for_bwd_pass"

    # -- what the reducer launches -------------------------------------------------------------------------------

    def _identify_launch(self, call: Call) -> Launch | None:
        """Return the launch of a collective if torch's C++ reducer or wrapper makes it.

        A function of torch.distributed, or user code, would have a frame between autograd and the collective.
        """
        try:
            caller = _find_calling_module(call.caller)
            if caller in _AUTOGRAD_MODULES or caller == _WRAPPER:
                return self._identify_reducer_launch(call, caller)
        except Exception as error:
            self._session.disable_recording(error)
        return None

    def _identify_reducer_launch(self, call: Call, caller: str) -> Launch | None:
        if call.op == "broadcast" and caller == _WRAPPER:
            return Launch(purpose=CollectiveRole(role="plan", model=self._in_wrapper.number if self._in_wrapper else 0))
        if call.op != "all_reduce" or len(call.tensors) != 1:
            return None
        tensor = call.tensors[0]
        models = [model for model in self._observers if model.is_reduced]
        if tensor.dtype != torch.int32:
            elements = tensor.numel()
            found = [(model, number) for model in models if (number := model.find_bucket(elements)) is not None]
            if found:
                model, number = found[0] if len(found) == 1 else max(found, key=_likelihood)
                return model.on_bucket_launch(number, tensor, has_joined=self._has_joined)
        for model in models:
            if model.is_bitmap(tensor):
                return model.on_bitmap_launch()
        return None


def _likelihood(candidate: tuple[StockModelObserver, int]) -> tuple[bool, int]:
    """Return the sort key of buckets of several models: those whose gradients have all arrived, the earliest first."""
    model, number = candidate
    return model.has_all_gradients(number), -number


def _find_calling_module(frame: FrameType | None) -> str:
    """Return the module of the nearest frame that is not ours; empty if there is none."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith("instrumented_ddp.") and module != "contextlib":
            return module
        frame = frame.f_back
    return ""


_WRAPPED: Final[dict[str, Method]] = {
    "__init__": StockDDPObserver.construct,
    "_build_params_for_reducer": StockDDPObserver.describe_parameters,
    "_ddp_init_helper": StockDDPObserver.add_reducer,
    "register_comm_hook": StockDDPObserver.register_hook,
    "_register_builtin_comm_hook": StockDDPObserver.register_builtin_hook,
    "_pre_forward": _disable_dynamo(StockDDPObserver.begin_forward),
    "_post_forward": _disable_dynamo(StockDDPObserver.end_forward),
    "_inside_ddp_forward": _disable_dynamo(StockDDPObserver.watch_forward),
    "_default_broadcast_coalesced": StockDDPObserver.broadcast_buffers,
    "_match_all_reduce_for_bwd_pass": StockDDPObserver.shadow,
    "_match_unused_params_allreduce": StockDDPObserver.shadow,
}
"""Methods of torch's class, and their wrappers."""

_of_this_process: StockDDPObserver | None = None


def observe_stock_ddp(session: Session) -> None:
    """Observe all instances of torch's own DDP that this process makes from now on."""
    global _of_this_process
    if _of_this_process is None:
        wrap_methods({TorchDDP: _WRAPPED}, lambda: _of_this_process)
    _of_this_process = StockDDPObserver(session)

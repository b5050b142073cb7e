"""Observation of every instance of torch's own ``DistributedDataParallel``, without replacing its behavior.

Methods of the class are wrapped, so that code that has already imported it is observed as well. Instances of the
``instrumented_ddp`` subclass instrument themselves and are skipped. A recording that fails never stops a training run:
the first internal error ends the observation, with one line on stderr.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch import _disable_dynamo  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from instrumented_ddp.bucket_plan import describe_parameters
from instrumented_ddp.collective_log.dispatch import Call
from instrumented_ddp.collective_log.purposes import Launch, Purpose, launched_for
from instrumented_ddp.ddp import DistributedDataParallel
from instrumented_ddp.recording.guard import training_goes_on
from instrumented_ddp.recording.metadata import is_plain
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.settings import is_reduced_in_python, settings_of_model, settings_of_reduction
from instrumented_ddp.recording.warnings_to import warnings_to
from instrumented_ddp.replicas.replica import Replica
from instrumented_ddp.session import Session
from instrumented_ddp.stock.model import StockModel
from instrumented_ddp.stock.wrapping import Method, wrap_methods
from overlapscope.trace.format import Phase

_ENGINE: Final = ("torch.autograd.graph", "")
"""Modules of the frame below the reducer's launches: none at all on autograd's threads, as on CUDA."""
_WRAPPER: Final = "torch.nn.parallel.distributed"
_SIGNATURE: Final = inspect.signature(TorchDDP.__init__)


class StockDDP:
    """Observer of torch's DDP instances in this process.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._training_goes_on = partial(training_goes_on, session.gives_up)
        self._models: weakref.WeakKeyDictionary[TorchDDP, StockModel] = weakref.WeakKeyDictionary()
        self._described: weakref.WeakKeyDictionary[TorchDDP, tuple[int, Any, Any]] = weakref.WeakKeyDictionary()
        self._arguments: weakref.WeakKeyDictionary[TorchDDP, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._settings: weakref.WeakKeyDictionary[TorchDDP, dict[str, str]] = weakref.WeakKeyDictionary()
        self._replicas: weakref.WeakKeyDictionary[TorchDDP, Replica] = weakref.WeakKeyDictionary()
        self._recorder: Recorder | None = None
        self._has_joined = False
        self._in_wrapper: StockModel | None = None
        """Model whose forward is being prepared."""
        session.collectives.recognise = self._recognise

    def observes(self, instance: object) -> bool:
        """Return whether an instance is torch's own and the process is still recorded."""
        return self._session.is_recording and not isinstance(instance, DistributedDataParallel)

    # -- construction --------------------------------------------------------------------------------------------

    def construct(self, original: Method, ddp: TorchDDP, *args: Any, **kwargs: Any) -> None:
        """Wrap ``__init__`` to record its arguments."""
        with suppress(TypeError):  # invalid arguments: torch raises its own error
            arguments = _SIGNATURE.bind(ddp, *args, **kwargs)
            arguments.apply_defaults()
            self._arguments[ddp] = {name: value for name, value in arguments.arguments.items() if is_plain(value)}
            self._settings[ddp] = settings_of_model(arguments.arguments, wrapper="torch")
        with warnings_to(callers=2), launched_for(Purpose(role="construction")):
            original(ddp, *args, **kwargs)

    def describe_parameters(self, original: Method, ddp: TorchDDP) -> Any:
        """Wrap ``_build_params_for_reducer`` to record the parameters before ranks compare them."""
        parameters, is_sparse = original(ddp)
        with self._training_goes_on():
            specs = describe_parameters(ddp.module, parameters, is_sparse)
            settings = self._settings.pop(ddp, {}) | settings_of_reduction(ddp)
            self._described[ddp] = self._session.add_model(ddp.module, specs, settings), parameters, specs
        return parameters, is_sparse

    def add_reducer(self, original: Method, ddp: TorchDDP, *args: Any, **kwargs: Any) -> None:
        """Wrap ``_ddp_init_helper`` to observe the reducer that it has created."""
        original(ddp, *args, **kwargs)
        with self._training_goes_on():
            if ddp not in self._described or is_reduced_in_python(ddp):
                return
            number, parameters, specs = self._described.pop(ddp)
            recorder = self._session.record(ddp.process_group, ddp.device)
            if recorder is None:
                return
            self._recorder = recorder
            recorder.add_model(number, ddp.module, parameters, self._arguments.pop(ddp, {}))
            model = self._models[ddp] = StockModel(ddp, number, parameters, specs, recorder)
            if (replica := self._session.replicas.add(number, ddp, model)) is not None:
                self._replicas[ddp] = replica
            weakref.finalize(ddp, model.detach).atexit = False

    def register_hook(self, original: Method, ddp: TorchDDP, state: object, hook: Method) -> None:
        """Wrap ``register_comm_hook`` to observe the hook's calls."""
        model = self._models.get(ddp)
        if model is None or not callable(hook):
            original(ddp, state, hook)
            return

        @functools.wraps(hook)
        def observed(state: object, bucket: Any) -> Any:
            return model.run_hook(lambda: hook(state, bucket), bucket.index())

        original(ddp, state, observed)
        with self._training_goes_on():
            self._name_hook(model, hook.__qualname__)

    def register_builtin_hook(self, original: Method, ddp: TorchDDP, kind: Any) -> None:
        """Wrap ``_register_builtin_comm_hook`` to record the hook's name."""
        original(ddp, kind)
        with self._training_goes_on():
            if (model := self._models.get(ddp)) is not None:
                self._name_hook(model, str(kind))

    def _name_hook(self, model: StockModel, name: str) -> None:
        if self._recorder is not None:
            self._recorder.hook_is_registered(model.number, name)

    # -- passes --------------------------------------------------------------------------------------------------

    def begin_forward(self, original: Method, ddp: TorchDDP, *inputs: Any, **kwargs: Any) -> Any:
        """Wrap ``_pre_forward`` to record the start of a forward."""
        model, recorder = self._models.get(ddp), self._recorder
        if model is None or recorder is None:
            return original(ddp, *inputs, **kwargs)
        with self._training_goes_on():
            model.backwards.forward_begins()
            recorder.forward_is_called()
            self._compare(ddp, model, recorder)
            recorder.note_caller()
            if torch.is_grad_enabled():
                self._session.training_forward(has_uneven_inputs=ddp._join_config.enable)
            self._in_wrapper = model
        moved = original(ddp, *inputs, **kwargs)
        with self._training_goes_on():
            model.look_for_rebuild(ddp)
            phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
            recorder.enter(phase, no_sync=not ddp.require_backward_grad_sync)
        return moved

    def _compare(self, ddp: TorchDDP, model: StockModel, recorder: Recorder) -> None:
        """Take fingerprints, if the forward that begins will be reduced on all ranks."""
        is_reduced = torch.is_grad_enabled() and ddp.require_backward_grad_sync and not ddp._join_config.enable
        if is_reduced and (replica := self._replicas.get(ddp)) is not None:
            replica.forward_begins(model.reductions, recorder.step)

    def end_forward(self, original: Method, ddp: TorchDDP, output: Any) -> Any:
        """Wrap ``_post_forward`` to record the end of a forward."""
        model, recorder = self._models.get(ddp), self._recorder
        if model is None or recorder is None:
            return original(ddp, output)
        is_training = torch.is_grad_enabled()
        with self._training_goes_on():
            recorder.leave(Phase.FORWARD if is_training else Phase.EVALUATION)
        output = original(ddp, output)
        with self._training_goes_on():
            if is_training:
                if ddp.require_backward_grad_sync:
                    model.expect_gradients()
                model.backwards.expect(output, no_sync=not ddp.require_backward_grad_sync)
        return output

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
        with self._training_goes_on():
            model.look_for_rebuild(ddp)
            model.expect_buckets()
        self._has_joined = True
        try:
            with self._session.position.has_joined():
                original(ddp)
        finally:
            self._has_joined = model.is_reduced = False
            model.reductions += original.__name__ == "_match_all_reduce_for_bwd_pass"

    # -- what the reducer launches -------------------------------------------------------------------------------

    def _recognise(self, call: Call) -> Launch | None:
        """Return the launch of a collective if torch's C++ reducer or wrapper makes it.

        A function of torch.distributed, or user code, would have a frame between autograd and the collective.
        """
        launch: Launch | None = None
        with self._training_goes_on():
            caller = _module_that_calls()
            if caller in _ENGINE or caller == _WRAPPER:
                launch = self._launch_of_reducer(call, caller)
        return launch

    def _launch_of_reducer(self, call: Call, caller: str) -> Launch | None:
        if call.op == "broadcast" and caller == _WRAPPER:
            return Launch(purpose=Purpose(role="plan", model=self._in_wrapper.number if self._in_wrapper else 0))
        if call.op != "all_reduce" or len(call.tensors) != 1:
            return None
        tensor = call.tensors[0]
        models = [model for model in self._models.values() if model.is_reduced]
        found = [(place, model) for model in models if (place := model.bucket_with(tensor.numel())) is not None]
        if found and tensor.dtype != torch.int32:
            (_, minus_number), model = max(found, key=lambda candidate: candidate[0])
            return model.bucket_is_launched(-minus_number, has_joined=self._has_joined)
        for model in models:
            if model.is_bitmap(tensor):
                return model.bitmap_is_launched()
        return None


def _module_that_calls() -> str:
    """Return the module of the frame next to the dispatcher; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith("instrumented_ddp.") and module != "contextlib":
            return module
        frame = frame.f_back
    return ""


_WRAPPED: Final[dict[str, Method]] = {
    "__init__": StockDDP.construct,
    "_build_params_for_reducer": StockDDP.describe_parameters,
    "_ddp_init_helper": StockDDP.add_reducer,
    "register_comm_hook": StockDDP.register_hook,
    "_register_builtin_comm_hook": StockDDP.register_builtin_hook,
    "_pre_forward": _disable_dynamo(StockDDP.begin_forward),
    "_post_forward": _disable_dynamo(StockDDP.end_forward),
    "_default_broadcast_coalesced": StockDDP.broadcast_buffers,
    "_match_all_reduce_for_bwd_pass": StockDDP.shadow,
    "_match_unused_params_allreduce": StockDDP.shadow,
}
"""Methods of torch's class, and their wrappers."""

_of_this_process: StockDDP | None = None


def observe_stock_ddp(session: Session) -> None:
    """Observe all instances of torch's own DDP that this process makes from now on."""
    global _of_this_process
    if _of_this_process is None:
        wrap_methods({TorchDDP: _WRAPPED}, lambda: _of_this_process)
    _of_this_process = StockDDP(session)

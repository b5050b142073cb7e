"""Communication hooks: torch's own, a user's, what a hook is told of a bucket, and wrong ones."""

# Annotations are not postponed here: torch compares those of a hook with its types.
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.futures import Future

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import Branches, batch, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)

Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


@scenarios.add(hook=(default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, noop_hook), view=BOTH)
def a_hook_of_torch(make_ddp: MakeDdp, seen: Seen, hook: Hook, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(dist.group.WORLD, hook)
    train(model, seen)
    seen.note("logged", logged(model))


@scenarios.add(view=BOTH)
def a_wrapped_hook(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    train(model, seen)


@scenarios.add(view=BOTH, warm_start=BOTH)
def power_sgd(make_ddp: MakeDdp, seen: Seen, view: bool, warm_start: bool) -> None:
    # In one bucket: over gloo, the hook's second and third collective of several buckets overtake each other.
    model = make_ddp(make_mlp(width=32), gradient_as_bucket_view=view)
    state = PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, warm_start=warm_start, random_seed=5
    )
    model.register_comm_hook(state, powerSGD_hook)
    train(model, seen, steps=range(8), loss_of=lambda model, step: model(batch(step, 4, 32)).square().mean())


@scenarios.add()
def post_local_sgd(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    subgroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model.register_comm_hook(PostLocalSGDState(dist.group.WORLD, subgroup, start_localSGD_iter=3), post_localSGD_hook)
    train(model, seen, steps=range(6))


@scenarios.add(hook=(dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS), view=BOTH)
def a_builtin_hook(make_ddp: MakeDdp, seen: Seen, hook: dist.BuiltinCommHookType, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model._register_builtin_comm_hook(hook)
    train(model, seen)
    seen.note("logged", logged(model))


@scenarios.add(view=BOTH)
def a_hook_that_completes_later(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        threading.Timer(0.02, lambda: future.set_result(bucket.buffer() * 3)).start()
        return future

    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    train(model, seen)


@scenarios.add(view=BOTH)
def a_hook_that_chains_work(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    def hook(world_size: int, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        squares = bucket.buffer().square()
        return dist.all_reduce(squares, async_op=True).get_future().then(lambda f: f.value()[0].sqrt() / world_size)

    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(2, hook)
    train(model, seen)


@scenarios.add(view=BOTH)
def a_hook_that_works_in_place(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        for place, gradient in enumerate(bucket.gradients()):
            gradient.mul_(place + 2)
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    train(model, seen)


@scenarios.add(view=BOTH)
def a_hook_that_replaces_the_buffer(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        bucket.set_buffer(torch.full_like(bucket.buffer(), bucket.index() + 1.0))
        seen.note("replaced", bucket.buffer())
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    train(model, seen)


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-3))
def what_a_hook_is_told(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    def hook(asked: list[str], bucket: dist.GradBucket) -> Future[torch.Tensor]:
        asked.append("hook")
        seen.note("index", bucket.index())
        seen.note("is last", bucket.is_last())
        seen.note("parameters", [names[parameter] for parameter in bucket.parameters()])
        seen.note("gradients", bucket.gradients())
        seen.note("buffer", bucket.buffer())
        return default_hooks.allreduce_hook(None, bucket)

    model = make_ddp(Branches(), gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: list[str] = []
    model.register_comm_hook(state, hook)
    train(model, seen, loss_of=running("badc"))
    seen.note("state", state)


@scenarios.add(hook=(default_hooks.allreduce_hook, default_hooks.fp16_compress_hook))
def a_hook_in_a_static_graph(make_ddp: MakeDdp, seen: Seen, hook: Hook) -> None:
    model = make_ddp(Branches(), static_graph=True, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    train(model, seen, loss_of=running("abda"))


@scenarios.add()
def a_hook_with_unused_parameters(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-3)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, seen, loss_of=running(lambda step: "abd" if dist.get_rank() == 0 or step % 2 else "ab"))


@scenarios.add()
def a_hook_while_gradients_are_accumulated(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with model.no_sync():
        mean_square(model, 0).backward()
    seen.gradients("inside no_sync", model)
    mean_square(model, 1).backward()
    seen.gradients("outside", model)


@scenarios.add()
def a_hook_registered_after_a_step(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    train(model, seen)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, seen)


@scenarios.add()
def an_optimizer_in_the_hook_is_refused_over_gloo(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    seen.error("hook", lambda: hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))


class NotAHook:
    """Has no call."""


def with_wrong_bucket(state: object, bucket: int) -> Future[torch.Tensor]:
    raise NotImplementedError


def with_wrong_return(state: object, bucket: dist.GradBucket) -> int:
    raise NotImplementedError


@scenarios.add()
def hooks_that_are_refused(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    seen.error("no function", lambda: model.register_comm_hook(None, NotAHook()))
    seen.error("wrong bucket", lambda: model.register_comm_hook(None, with_wrong_bucket))
    seen.error("wrong return", lambda: model.register_comm_hook(None, with_wrong_return))
    seen.error("bfloat16", lambda: model.register_comm_hook(None, default_hooks.bf16_compress_hook))
    train(model, seen)


@scenarios.add()
def a_second_hook_is_refused(make_ddp: MakeDdp, seen: Seen) -> None:
    def register() -> None:
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    def register_builtin() -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    for first in (register, register_builtin):
        model = make_ddp(make_mlp())
        first()
        seen.error("hook", register)
        seen.error("builtin hook", register_builtin)
        train(model, seen)


def returning_a_tensor(state, bucket):  # type: ignore[no-untyped-def]
    return bucket.buffer()


def raising(state, bucket):  # type: ignore[no-untyped-def]
    raise ValueError(f"no luck with bucket {bucket.index()}")


def failing_later(state, bucket):  # type: ignore[no-untyped-def]
    future: Future[torch.Tensor] = Future()
    future.set_exception(ValueError(f"no luck with bucket {bucket.index()}"))
    return future


def completing_with_another_shape(state, bucket):  # type: ignore[no-untyped-def]
    future: Future[torch.Tensor] = Future()
    future.set_result(torch.ones(3))
    return future


def completing_with_text(state, bucket):  # type: ignore[no-untyped-def]
    future: Future[str] = Future()
    future.set_result("no tensor")
    return future


def as_runtime_error(call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError as error:
        raise RuntimeError(str(error)) from error


@scenarios.add(hook=(returning_a_tensor, raising, failing_later, completing_with_another_shape, completing_with_text))
def a_hook_that_does_not_do_its_part(make_ddp: MakeDdp, seen: Seen, hook: Hook) -> None:
    complaint = {
        returning_a_tensor: "callback must return a torch.futures.Future object, but got torch.Tensor",
        raising: "no luck with bucket 0",
        failing_later: "no luck with bucket 0",
        completing_with_another_shape: "",
        completing_with_text: "",
    }[hook]
    model = make_ddp(make_mlp())
    model.register_comm_hook(None, hook)
    loss = mean_square(model, 0)
    if hook is failing_later:  # stock fails to cast the error to a tensor; ours raises the error itself
        seen.error("backward", lambda: as_runtime_error(loss.backward), sentence=complaint)
    else:
        seen.error("backward", loss.backward, sentence=complaint)
    # Where there is an error again, stock's is an assertion about itself.
    seen.error("next forward", lambda: mean_square(model, 1), sentence="")

"""torch.compile around the wrapper and inside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios(leave_traces=True)


class CountingBackend:
    """Runs graphs as they are, and counts them and their parameters' sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        """Compile one graph."""
        self.sizes.append(sum(1 for node in graph.graph.nodes if node.op.startswith("call_")))
        return graph.forward


def make_wide() -> nn.Sequential:
    """Layers of 1 MB: less than that in a bucket can't be compiled."""
    return make_mlp(depth=4, width=512)


def wide_mean_square(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, 2, 512)).square().mean()


@scenarios.add(backend=("eager", "aot_eager"))
def a_compiled_wrapper(make_ddp: MakeDdp, seen: Seen, backend: str) -> None:
    model = make_ddp(make_wide(), gradient_as_bucket_view=backend == "eager", bucket_cap_mb=1)
    train(torch.compile(model, backend=backend), seen, loss_of=wide_mean_square)


@scenarios.add(backend=("eager", "aot_eager"))
def a_wrapper_of_a_compiled_module(make_ddp: MakeDdp, seen: Seen, backend: str) -> None:
    train(make_ddp(torch.compile(make_wide(), backend=backend), bucket_cap_mb=1), seen, loss_of=wide_mean_square)


@scenarios.add(bucket_cap_mb=(None, 1, 3))
def graphs_are_split_where_buckets_end(make_ddp: MakeDdp, seen: Seen, bucket_cap_mb: float | None) -> None:
    backend = CountingBackend()
    train(
        torch.compile(make_ddp(make_mlp(depth=6, width=512), bucket_cap_mb=bucket_cap_mb), backend=backend),
        seen,
        loss_of=wide_mean_square,
    )
    seen.note("sizes of the graphs", backend.sizes)


@scenarios.add()
def a_bucket_smaller_than_the_first_can_not_be_compiled(make_ddp: MakeDdp, seen: Seen) -> None:
    model = torch.compile(make_ddp(make_mlp(), bucket_cap_mb=0.5), backend="eager")
    seen.error("forward", lambda: mean_square(model, 0))


@scenarios.add(mode=("no_optimization", "ddp_optimizer"))
def a_mode_of_optimization(make_ddp: MakeDdp, seen: Seen, mode: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp=mode):
        model = make_ddp(make_wide(), bucket_cap_mb=1)
        seen.note("compiles the reducer", model._use_python_reducer)
        train(torch.compile(model, backend="aot_eager"), seen, loss_of=wide_mean_square)


@scenarios.add()
def the_reducer_is_compiled_too(make_ddp: MakeDdp, seen: Seen) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = make_ddp(make_mlp())
        seen.note("compiles the reducer", model._use_python_reducer)
        compiled = torch.compile(model, backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            train(compiled, seen, steps=range(2))


@scenarios.add()
def the_compiled_reducer_takes_no_list_of_caps(make_ddp: MakeDdp, seen: Seen) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        seen.error("construction", lambda: make_ddp(make_mlp(), bucket_cap_mb_list=[1, 2]))


@scenarios.add()
def a_compiled_wrapper_with_unused_parameters(make_ddp: MakeDdp, seen: Seen) -> None:
    model = torch.compile(make_ddp(Branches(), find_unused_parameters=True), backend="aot_eager")
    train(model, seen, loss_of=running("abd"))


@scenarios.add()
def a_compiled_wrapper_inside_no_sync(make_ddp: MakeDdp, seen: Seen) -> None:
    wrapper = make_ddp(make_mlp())
    model = torch.compile(wrapper, backend="aot_eager")
    for step in range(3):
        with wrapper.no_sync():
            mean_square(model, step).backward()
        seen.gradients(f"step {step}, inside no_sync", wrapper)
        mean_square(model, step + 10).backward()
        seen.gradients(f"step {step}", wrapper)


@scenarios.add()
def a_compiled_training_step(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))

    @torch.compile(backend="aot_eager")
    def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    train(model, seen, loss_of=lambda model, step: loss_of(model, batch(step)))

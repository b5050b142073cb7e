"""Construction: arguments, their errors, what is synchronized and what is left alone."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)


def class_of(make_ddp: MakeDdp) -> type[nn.parallel.DistributedDataParallel]:
    return getattr(make_ddp, "func", make_ddp)


@scenarios.add()
def the_class(make_ddp: MakeDdp, seen: Seen) -> None:
    ddp_class = class_of(make_ddp)
    seen.note("is stock's", issubclass(ddp_class, nn.parallel.DistributedDataParallel))
    seen.note("name", ddp_class.__name__)
    arguments = inspect.signature(ddp_class).parameters
    seen.note(
        "arguments",
        [
            (argument.name, argument.kind, argument.default)
            for argument in arguments.values()
            if argument.name not in ("trace", "on_incident", "bucket_plan", "strategy")
        ],
    )
    methods = [name for name, _ in inspect.getmembers(ddp_class, callable) if not name.startswith("__")]
    seen.note("methods", [name for name in methods if hasattr(nn.parallel.DistributedDataParallel, name)])


@scenarios.add()
def a_subclass_that_looks_through_to_the_module(make_ddp: MakeDdp, seen: Seen) -> None:
    class SeeThrough(class_of(make_ddp)):
        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    model = SeeThrough(Branches(), find_unused_parameters=True, **getattr(make_ddp, "keywords", {}))
    seen.note("module's attribute", model.layers is model.module.layers)
    train(model, seen, loss_of=running("abd"))
    seen.error("no attribute", lambda: model.nothing)


@scenarios.add()
def arguments_by_position(make_ddp: MakeDdp, seen: Seen) -> None:
    train(make_ddp(make_mlp(), None, None, 0, None, True, None, 1, True), seen)


@scenarios.add()
def what_a_wrapper_has(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp()
    model = make_ddp(module, bucket_cap_mb=3)
    seen.note("is stock's", isinstance(model, nn.parallel.DistributedDataParallel))
    seen.note("module", model.module is module)
    for name in (
        "bucket_bytes_cap",
        "bucket_bytes_cap_default",
        "bucket_bytes_cap_list",
        "broadcast_bucket_size",
        "device",
        "device_ids",
        "device_type",
        "dim",
        "find_unused_parameters",
        "forward_sync_buffers",
        "gradient_as_bucket_view",
        "is_multi_device_module",
        "mixed_precision",
        "output_device",
        "parameters_to_ignore",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "skip_all_reduce_unused_params",
        "static_graph",
        "training",
        "use_side_stream_for_tensor_copies",
    ):
        seen.note(name, getattr(model, name))
    seen.note("text", str(model))
    seen.note("modules", [name for name, _ in model.named_modules()])
    seen.note("keys", list(model.state_dict()))
    seen.note("evaluates", (model.eval() is model, module.training))
    seen.note("trains", (model.train() is model, module.training))
    seen.note("process group", model.process_group == dist.group.WORLD)
    seen.note("join device and group", (model.join_device, model.join_process_group == dist.group.WORLD))


class AsksForArguments(nn.Module):
    """Takes arguments by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, scale: float = 1.0, **named: torch.Tensor) -> torch.Tensor:
        """Use all."""
        return scale * sum(map(self.linear, [x, *more, *named.values()]))


@scenarios.add()
def a_forward_with_arguments_of_all_kinds(make_ddp: MakeDdp, seen: Seen) -> None:
    train(
        make_ddp(AsksForArguments()),
        seen,
        loss_of=lambda model, step: (
            model(batch(step), batch(step + 10), scale=2.0, other=batch(step + 20)).square().mean()
        ),
    )


@scenarios.add()
def arguments_that_are_refused(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp()
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    weight = module[0].weight
    for what, options in {
        "device_ids of a CPU module": {"device_ids": [0]},
        "output_device of a CPU module": {"output_device": 1},
        "several device_ids": {"device_ids": [0, 1]},
        "process_group and device_mesh": {"process_group": dist.group.WORLD, "device_mesh": mesh},
        "device_mesh of two dimensions": {"device_mesh": square},
        "delayed parameters without a parameter to hook": {"delay_all_reduce_named_params": [("0.weight", weight)]},
        "a parameter to hook without delayed parameters": {"param_to_hook_all_reduce": weight},
        "no such argument": {"no_such_argument": 1},
    }.items():
        seen.error(what, lambda options=options: make_ddp(module, **options))
    seen.error("no module", lambda: make_ddp())
    train(make_ddp(module), seen)


@scenarios.add()
def an_argument_that_is_deprecated(make_ddp: MakeDdp, seen: Seen) -> None:
    with seen.warnings("check_reduction"):
        model = make_ddp(make_mlp(), check_reduction=True)
    train(model, seen)


@scenarios.add()
def mixed_precision_asks_for_an_accelerator(make_ddp: MakeDdp, seen: Seen) -> None:
    precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    seen.error("wrapping and forward", lambda: mean_square(make_ddp(make_mlp(), mixed_precision=precision), 0))


@scenarios.add()
def no_device_ids(make_ddp: MakeDdp, seen: Seen) -> None:
    train(make_ddp(make_mlp(), device_ids=[]), seen)


@scenarios.add(init_sync=BOTH)
def whether_ranks_start_from_the_same_weights(make_ddp: MakeDdp, seen: Seen, init_sync: bool) -> None:
    torch.manual_seed(dist.get_rank())
    model = make_ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), init_sync=init_sync)
    seen.state("at construction", model)
    train(model, seen)


@scenarios.add()
def ranks_that_wrap_different_modules(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp(depth=2 + dist.get_rank())
    seen.error("construction", lambda: make_ddp(module), sentence="DDP expects same model across all ranks")


def in_subgroup(make_ddp: MakeDdp, seen: Seen, **options: object) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3, **options)
    train(model, seen)
    seen.note("logged", logged(model))


@scenarios.add()
def a_process_group(make_ddp: MakeDdp, seen: Seen) -> None:
    groups = [dist.new_group([0]), dist.new_group([1]), dist.new_group([1, 0])]
    in_subgroup(make_ddp, seen, process_group=groups[dist.get_rank()])
    in_subgroup(make_ddp, seen, process_group=groups[2])


@scenarios.add()
def a_device_mesh(make_ddp: MakeDdp, seen: Seen) -> None:
    in_subgroup(make_ddp, seen, device_mesh=init_device_mesh("cpu", (2,)))


@scenarios.add()
def a_dimension_of_a_device_mesh(make_ddp: MakeDdp, seen: Seen) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    in_subgroup(make_ddp, seen, device_mesh=mesh["replicas"])


@scenarios.add(find_unused_parameters=BOTH)
def ignored_parameters(make_ddp: MakeDdp, seen: Seen, find_unused_parameters: bool) -> None:
    torch.manual_seed(dist.get_rank())
    module = Branches()
    ignored = [name for name, _ in module.named_parameters() if name.startswith("layers.b") or name.endswith("bias")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = make_ddp(module, find_unused_parameters=find_unused_parameters, bucket_cap_mb=1e-3)
    train(model, seen, loss_of=running("abd" if find_unused_parameters else "abcd"))
    seen.note("logged", logged(model))
    seen.note("managed", len(list(model._get_data_parallel_params(module))))
    named = model._get_data_parallel_params(module, named_params=True)
    seen.note("names of the managed", [name for name, _ in named])


@scenarios.add()
def delayed_parameters(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp()
    delayed = [(name, parameter) for name, parameter in module.named_parameters() if name.startswith("4")]
    model = make_ddp(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].weight)
    for step in range(4):
        model.zero_grad()
        mean_square(model, step).backward()
        dist.barrier()  # the delayed all-reduce is waited for by nobody
        seen.gradients(f"step {step}", model)
    seen.state("in the end", model)


class OddlyNamed(nn.Module):
    """Parameters at the top and below, with names of the reducer's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.reducer = nn.Linear(WIDTH, WIDTH)
        self.module = nn.Linear(WIDTH, WIDTH)
        self.logger = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all."""
        return self.module(self.reducer(x)) * self.logger


@scenarios.add()
def modules_with_names_of_the_wrapper(make_ddp: MakeDdp, seen: Seen) -> None:
    train(make_ddp(OddlyNamed()), seen)

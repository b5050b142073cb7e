"""Saving, loading, copying: of the state, and of the whole wrapper."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)


def make_normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@scenarios.add()
def the_state_has_a_prefix(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_normed())
    train(model, seen)
    state = model.state_dict()
    seen.note("state", state)
    seen.note("names", [name for name, _ in model.named_parameters()])
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    plain = make_normed()
    seen.note("what is missing", list(plain.load_state_dict(state)))
    seen.note("state of a plain module", plain.state_dict())


@scenarios.add()
def the_recipe_of_the_tutorial(make_ddp: MakeDdp, seen: Seen) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    checkpoint = Path(folders[0]) / "model.checkpoint"
    model = make_ddp(make_normed())
    train(model, seen, steps=range(2))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), checkpoint)
    dist.barrier()
    torch.manual_seed(10 + dist.get_rank())
    resumed = make_ddp(make_normed())
    resumed.load_state_dict(torch.load(checkpoint, map_location={"cuda:0": "cpu"}, weights_only=True))
    train(resumed, seen, steps=range(2, 5))
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoint.unlink()


@scenarios.add()
def a_state_that_does_not_fit(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_normed())
    seen.error("without prefix", lambda: model.load_state_dict(model.module.state_dict()))
    train(model, seen)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@scenarios.add(copied=(through_pickle, through_torch_save, through_deepcopy), after_steps=BOTH, static_graph=BOTH)
def the_whole_wrapper(make_ddp: MakeDdp, seen: Seen, copied, after_steps: bool, static_graph: bool) -> None:
    model = make_ddp(
        Branches("ab"), static_graph=static_graph, find_unused_parameters=not static_graph, bucket_cap_mb=1e-3
    )
    if after_steps:
        train(model, seen, loss_of=running("ab"))
    copy_of_model = copied(model)
    seen.note("type", type(copy_of_model) is type(model))
    seen.note("attributes", sorted(set(vars(copy_of_model)) & set(STOCK_ATTRIBUTES)))
    train(copy_of_model, seen, loss_of=running("ba"))
    seen.note("logged", logged(copy_of_model))
    train(model, seen, loss_of=running("ab"))
    seen.state("of the copy, in the end", copy_of_model)


STOCK_ATTRIBUTES = (
    "module",
    "reducer",
    "logger",
    "process_group",
    "static_graph",
    "gradient_as_bucket_view",
    "forward_sync_buffers",
    "require_backward_grad_sync",
    "parameters_to_ignore",
    "bucket_bytes_cap",
)


@scenarios.add()
def a_wrapper_of_a_subgroup_can_not_be_pickled(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), process_group=dist.new_group([0, 1]))
    seen.error("pickle", lambda: pickle.dumps(model))
    train(model, seen)


@scenarios.add()
def a_copy_is_evaluated(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    for step in range(3):
        mean_square(model, step).backward()
        best = copy.deepcopy(model.module)
        with torch.no_grad():
            seen.note(f"step {step}", best(batch(step)))

"""Arguments: served, or refused with a sentence; never ignored."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("lone_rank")


def test_the_signature_is_torchs_and_trace():
    ours = list(inspect.signature(DistributedDataParallel.__init__).parameters)
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)
    assert [name for name in theirs if name not in ours] == []
    shared = [name for name in ours if name in theirs]
    assert shared == theirs
    assert ours[-1] == "trace"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", 1),
        ("init_sync", False),
        ("find_unused_parameters", True),
        ("check_reduction", True),
        ("static_graph", True),
        ("delay_all_reduce_named_params", []),
        ("param_to_hook_all_reduce", nn.Parameter(torch.ones(1))),
        ("mixed_precision", object()),
        ("device_mesh", object()),
        ("skip_all_reduce_unused_params", True),
        ("bucket_cap_mb_list", [1, 2]),
    ],
)
def test_an_argument_that_is_not_served_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"does not serve the argument {name} yet"):
        DistributedDataParallel(nn.Linear(2, 2), **{name: value})


def test_device_ids_of_a_cpu_module_are_refused():
    with pytest.raises(ValueError, match="None for a CPU module"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])


def test_a_module_without_trained_parameters_is_refused():
    with pytest.raises(ValueError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_sparse_gradients_are_refused_with_the_name_of_the_embedding():
    with pytest.raises(ValueError, match="table is an embedding with sparse=True"):
        DistributedDataParallel(nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)}))


def test_broadcast_buffers_and_its_newer_name_are_both_served():
    assert DistributedDataParallel(nn.Linear(2, 2)).broadcast_buffers
    assert not DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False).broadcast_buffers
    assert not DistributedDataParallel(nn.Linear(2, 2), forward_sync_buffers=False).broadcast_buffers


def test_state_dict_has_torchs_prefix_and_loads_into_torchs_class():
    ours, theirs = DistributedDataParallel(nn.Linear(2, 2)), nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == ["module.weight", "module.bias"]

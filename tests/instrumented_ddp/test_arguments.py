"""Arguments are torch's own, and so is what is said of wrong ones."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed.autograd as distributed_autograd
from torch import nn
from torch.distributed import rpc

from instrumented_ddp import DistributedDataParallel
from overlapscope.errors import OverlapScopeError

pytestmark = pytest.mark.usefixtures("lone_rank")


def test_the_signature_is_torchs_and_four_arguments_of_ours():
    parameters = list(inspect.signature(DistributedDataParallel).parameters.values())
    assert parameters[:-4] == list(inspect.signature(nn.parallel.DistributedDataParallel).parameters.values())
    assert [own.name for own in parameters[-4:]] == ["trace", "on_incident", "bucket_plan", "strategy"]


def test_it_is_torchs_class_to_whoever_asks():
    assert isinstance(DistributedDataParallel(nn.Linear(2, 2)), nn.parallel.DistributedDataParallel)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="bucket_cap"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap=25)


@pytest.mark.parametrize(
    "cap", [{"bucket_cap_mb": 25}, {"bucket_cap_mb_list": [1, 25]}], ids=lambda cap: next(iter(cap))
)
def test_a_bucket_plan_and_a_cap_exclude_each_other(cap):
    if next(iter(cap)) not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        pytest.skip("this torch has no such argument")
    with pytest.raises(OverlapScopeError, match=f"bucket_plan and {next(iter(cap))} both"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_plan="plan.json", **cap)


def test_a_plan_that_can_not_be_read_is_one_line(tmp_path):
    with pytest.raises(OverlapScopeError, match=r"nowhere\.json: "):
        DistributedDataParallel(nn.Linear(2, 2), bucket_plan=tmp_path / "nowhere.json")


def test_a_warning_points_at_the_users_line():
    with pytest.warns(FutureWarning, match="check_reduction") as warned:
        DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)
    assert [warning.filename for warning in warned] == [__file__]


def test_sparse_metadata_is_refused_with_a_sentence():
    model = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(NotImplementedError, match="sparse metadata"):
        model._set_sparse_metadata({"weight": torch.zeros(1)})


def test_state_dict_has_torchs_prefix_and_loads_into_torchs_class():
    ours, theirs = DistributedDataParallel(nn.Linear(2, 2)), nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == ["module.weight", "module.bias"]


def test_distributed_autograd_over_rpc_is_refused_with_a_sentence(tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        with distributed_autograd.context(), pytest.raises(RuntimeError, match="distributed autograd over RPC"):
            model(torch.ones(1, 2))
    finally:
        rpc.shutdown()

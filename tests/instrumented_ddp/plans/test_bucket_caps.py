"""The lists of caps that the model writes, as torch's own DDP understands them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import distributed

from overlapscope.bucket_model.partition import Gradients, buckets_from_cuts
from overlapscope.bucket_model.plans import find_caps_mb
from tests.bucket_model.test_partition import gradients

pytestmark = pytest.mark.skipif(not hasattr(distributed, "_BucketCapacityConfig"), reason="needs torch 2.13")


@given(gradients(kinds=(0,)), st.data())
def test_torch_makes_the_plan_of_the_list(gradients: Gradients, data: st.DataObject) -> None:
    """Any plan of one kind, also one that no single cap gives."""
    cuts = data.draw(st.lists(st.booleans(), min_size=len(gradients.order), max_size=len(gradients.order)))
    plan = buckets_from_cuts(torch.tensor(cuts).numpy(), gradients)
    caps = find_caps_mb(plan, gradients)
    assert caps is not None
    config = distributed._BucketCapacityConfig.create(None, caps, False)
    _, limits = config.compute_bucket_size_limits(False, False)
    order = gradients.order.tolist()
    tensors = [torch.empty(int(gradients.bytes[number]), dtype=torch.uint8) for number in order]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(order), order)
    assert sorted(map(tuple, buckets)) == sorted(plan)

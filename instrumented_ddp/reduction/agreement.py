"""Agreement of all ranks on parameters and bucket plans before the first all-reduce.

Collectives are matched by their order alone. Two ranks that hold the same parameters in a different order add one
layer's gradients to another's, and nothing fails: hence names, shapes, dtypes and order are compared up front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions  # type: ignore[attr-defined]

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, hash_json
from instrumented_ddp.collectives.completion import NO_TIMEOUT
from overlapscope.errors import OverlapScopeError
from overlapscope.text import rank_list

ParameterSignature = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a parameter, which ranks compare."""


class PlanRequest(IntEnum):
    """Requested handling of bucket plans. It takes effect if all ranks request the same."""

    NONE = 0
    PROBE = 1
    """Requested by ``record --probe-buckets``."""
    AUTO = 2
    """Requested by ``bucket_cap_mb="auto"``."""


class DisagreementError(RuntimeError):
    """Error raised when ranks were about to reduce different parameters together."""


def check_same_parameters(
    parameters: Sequence[ParameterSpec],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    plan_request: PlanRequest = PlanRequest.NONE,
) -> bool:
    """Compare this rank's parameters with those of all ranks.

    Args:
        plan_request: handling of bucket plans that this rank requests.

    Returns:
        True if all ranks request the same.

    Raises:
        DisagreementError: on every rank, naming the first parameter that differs.
    """
    signatures = [parameter.signature for parameter in parameters]
    content = bytearray.fromhex(hash_json(signatures)) + bytes([plan_request])
    own = torch.frombuffer(content, dtype=torch.uint8).to(device)
    answers = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([answers], [own], AllgatherOptions()).wait(NO_TIMEOUT)
    plan_requests = {int(answer[-1]) for answer in answers}
    # Every rank sees the same hashes, so all of them take the slow path together or none does.
    if all(torch.equal(answer[:-1], own[:-1]) for answer in answers):
        return plan_requests == {plan_request}
    everyones: list[tuple[list[ParameterSignature], list[str]]] = [([], []) for _ in range(group.size())]
    dist.all_gather_object(everyones, (signatures, [parameter.module for parameter in parameters]), group=group)
    lists, modules = [theirs for theirs, _ in everyones], [classes for _, classes in everyones]
    raise DisagreementError(f"{_torch_message(lists, group.rank())} In detail: {describe_disagreement(lists, modules)}")


def _torch_message(signatures: Sequence[Sequence[ParameterSignature]], rank: int) -> str:
    """Describe the difference in the words of ``verify_params_across_processes`` in torch's reducer.cpp."""
    own = signatures[rank]
    for other, theirs in enumerate(signatures):
        if len(theirs) != len(own):
            return (
                f"DDP expects same model across all ranks, but Rank {rank} has {len(own)} params, while rank {other} "
                f"has inconsistent {len(theirs)} params."
            )
    for position, ((_, shape, _), (_, shape_of_0, _)) in enumerate(zip(own, signatures[0], strict=True)):
        if shape != shape_of_0:
            return (
                f"[{rank}]: params[{position}] in this process with sizes {list(shape)} appears not to match sizes of "
                "the same param in process 0."
            )
    return "DDP expects same model across all ranks, but the parameters differ."


def describe_disagreement(
    signatures: Sequence[Sequence[ParameterSignature]], modules: Sequence[Sequence[str]] | None = None
) -> str:
    """Describe which ranks differ, and at which parameter first.

    With two ranks there is no majority, so no rank is blamed; with more, the minority is named.

    Args:
        signatures: for each rank the signatures of its parameters in order; not all equal.
        modules: for each rank the class of the module that holds each parameter.
    """
    as_tuples = [tuple(signature) for signature in signatures]
    [(common, votes), *others] = Counter(as_tuples).most_common()
    if len(as_tuples) > 2 and votes > others[0][1]:
        reference = as_tuples.index(common)
        differing = [rank for rank, signature in enumerate(as_tuples) if signature != common]
        blame = f"{rank_list(differing)} and all others"
    else:
        reference = 0
        differing = [rank for rank, signature in enumerate(as_tuples) if signature != as_tuples[0]]
        blame = f"rank 0 and rank {differing[0]}"
    ours, theirs = as_tuples[reference], as_tuples[differing[0]]
    if len(ours) != len(theirs) and ours[: len(theirs)] == theirs[: len(ours)]:
        position = min(len(ours), len(theirs))
    else:
        position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)

    def describe(rank: int) -> str:
        return _describe(signatures[rank], position, modules[rank] if modules else ())

    return (
        f"{blame} differ: rank {reference} has {len(ours)} params, rank {differing[0]} has {len(theirs)} params, and "
        f"the first difference is parameter {position}: "
        f"{describe(reference)} on rank {reference}, {describe(differing[0])} on rank {differing[0]}."
    )


def agree_on_plan(plan: BucketPlan, group: dist.ProcessGroup, device: torch.device, *, why_not: str = "") -> BucketPlan:
    """Broadcast rank 0's plan to all ranks.

    All ranks hold the same parameters, so two numbers per parameter suffice: the buckets ((3, 2), (1, 0)) are sent as
    the order [3, 2, 1, 0] and the bucket of each position [0, 0, 1, 1].

    Args:
        why_not: on rank 0, the reason why it has no plan.

    Raises:
        OverlapScopeError: on every rank, with rank 0's reason.
    """
    order = [index for bucket in plan.buckets for index in bucket]
    bucket_of_position = [number for number, bucket in enumerate(plan.buckets) for _ in bucket]
    text = torch.tensor(list(why_not.encode()), dtype=torch.uint8, device=device)
    if why_not:
        order = [-len(text)] * len(order)
    numbers = torch.tensor([order, bucket_of_position], dtype=torch.int64, device=device)
    _broadcast(numbers, group)
    order, bucket_of_position = numbers.tolist()
    if order[0] < 0:
        if group.rank() != 0:
            text = torch.empty(-order[0], dtype=torch.uint8, device=device)
        _broadcast(text, group)
        raise OverlapScopeError(bytes(text.tolist()).decode())
    buckets: list[list[int]] = []
    for index, number in zip(order, bucket_of_position, strict=True):
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(index)
    return BucketPlan(plan.parameters, tuple(map(tuple, buckets)))


def agree_on_numbers(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Broadcast rank 0's numbers, however many there are, to all ranks."""
    how_many = torch.tensor([len(numbers)], dtype=torch.int64, device=device)
    _broadcast(how_many, group)
    own = numbers if group.rank() == 0 else [0] * int(how_many.item())
    agreed = torch.tensor(own, dtype=torch.int64, device=device)
    _broadcast(agreed, group)
    return [int(number) for number in agreed.tolist()]


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    group.broadcast([tensor], BroadcastOptions()).wait(NO_TIMEOUT)


def _describe(signatures: Sequence[ParameterSignature], position: int, modules: Sequence[str]) -> str:
    if position >= len(signatures):
        return "none"
    name, shape, dtype = signatures[position]
    module_class = modules[position] if position < len(modules) else ""
    holder = f" ({module_class} at {name.rpartition('.')[0] or 'the top'})" if module_class else ""
    return f"{name} {dtype}{list(shape)}{holder}"

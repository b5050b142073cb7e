"""What ranks must agree on before the first all-reduce, and how they do.

Collectives are matched by their order alone. Two ranks that hold the same parameters in another order reduce one
layer's gradients into another's, and nothing fails: hence names, shapes, dtypes and order are compared up front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions  # type: ignore[attr-defined]

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, fingerprint
from instrumented_ddp.completion import NO_TIMEOUT

Signature = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a parameter: what is compared."""


class DisagreementError(RuntimeError):
    """Ranks were about to reduce different things into each other."""


def check_same_parameters(parameters: Sequence[ParameterSpec], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare this rank's parameters with those of all ranks.

    Raises:
        DisagreementError: on every rank, naming the first parameter that differs.
    """
    signatures = [parameter.signature for parameter in parameters]
    own = torch.frombuffer(bytearray.fromhex(fingerprint(signatures)), dtype=torch.uint8).to(device)
    hashes = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([hashes], [own], AllgatherOptions()).wait(NO_TIMEOUT)
    # Every rank sees the same hashes, so all of them take the slow path together or none does.
    if all(torch.equal(other, hashes[0]) for other in hashes):
        return
    everyones: list[tuple[list[Signature], list[str]]] = [([], []) for _ in range(group.size())]
    dist.all_gather_object(everyones, (signatures, [parameter.module for parameter in parameters]), group=group)
    lists, modules = [theirs for theirs, _ in everyones], [classes for _, classes in everyones]
    raise DisagreementError(f"{_as_torch_says(lists, group.rank())} In detail: {describe_disagreement(lists, modules)}")


def _as_torch_says(signatures: Sequence[Sequence[Signature]], rank: int) -> str:
    """What one rank sees, in the words of ``verify_params_across_processes`` in torch's reducer.cpp."""
    own = signatures[rank]
    for other, theirs in enumerate(signatures):
        if len(theirs) != len(own):
            return (
                f"DDP expects same model across all ranks, but Rank {rank} has {len(own)} params, while rank {other} "
                f"has inconsistent {len(theirs)} params."
            )
    for place, ((_, shape, _), (_, shape_of_0, _)) in enumerate(zip(own, signatures[0], strict=True)):
        if shape != shape_of_0:
            return (
                f"[{rank}]: params[{place}] in this process with sizes {list(shape)} appears not to match sizes of "
                "the same param in process 0."
            )
    return "DDP expects same model across all ranks, but the parameters differ."


def describe_disagreement(
    signatures: Sequence[Sequence[Signature]], modules: Sequence[Sequence[str]] | None = None
) -> str:
    """Say which ranks differ and at which parameter first.

    With two ranks there is no majority, so nobody is blamed; with more, the minority is named.

    Args:
        signatures: for each rank those of its parameters in order; not all equal.
        modules: for each rank the class of the module that holds each parameter.
    """
    as_tuples = [tuple(signature) for signature in signatures]
    [(common, votes), *others] = Counter(as_tuples).most_common()
    if len(as_tuples) > 2 and votes > others[0][1]:
        reference = as_tuples.index(common)
        differing = [rank for rank, signature in enumerate(as_tuples) if signature != common]
        blame = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))} against all others"
    else:
        reference = 0
        differing = [rank for rank, signature in enumerate(as_tuples) if signature != as_tuples[0]]
        blame = f"rank 0 against rank {differing[0]}"
    ours, theirs = as_tuples[reference], as_tuples[differing[0]]
    if len(ours) != len(theirs) and ours[: len(theirs)] == theirs[: len(ours)]:
        place = min(len(ours), len(theirs))
    else:
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)

    def describe(rank: int) -> str:
        return _describe(signatures[rank], place, modules[rank] if modules else ())

    return (
        f"{blame} differ: rank {reference} has {len(ours)} params, rank {differing[0]} has {len(theirs)} params, and "
        f"the first difference is parameter {place}: "
        f"{describe(reference)} on rank {reference}, {describe(differing[0])} on rank {differing[0]}."
    )


def agree_on_plan(plan: BucketPlan, group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank. All ranks hold the same parameters, so two numbers for each say everything."""
    order = [index for bucket in plan.buckets for index in bucket]
    bucket_of_place = [number for number, bucket in enumerate(plan.buckets) for _ in bucket]
    numbers = torch.tensor([order, bucket_of_place], dtype=torch.int64, device=device)
    group.broadcast([numbers], BroadcastOptions()).wait(NO_TIMEOUT)
    buckets: list[list[int]] = []
    for index, number in zip(*numbers.tolist(), strict=True):
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(index)
    return BucketPlan(plan.parameters, tuple(map(tuple, buckets)))


def _describe(signatures: Sequence[Signature], place: int, modules: Sequence[str]) -> str:
    if place >= len(signatures):
        return "none"
    name, shape, dtype = signatures[place]
    module_class = modules[place] if place < len(modules) else ""
    holder = f" ({module_class} at {name.rpartition('.')[0] or 'the top'})" if module_class else ""
    return f"{name} {dtype}{list(shape)}{holder}"

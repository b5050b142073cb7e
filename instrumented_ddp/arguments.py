"""Constructor arguments of ``DistributedDataParallel``: torch's, and four additional ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp.plans.initial_plan import AUTO, is_auto, reject_conflicting_caps
from instrumented_ddp.recording.metadata import collect_model_settings, is_plain
from instrumented_ddp.strategies.registry import OVERLAPPED, resolve_strategy
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.bucket_model.plan_file import PlanFile
from overlapscope.errors import OverlapScopeError

TORCH_SIGNATURE: Final = inspect.signature(TorchDDP.__init__)
_EXTRA_PARAMETERS: Final = {
    "trace": "str | Path | None",
    "on_incident": "OnIncident | None",
    "bucket_plan": "str | Path | PlanFile | None",
    "strategy": "str | Strategy | None",
}
SIGNATURE: Final = TORCH_SIGNATURE.replace(
    parameters=[
        *TORCH_SIGNATURE.parameters.values(),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in _EXTRA_PARAMETERS.items()
        ),
    ]
)
"""Signature of the wrapper's constructor."""


_ONE_PARAMETER_PER_BUCKET_MB: Final = 1e-9
"""Bucket size that gives each parameter its own bucket. 0 would mean the same, but torch 2.11 rejects it."""


@dataclass(frozen=True, kw_only=True)
class DDPArguments:
    """Parsed and validated constructor arguments of a wrapper."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Keyword arguments for torch's constructor."""
    all: dict[str, Any]
    """All of torch's arguments by name, defaults included."""
    strategy: Strategy
    is_auto: bool
    """True if the buckets are chosen while the model trains."""
    settings: dict[str, str]
    """Settings that should be equal on all ranks."""
    described: dict[str, Any]
    """Arguments as they are recorded."""

    @staticmethod
    def of(
        bound: inspect.BoundArguments,
        bucket_plan: str | Path | PlanFile | None,
        strategy: str | Strategy | None,
    ) -> DDPArguments:
        """Parse torch's arguments, bound to its signature, and the additional ones.

        Raises:
            OverlapScopeError: bucket sizes are given twice, or the strategy is unknown.
        """
        resolved, given = resolve_strategy(strategy), bound.arguments
        _reject_conflicts(resolved, strategy, given, bucket_plan)
        if resolved.bucket_cap_mb is not None:
            given["bucket_cap_mb"] = resolved.bucket_cap_mb or _ONE_PARAMETER_PER_BUCKET_MB
        wants_auto = is_auto(given)
        if wants_auto:
            given["bucket_cap_mb"] = None
        args, kwargs = bound.args[1:], bound.kwargs
        bound.apply_defaults()
        of_strategy = {} if resolved.name == OVERLAPPED.name else {"strategy": resolved.name}
        described = {name: value for name, value in given.items() if is_plain(value)} | of_strategy
        if wants_auto:
            described["bucket_cap_mb"] = AUTO
        if resolved.bucket_cap_mb is not None:
            described["bucket_cap_mb"] = resolved.bucket_cap_mb
        if bucket_plan is not None:
            described["bucket_plan"] = str(bucket_plan) if isinstance(bucket_plan, str | Path) else "given"
        return DDPArguments(
            args=args,
            kwargs=kwargs,
            all=dict(bound.arguments),
            strategy=resolved,
            is_auto=wants_auto,
            settings=collect_model_settings(bound.arguments, wrapper="instrumented_ddp") | of_strategy,
            described=described,
        )


def _reject_conflicts(
    resolved: Strategy,
    strategy: str | Strategy | None,
    given: Mapping[str, Any],
    bucket_plan: str | Path | PlanFile | None,
) -> None:
    if bucket_plan is not None:
        reject_conflicting_caps("bucket_plan", given)
    if resolved.bucket_cap_mb is not None:
        reject_conflicting_caps(f"strategy={strategy!r}", {**given, "bucket_plan": bucket_plan})
    # With a limit of the strategy's, bucket_cap_mb="auto" has been rejected by now.
    if resolved.pads_to is not None and (bucket_plan is not None or is_auto(given)):
        raise OverlapScopeError(f"strategy={resolved.name!r} sizes its buckets itself: give it bucket_cap_mb at most")
    if resolved.pads_to is not None and given.get("mixed_precision") is not None:
        raise OverlapScopeError(f"strategy={resolved.name!r} and mixed_precision exclude each other; leave one out")
    if resolved.order is not None:
        _reject_conflicting_orders(resolved, given, bucket_plan)


def _reject_conflicting_orders(
    strategy: Strategy, given: Mapping[str, Any], bucket_plan: str | Path | PlanFile | None
) -> None:
    """Reject arguments that fix the bucket order, or that skip the rebuild in which a strategy would set it."""
    if bucket_plan is not None:
        raise OverlapScopeError(
            f"strategy={strategy.name!r} and bucket_plan both set the order of the buckets; leave one of them out"
        )
    if given.get("find_unused_parameters") and not given.get("static_graph"):
        raise OverlapScopeError(
            f"strategy={strategy.name!r} orders buckets after the first backward, when find_unused_parameters=True "
            "leaves them as they are; leave one of them out, or add static_graph=True"
        )

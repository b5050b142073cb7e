"""Registry of all strategies, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from instrumented_ddp.strategies import (
    baselines,
    direct,
    hierarchical,
    one_bit,
    parameter_averaging,
    parameter_server,
    ring,
    tree,
)
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.errors import OverlapScopeError

_ALL: Final = (
    *(baselines.NAIVE, baselines.PER_PARAMETER, baselines.BUCKETED, baselines.OVERLAPPED),
    *(ring.RING, tree.TREE, tree.DOUBLE_TREE, direct.ONE_SHOT, direct.TWO_SHOT),
    *(parameter_server.STRATEGY, baselines.ROUND_ROBIN, baselines.FP16, baselines.BF16, baselines.POWER_SGD),
    *(ring.DECOUPLED, ring.PRIORITY, ring.SHARDED),
    *(baselines.REVERSE, baselines.FORWARD, parameter_averaging.STRATEGY),
)
STRATEGIES: Final[Mapping[str, Callable[[], Strategy]]] = MappingProxyType(
    {
        **{strategy.name: partial(replace, strategy) for strategy in _ALL},
        "hierarchical": hierarchical.strategy,
        "one_bit": one_bit.strategy,
    }
)
"""Factories of strategies, by name; called once per model."""


def resolve_strategy(given: str | Strategy | None) -> Strategy:
    """Return the strategy that the wrapper was given: a name, a user's own strategy, or None for ``overlapped``.

    Raises:
        OverlapScopeError: there is no strategy of this name.
    """
    if isinstance(given, Strategy):
        return given
    if given is None:
        return baselines.OVERLAPPED
    if given not in STRATEGIES:
        raise OverlapScopeError(f"no strategy is called {given!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[given]()

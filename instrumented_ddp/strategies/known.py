"""Registry of all strategies, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from instrumented_ddp.strategies import (
    compression,
    decoupled,
    direct,
    double_tree,
    gradient_order,
    hierarchical,
    ladder,
    one_bit,
    parameter_averaging,
    parameter_server,
    priority,
    ring,
    round_robin,
    sharded,
    tree,
)
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.errors import OverlapScopeError

_ALL: Final = (
    *(ladder.NAIVE, ladder.PER_PARAMETER, ladder.BUCKETED, ladder.OVERLAPPED),
    *(ring.STRATEGY, tree.STRATEGY, double_tree.STRATEGY, direct.ONE_SHOT, direct.TWO_SHOT),
    *(parameter_server.STRATEGY, round_robin.STRATEGY, compression.FP16, compression.BF16, compression.POWER_SGD),
    *(decoupled.STRATEGY, priority.STRATEGY, sharded.STRATEGY),
    *(gradient_order.REVERSE, gradient_order.FORWARD, parameter_averaging.STRATEGY),
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
        return ladder.OVERLAPPED
    if given not in STRATEGIES:
        raise OverlapScopeError(f"no strategy is called {given!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[given]()

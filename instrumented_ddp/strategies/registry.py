"""Registry of all strategies, by name, and the baselines: those that leave sums to the backend's all-reduce.

``naive``, ``per_parameter``, ``bucketed`` and ``overlapped`` are the steps by which DDP evolved (section 3 of the DDP
paper).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from instrumented_ddp.strategies import all_reduces, compression, parameter_averaging, parameter_server
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.errors import OverlapScopeError

OVERLAPPED: Final = Strategy(name="overlapped")
"""The default: buckets are reduced when they are full."""

_BASELINES: Final = (
    # Each parameter is reduced when the backward is over, or as soon as its gradient is ready.
    Strategy(name="naive", overlaps=False, bucket_cap_mb=0),
    Strategy(name="per_parameter", bucket_cap_mb=0),
    # Buckets are reduced when the backward is over.
    Strategy(name="bucketed", overlaps=False),
    OVERLAPPED,
    # Process groups of the same ranks take turns with the buckets, so that several are in flight: three, the most in
    # section 5.4 of the DDP paper (figure 12). It helps where one group can't saturate the link. Torch had it to 2.6.
    Strategy(name="round_robin", groups=3),
    # The reverse of the module's order, which torch uses before it has observed a backward: usually nearly right.
    Strategy(name="reverse_order", order=lambda observed: sorted(observed, reverse=True)),
    # The bucket that is launched first is the one that is ready last, so nothing can be hidden if a module registers
    # its layers in the order in which it uses them (section 3.2.3 of the DDP paper).
    Strategy(name="forward_order", order=sorted),
)
_SHARED: Final = (
    *_BASELINES,
    *(all_reduces.RING, all_reduces.TREE, all_reduces.DOUBLE_TREE, all_reduces.ONE_SHOT, all_reduces.TWO_SHOT),
    *(all_reduces.DECOUPLED, all_reduces.PRIORITY, all_reduces.SHARDED),
    *(compression.FP16, compression.BF16, compression.POWER_SGD),
    *(parameter_server.STRATEGY, parameter_averaging.STRATEGY),
)
STRATEGIES: Final[Mapping[str, Callable[[], Strategy]]] = MappingProxyType(
    {strategy.name: partial(replace, strategy) for strategy in _SHARED}
    | {
        # A new one for each model, as they remember which ranks share a host, or keep rounding errors.
        "hierarchical": lambda: Strategy(name="hierarchical", all_reduce=all_reduces.Hierarchical()),
        "one_bit": lambda: Strategy(name="one_bit", all_reduce=compression.OneBit(), keeps_state=True),
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
        return OVERLAPPED
    if given not in STRATEGIES:
        raise OverlapScopeError(f"no strategy is called {given!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[given]()

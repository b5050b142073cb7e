"""What lies within an area of the timeline: the time of each rank between two moments, divided as steps are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS, COMPUTE_BLOCKS, Breakdown, get_communication_spans
from overlapscope.breakdown.spans import Int64Array, RowsByRank, merge_spans
from overlapscope.breakdown.waits import REASONS
from overlapscope.trace.recording import Trace

_EXPOSED: Final = BLOCKS.index("exposed")


def tabulate_area(trace: Trace, breakdown: Breakdown, from_ns: int, to_ns: int, ranks: Sequence[int]) -> pd.DataFrame:
    """Return what each rank does between two moments of the common clock; what goes on longer is cut there.

    For the start and the end of a step, the times are those of ``tabulate_breakdown``.

    Args:
        trace: the recording.
        breakdown: its step-time breakdown.
        from_ns: start of the area.
        to_ns: its end.
        ranks: the ranks in it, in the order of the rows.

    Returns:
        rank, a column for each of ``BLOCKS`` (these sum to the length of the area), one for each of ``REASONS``
        (exposed_<reason>_ns; these sum to exposed_ns), compute_ns, hidden_ns, communication_ns; and the number of
        collectives of DDP that run in the area, their bytes, and the number of gradients that become ready in it.
    """
    ns, hidden_ns = (np.zeros((len(ranks), len(BLOCKS)), dtype=np.int64) for _ in range(2))
    collectives = _select_running(trace.collectives, from_ns, to_ns)
    sent_of = get_communication_spans(collectives)
    reasons_ns = _ReasonsInArea(breakdown, from_ns, to_ns)
    exposed_for_ns = np.zeros((len(ranks), len(REASONS)), dtype=np.int64)
    for row, rank in enumerate(ranks):
        sent_ns = np.clip(merge_spans(sent_of[rank]), from_ns, to_ns)
        spans_ns = np.concatenate([[[from_ns], [to_ns]], sent_ns, reasons_ns.spans_of(rank)], axis=1)
        timeline = breakdown.timelines.get(rank)
        if timeline is None:
            ns[row, -1] = max(0, to_ns - from_ns)
            continue
        shares_ns = timeline.within(*spans_ns)
        ns[row], hidden_ns[row] = shares_ns[0], shares_ns[1 : 1 + sent_ns.shape[1]].sum(axis=0)
        exposed_for_ns[row] = reasons_ns.sum_of(rank, shares_ns[1 + sent_ns.shape[1] :, _EXPOSED])
    hidden_ns[:, _EXPOSED] = 0
    # The waits of steps that were not finished have no reason.
    exposed_for_ns[:, REASONS.index("unattributed")] += ns[:, _EXPOSED] - exposed_for_ns.sum(axis=1)
    blocks_ns = {f"{name}_ns": ns[:, index] for index, name in enumerate(BLOCKS)}
    is_ready = trace.gradients["ready_ns"].between(from_ns, to_ns, inclusive="left")
    return pd.DataFrame(
        {
            "rank": np.asarray(ranks, dtype=np.int64),
            **blocks_ns,
            **{f"exposed_{reason}_ns": exposed_for_ns[:, index] for index, reason in enumerate(REASONS)},
            "compute_ns": np.sum([blocks_ns[f"{name}_ns"] for name in COMPUTE_BLOCKS], axis=0),
            "hidden_ns": hidden_ns.sum(axis=1),
            "communication_ns": hidden_ns.sum(axis=1) + ns[:, _EXPOSED],
            "collectives": _count(collectives["rank"], ranks),
            "bytes": _count(collectives["rank"], ranks, collectives["bytes"].to_numpy(np.int64)),
            "gradients": _count(trace.gradients.loc[is_ready, "rank"], ranks),
        }
    )


def find_extremes(values: npt.NDArray[np.int64], ranks: Sequence[int]) -> Mapping[str, tuple[int, int]]:
    """Return rank and value of the most, the median and the least; of an even number, the lower of the two medians.

    Of 5, 9, 7 and 8 on ranks 0 to 3, the most is 9 on rank 1, the median 7 on rank 2, and the least 5 on rank 0.
    """
    order = np.argsort(values, kind="stable")
    found = {"most": order[-1], "median": order[(len(order) - 1) // 2], "least": order[0]}
    return {name: (ranks[index], int(values[index])) for name, index in found.items()}


class _ReasonsInArea:
    """The waits of each rank that are at least partly in an area, and their reasons."""

    def __init__(self, breakdown: Breakdown, from_ns: int, to_ns: int) -> None:
        waits = breakdown.waits
        found = waits.of((waits.start_ns < to_ns) & (waits.end_ns > from_ns))
        self._rows, self._reason = RowsByRank(found.rank), found.reason
        self._edges_ns = np.clip(np.stack([found.start_ns, found.end_ns]), from_ns, to_ns)

    def spans_of(self, rank: int) -> Int64Array:
        """Return the starts and ends (2, n) of the waits of a rank, cut at the edges of the area."""
        return self._edges_ns[:, self._rows[rank]]

    def sum_of(self, rank: int, ns: Int64Array) -> Int64Array:
        """Return the sum, for each of ``REASONS``, of a value (n,) for each wait of a rank."""
        return np.bincount(self._reason[self._rows[rank]], weights=ns, minlength=len(REASONS)).astype(np.int64)


def _select_running(collectives: pd.DataFrame, from_ns: int, to_ns: int) -> pd.DataFrame:
    """Return the collectives that run at least partly in an area; those that never ended run on."""
    start_ns = collectives["start_ns"].fillna(collectives["launch_ns"])
    ends_later = collectives["end_ns"].isna() | (collectives["end_ns"] > from_ns)
    return collectives[((start_ns < to_ns) & ends_later).to_numpy(dtype=bool)]


def _count(rank: pd.Series[int], ranks: Sequence[int], weights: Int64Array | None = None) -> Int64Array:
    """Return the number, or the sum of weights, of the rows of each rank."""
    one = np.ones(len(rank), dtype=np.int64) if weights is None else weights
    sums = pd.Series(one, dtype=np.int64).groupby(rank.to_numpy(np.int64)).sum()
    return sums.reindex(np.asarray(ranks), fill_value=0).to_numpy(np.int64)

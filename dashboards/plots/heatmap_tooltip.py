"""Tooltip of a cell of the heatmap of ranks and steps."""

from __future__ import annotations

from typing import Final

from dashboards.plots.tooltip import Rows
from overlapscope.analysis.heatmap import Grid, Heatmap, HeatmapFigure
from overlapscope.analysis.sentences import PART_LABELS, rank_names
from overlapscope.units import format_ns

_SUPERLATIVES: Final[dict[HeatmapFigure, str]] = {
    "compute": "computes longest",
    "lateness": "arrives latest",
    "wait": "waits longest",
}

_MIN_CAUSE_SHARE: Final = 0.01
"""Minimum share of the step time for the delay of a cause to be listed."""
_MAX_CAUSES: Final = 3
_MAX_PATH_RANKS: Final = 2


def build_cell_tooltip(heatmap: Heatmap, grid: Grid, figure: HeatmapFigure, row: int, column: int) -> tuple[str, Rows]:
    """Return title and lines for a cell: ranks and steps, and the three figures of its largest rank and step.

    Args:
        heatmap: the figures of all ranks and steps.
        grid: cells that are shown.
        figure: figure that is shown, by which the largest is chosen.
        row: row of the cell.
        column: column of the cell.
    """
    ranks, steps = grid.places(row, column)
    first_step = grid.first_step + column * grid.steps_per_column
    last_step = min(first_step + grid.steps_per_column - 1, int(heatmap.steps[-1]))
    when = f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
    who = rank_names(heatmap.ranks[ranks].tolist())
    hosts = tuple(dict.fromkeys(heatmap.hosts[rank] for rank in ranks))
    host_text = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    title = f"{who[:1].upper()}{who[1:]} · {when}"
    peak = grid.peak(heatmap.figures_ns[figure], row, column)
    if peak is None:
        return title, [
            ("host", host_text),
            ("", "left out: ranks share no all-reduces in this step or the one before"),
        ]
    rank, step = peak
    rows: Rows = [("host", host_text)]
    if len(ranks) * len(steps) > 1:
        rows.append((_SUPERLATIVES[figure], f"rank {heatmap.ranks[rank]} in step {heatmap.steps[step]}"))
    compute_ns, lateness_ns, wait_ns = (
        heatmap.figures_ns[name][rank, step] for name in ("compute", "lateness", "wait")
    )
    side = "before" if lateness_ns < 0 else "after"
    return title, [
        *rows,
        ("compute", format_ns(compute_ns)),
        ("arrives", f"{format_ns(abs(lateness_ns))} {side} the median rank"),
        *_list_causes(heatmap, rank, step),
        ("waits", f"{format_ns(wait_ns)} for later ranks" if wait_ns else "for no later rank"),
        ("critical path", _describe_critical_path(heatmap, step)),
    ]


def _list_causes(heatmap: Heatmap, rank: int, step: int) -> Rows:
    """Return the causes that make a rank late, if any."""
    least_ns = _MIN_CAUSE_SHARE * heatmap.step_time_ns
    causes = [(cause, excess_ns) for cause, excess_ns in heatmap.excess_ns(rank, step).items() if excess_ns >= least_ns]
    return [(f"{PART_LABELS[cause]}", f"{format_ns(excess_ns)} longer") for cause, excess_ns in causes[:_MAX_CAUSES]]


def _describe_critical_path(heatmap: Heatmap, step: int) -> str:
    path = heatmap.path_of(step)
    if path is None:
        return "not known"
    by_rank, transfer_ns = path
    through = [f"rank {rank} for {format_ns(own_ns)}" for rank, own_ns in list(by_rank.items())[:_MAX_PATH_RANKS]]
    return ", ".join([*through, f"transfers {format_ns(transfer_ns)}"])

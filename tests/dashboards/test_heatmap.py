"""The map of ranks and steps: what its cells show, and which rank and step are behind them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards import rank_map
from dashboards.rank_map import NO_VALUE, Grid, Grouping, Heatmap
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.critical_path import CriticalPath, JobBreakdown
from overlapscope.stragglers.cycles import CAUSES, Cycles

MS = 1_000_000


def cycles(steps: list[int], ranks: int, *, seed: int = 0, arrival_ns: np.ndarray | None = None) -> Cycles:
    """Cycles with one all-reduce, of made-up numbers unless given."""
    rng = np.random.default_rng(seed)
    shape = (len(steps), ranks)
    arrival_ns = rng.integers(0, 100, (*shape, 1)) if arrival_ns is None else arrival_ns[:, :, None]
    return Cycles(
        ranks=np.arange(ranks),
        steps=np.array(steps),
        left_out=0,
        missing_ranks=0,
        buckets=np.zeros(1, dtype=np.int64),
        bytes=np.ones(1, dtype=np.int64),
        begin_ns=np.zeros(len(steps), dtype=np.int64),
        local_ns=rng.integers(0, 100, (len(CAUSES), *shape)),
        lead_ns=np.zeros((*shape, 1), dtype=np.int64),
        arrival_ns=arrival_ns,
        end_ns=arrival_ns.max(axis=1) + 10,
        broadcast_ns=np.zeros(shape, dtype=np.int64),
        clock_error_ns=0.0,
    )


def heatmap_of(cycles: Cycles, hosts: dict[int, str]) -> Heatmap:
    """With figures of made-up numbers."""
    cells = pd.MultiIndex.from_product([cycles.ranks, cycles.steps], names=["rank", "step"]).to_frame(index=False)
    rng = np.random.default_rng(1)
    figures = cells.assign(
        compute_ns=rng.integers(0, 100, len(cells)), exposed_straggler_ns=rng.integers(0, 100, len(cells))
    )
    return Heatmap(cycles, hosts, figures.sample(frac=1, random_state=1), 100.0 * MS, None)


@st.composite
def maps(draw: st.DrawFn) -> tuple[Heatmap, dict[Grouping, Grid]]:
    """A map, and its cells as on a small screen."""
    steps = draw(st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True).map(sorted))
    hosts = draw(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=20))
    made_up = cycles(steps, len(hosts), seed=draw(st.integers(0, 99)))
    shown = heatmap_of(made_up, dict(enumerate(hosts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_map, "MAX_ROWS", draw(st.integers(1, 8)))
        columns = draw(st.integers(1, 20))
        return shown, {grouping: shown.grid(grouping, columns) for grouping in shown.groupings}


@given(maps())
def test_a_cell_shows_the_largest_value_of_its_ranks_and_steps(a_map):
    shown, grids = a_map
    for grid in grids.values():
        for values in shown.figures_ns.values():
            pooled = grid.maxima(values)
            for row, column in np.ndindex(pooled.shape):
                ranks, steps = grid.places(row, column)
                expected = max((values[r, s] for r in ranks for s in steps), default=NO_VALUE)
                assert pooled[row, column] == expected


@given(maps())
def test_the_peak_of_a_cell_is_a_rank_and_step_of_it_with_the_value_shown(a_map):
    shown, grids = a_map
    for grid in grids.values():
        values = shown.figures_ns["lateness"]
        pooled = grid.maxima(values)
        for row, column in np.ndindex(pooled.shape):
            peak = grid.peak(values, row, column)
            ranks, steps = grid.places(row, column)
            assert (peak is None) == (len(steps) == 0)
            if peak is not None:
                assert peak[0] in ranks
                assert peak[1] in steps
                assert values[peak] == pooled[row, column]


@given(maps())
def test_every_rank_and_step_is_in_exactly_one_cell(a_map):
    shown, grids = a_map
    for grid in grids.values():
        seen = np.zeros((len(shown.ranks), len(shown.steps)), dtype=int)
        for row, column in np.ndindex(len(grid.row_edges) - 1, len(grid.column_edges) - 1):
            seen[np.ix_(*grid.places(row, column))] += 1
        assert np.all(seen == 1)


@given(maps())
def test_a_column_lies_at_the_numbers_of_its_steps(a_map):
    shown, grids = a_map
    for grid in grids.values():
        for column in range(len(grid.column_edges) - 1):
            _, steps = grid.places(0, column)
            assert np.all((shown.steps[steps] - grid.first_step) // grid.steps_per_column == column)


@given(maps())
def test_a_row_of_hosts_holds_all_ranks_of_them(a_map):
    shown, grids = a_map
    grid = grids.get("hosts")
    if grid is None:
        assert len(set(shown.hosts)) == 1
        return
    for row in range(len(grid.row_edges) - 1):
        ranks, _ = grid.places(row, 0)
        names = grid.names[row * grid.each : (row + 1) * grid.each]
        assert {shown.hosts[rank] for rank in ranks} == set(names)
        assert len(ranks) == sum(host in names for host in shown.hosts)


def test_a_map_fits_a_screen():
    shown = heatmap_of(cycles(list(range(2000)), 600), {rank: str(rank // 2) for rank in range(600)})
    rows, columns = shown.grid("ranks").maxima(shown.figures_ns["wait"]).shape
    assert (rows, columns) == (300, 1000)
    assert shown.grid("hosts").maxima(shown.figures_ns["wait"]).shape == (300, 1000)


def test_a_narrow_screen_gets_fewer_columns():
    shown = heatmap_of(cycles(list(range(900)), 2), {})
    assert shown.grid("ranks").maxima(shown.figures_ns["wait"]).shape == (2, 900)
    assert shown.grid("ranks", 700).maxima(shown.figures_ns["wait"]).shape == (2, 450)


def test_lateness_is_that_of_the_cycles_and_the_rest_is_from_the_breakdown():
    made_up = cycles([6, 7], 3, arrival_ns=np.array([[0, 0, 0], [10, 40, 20]]))
    figures = pd.DataFrame(
        [(2, 7, 5, 30), (0, 6, 3, 0), (1, 7, 4, 8), (0, 8, 9, 9)],
        columns=["rank", "step", "compute_ns", "exposed_straggler_ns"],
    )
    shown = Heatmap(made_up, {}, figures, 100.0, None)
    assert shown.figures_ns["lateness"].tolist() == [[0, -10], [0, 20], [0, 0]]
    assert shown.figures_ns["compute"].tolist() == [[3, 0], [0, 4], [0, 5]]
    assert shown.figures_ns["wait"].tolist() == [[0, 0], [0, 8], [0, 30]]


def test_the_critical_path_of_a_step_is_by_rank_and_the_rest_of_it_is_transfers():
    job = JobBreakdown(
        steps=np.array([5, 7]),
        start_ns=np.array([0, 100]),
        end_ns=np.array([50, 160]),
        ns=np.zeros((2, len(BLOCKS)), dtype=np.int64),
        ranks=np.array([0, 1, 2]),
        rank_ns=np.array([[10, 0, 0], [5, 0, 40]]),
        path=CriticalPath(who=np.empty(0, int), from_ns=np.empty(0, int), until_ns=np.empty(0, int)),
    )
    figures = pd.DataFrame(columns=["rank", "step", "compute_ns", "exposed_straggler_ns"])
    shown = Heatmap(cycles([6, 7], 3), {}, figures, 100.0, job)
    assert shown.path_of(0) is None
    assert shown.path_of(1) == ({2: 40, 0: 5}, 15)


def lateness_scale(late_ms: np.ndarray) -> tuple[int, int]:
    shown = heatmap_of(cycles(list(range(len(late_ms))), late_ms.shape[1], arrival_ns=late_ms * MS + 100 * MS), {})
    return shown.scale_ns("lateness", shown.grid("ranks").maxima(shown.figures_ns["lateness"]))


def test_one_long_pause_leaves_the_rest_its_contrast():
    late_ms = np.zeros((200, 8), dtype=np.int64)
    late_ms[:, 3] = 20
    late_ms[50, 5] = 5000
    assert lateness_scale(late_ms) == (0, 20 * MS)


def test_of_many_ranks_a_slow_one_is_within_the_scale():
    late_ms = np.zeros((50, 500), dtype=np.int64)
    late_ms[:, 100] = 40
    assert lateness_scale(late_ms) == (0, 40 * MS)


def test_the_noise_of_a_healthy_run_stays_pale():
    late_ms = np.zeros((50, 8), dtype=np.int64)
    late_ms[::3, 1] = 1
    _, high_ns = lateness_scale(late_ms)
    assert high_ns > 9 * MS

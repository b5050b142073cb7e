"""Figures of experiments, drawn by matplotlib: as SVG in the page, in its theme, and as SVG or PNG files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

from markupsafe import escape

from dashboards import theme
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import (
    BoxPlotChart,
    Chart,
    FigureContent,
    LineChart,
    LineSeries,
    StackedBarChart,
    Unit,
    has_interval,
)
from overlapscope.text import format_count, format_interval_ns, format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

_WIDTH_IN: Final = 6.8
_HEIGHT_IN: Final = 3.2
_BAR_IN: Final = 0.3
"""Height per bar: a chart of bars is as high as it needs to be."""
_LINE_COLORS: Final = tuple(f"span-bucket-{slot}" for slot in (0, 1, 2, 3, 5, 7))
_ROBUST_SHARE: Final = 0.99
"""Share of faint values that the y axis covers: a few high ones must not flatten the rest."""
_ONE_AT_A_TIME: Final = Lock()
"""matplotlib's settings belong to the process; the server draws on several threads."""

Colors = Mapping[str, str]
"""Color by the name that ``theme.css_variables`` gives it, without the dashes."""


def svg_for_page(chart: Chart) -> str:
    """Draw one chart as SVG whose colors are CSS variables of the page, so that it follows the page's theme."""
    names = list(_colors())
    marks = {name: f"#{0x010000 + number:06x}" for number, name in enumerate(names)}
    svg = _render("", (chart,), marks, "svg").decode()
    of_mark = {mark: f"var(--{name})" for name, mark in marks.items()}
    svg = re.sub(r"#01[0-9a-f]{4}", lambda found: of_mark.get(found[0], found[0]), svg)
    return re.sub(r' width="[^"]*pt"| height="[^"]*pt"', "", svg[svg.index("<svg") :], count=2)


def draw_picture(title: str, figure: FigureContent, kind: Literal["svg", "png"]) -> bytes:
    """Draw all charts of a figure below each other, in the light theme, as the content of a file."""
    return _render(title, figure.charts, _colors(), kind)


def write_pictures(folder: Path, name: str, title: str, figure: FigureContent) -> list[Path]:
    """Write a figure as NAME.svg and NAME.png.

    Raises:
        OverlapScopeError: the folder can't be written to, a file is already there, or matplotlib is missing.
    """
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        if path.exists():
            raise OverlapScopeError(f"{path}: already exists: remove it, or give another folder with -o")
    contents = [draw_picture(title, figure, "svg"), draw_picture(title, figure, "png")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be written to ({error.strerror})") from None
    return paths


def draw(title: str, charts: Sequence[Chart], colors: Colors) -> tuple[Picture, dict[str, str]]:
    """Draw charts below each other.

    Returns:
        The picture, and the tooltip of each artist by its group id.

    Raises:
        OverlapScopeError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        raise OverlapScopeError("figures are drawn by matplotlib: pip install 'overlapscope[lab]'") from None
    heights = [_height_in(chart) for chart in charts] or [1.0]
    picture = Picture(figsize=(_WIDTH_IN, sum(heights)), layout="constrained", facecolor="none")
    if title:
        picture.suptitle(title, color=colors["ink"], fontsize=11, x=0.01, ha="left")
    tips: dict[str, str] = {}
    rows = picture.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for chart, axes in zip(charts, rows, strict=False):  # without charts one empty row is left
        axes.set_title(chart.title, loc="left", fontsize=10, color=colors["ink"])
        axes.set_facecolor("none")
        axes.tick_params(length=0, labelsize=9, labelcolor=colors["muted"])
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        if isinstance(chart, StackedBarChart):
            _draw_bars(axes, chart, colors, tips)
        elif isinstance(chart, BoxPlotChart):
            _draw_boxes(axes, chart, colors, tips)
        else:
            _draw_lines(axes, chart, colors, tips)
    return picture, tips


def _draw_bars(axes: Axes, chart: StackedBarChart, colors: Colors, tips: dict[str, str]) -> None:
    """Draw a horizontal bar for each setting, divided into the blocks of the step-time breakdown."""
    for row, bar in enumerate(chart.bars):
        left, step = 0.0, format_ns(bar.step_ns.value)
        for name in BLOCKS:
            ns = bar.parts_ns.get(name, 0.0)
            if ns > 0:
                (part,) = axes.barh(row, ns, left=left, height=0.64, color=colors[_block(name)])
                _tip(part, tips, f"{bar.label}: {BLOCK_LABELS[name]} {format_ns(ns)} of {step}")
                left += ns
        end = bar.step_ns.value
        if has_interval(bar.step_ns):
            low, high = bar.step_ns.low, bar.step_ns.high
            axes.hlines(row, low, high, color=colors["ink"], linewidth=1.2)
            axes.plot([low, high], [row, row], "|", color=colors["ink"], markersize=6)
            end = max(end, high)
            step += f" ({format_interval_ns(bar.step_ns)})"
        axes.annotate(
            step, (end, row), (5, 0), textcoords="offset points", va="center", fontsize=9, color=colors["ink"]
        )
    axes.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=colors["grid"])
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value, "ns"))
    present = [name for name in BLOCKS if any(bar.parts_ns.get(name, 0.0) > 0 for bar in chart.bars)]
    if present:
        axes.legend(
            handles=[_swatch(BLOCK_LABELS[name], colors[_block(name)]) for name in present],
            **_legend(colors, ncols=3),
        )


def _draw_boxes(axes: Axes, chart: BoxPlotChart, colors: Colors, tips: dict[str, str]) -> None:
    """Draw a box plot for each setting over a time axis from 0 up."""
    if not chart.boxes:
        return
    stats = [
        {
            "med": box.median_ns,
            "q1": box.quartile_1_ns,
            "q3": box.quartile_3_ns,
            "whislo": box.low_ns,
            "whishi": box.high_ns,
        }
        for box in chart.boxes
    ]
    drawn = axes.bxp(
        stats,
        positions=range(len(stats)),
        widths=0.3,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": colors["block-forward"], "edgecolor": colors["accent"]},
        medianprops={"color": colors["ink"], "linewidth": 2},
        whiskerprops={"color": colors["muted"]},
        capprops={"color": colors["muted"]},
    )
    for box, patch in zip(chart.boxes, drawn["boxes"], strict=True):
        quartiles = f"{format_ns(box.quartile_1_ns)} and {format_ns(box.quartile_3_ns)}"
        _tip(
            patch,
            tips,
            f"{box.label}: median {format_ns(box.median_ns)}, quartiles {quartiles}, of {box.count:,} steps",
        )
    axes.set_xticks(range(len(stats)), [box.label for box in chart.boxes])
    axes.set_xlabel(chart.x_label, fontsize=9, color=colors["muted"])
    _time_axis(axes, "step", "ns", colors)


def _draw_lines(axes: Axes, chart: LineChart, colors: Colors, tips: dict[str, str]) -> None:
    """Draw lines over one axis, with intervals where they are known; predictions are dashed and hollow."""
    if chart.is_log:
        axes.set_xscale("log", base=2)
    for line in chart.lines:
        _draw_line(axes, chart, line, colors, tips)
    axes.set_xlabel(chart.x_label, fontsize=9, color=colors["muted"])
    if chart.is_log:
        xs = sorted({x for line in chart.lines for x in line.x})
        axes.set_xticks(xs, [_tick(x, chart.x_unit) for x in xs])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value, chart.x_unit))
    _time_axis(axes, chart.y_label, chart.y_unit, colors)
    if ends := [end for line in chart.lines for end in _ends_of(line)]:
        axes.set_ylim(top=1.05 * max(ends) or 1.0)
    if any(line.label for line in chart.lines):
        axes.legend(**_legend(colors, ncols=4))


def _draw_line(axes: Axes, chart: LineChart, line: LineSeries, colors: Colors, tips: dict[str, str]) -> None:
    """Draw one line: its values before smoothing, its intervals, and its points."""
    color = colors[_LINE_COLORS[line.color % len(_LINE_COLORS)]]
    if line.unsmoothed_y:
        axes.plot(line.x, line.unsmoothed_y, color=color, alpha=0.22, linewidth=1)
    known = [
        (x, low, high) for x, low, high in zip(line.x, line.low, line.high, strict=False) if not math.isnan(low + high)
    ]
    if known:
        x, low, high = zip(*known, strict=True)
        axes.vlines(x, low, high, color=color, linewidth=1.2)
    style = "--" if line.style == "predicted" else "-"
    axes.plot(line.x, line.y, style, color=color, linewidth=1.8, label=line.label)
    if line.style != "smooth":
        face = color if line.style == "measured" else colors["surface"]
        for x_, y in zip(line.x, line.y, strict=True):
            (dot,) = axes.plot([x_], [y], "o", markersize=5, color=color, markerfacecolor=face)
            where = f"{_label(x_, chart.x_unit)}, {_label(y, chart.y_unit)}"
            _tip(dot, tips, f"{line.label}: {where}" if line.label else where)


def _ends_of(line: LineSeries) -> list[float]:
    """Return the values that the y axis must cover."""
    faint = sorted(line.unsmoothed_y)
    robust = [faint[int(_ROBUST_SHARE * len(faint))]] if faint else []
    return [y for y in (*line.y, *line.high, *robust) if not math.isnan(y)]


def _time_axis(axes: Axes, label: str, unit: Unit, colors: Colors) -> None:
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label, fontsize=9, color=colors["muted"])
    axes.grid(axis="y", color=colors["grid"])
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value, unit))


def _tick(value: float, unit: Unit) -> str:
    """Return the label of a round value on an axis: ``5 s``, where a measurement would be ``5.00 s``."""
    number, space, of = _label(value, unit).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{of}"


def _label(value: float, unit: Unit) -> str:
    if unit == "ns":
        return "0" if value == 0 else format_ns(value)
    return format_count(int(value)) if unit == "count" and value == int(value) else f"{value:.3g}"


def _legend(colors: Colors, ncols: int) -> dict[str, Any]:
    return {
        "loc": "upper left",
        "bbox_to_anchor": (0, -0.14),
        "ncols": ncols,
        "fontsize": 9,
        "frameon": False,
        "labelcolor": colors["muted"],
    }


def _swatch(label: str, color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=color, label=label)


def _tip(artist: Any, tips: dict[str, str], text: str) -> None:
    name = f"tip-{len(tips)}"
    artist.set_gid(name)
    tips[name] = text


def _height_in(chart: Chart) -> float:
    return 1.4 + _BAR_IN * len(chart.bars) if isinstance(chart, StackedBarChart) else _HEIGHT_IN


def _block(name: str) -> str:
    return f"block-{name.replace('_', '-')}"


def _colors() -> dict[str, str]:
    """Return the colors of the light theme by name."""
    named = theme.css_variables("light")
    return {name.removeprefix("--"): color for name, color in named.items() if color.startswith("#")}


def _render(title: str, charts: Sequence[Chart], colors: Colors, kind: str) -> bytes:
    with _ONE_AT_A_TIME:
        picture, tips = draw(title, charts, colors)
        import matplotlib

        target = io.BytesIO()
        facecolor = "none" if kind == "svg" and not title else colors["surface"]
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "overlapscope"}):
            picture.savefig(
                target, format=kind, dpi=200, facecolor=facecolor, metadata={"Date": None} if kind == "svg" else None
            )
    if kind != "svg":
        return target.getvalue()
    svg = re.sub(
        r'<g id="(tip-\d+)">',
        lambda found: f"{found[0]}<title>{escape(tips[found[1]])}</title>",
        target.getvalue().decode(),
    )
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title or charts[0].title)}" ', 1).encode()

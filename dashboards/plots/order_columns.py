"""Bokeh columns of a window of collectives, from the cells of the lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dashboards.plots.wide_figure import Columns, make_empty_columns
from overlapscope.diagnosis.order_view import CATEGORIES, Cell, Window, collective_category
from overlapscope.text import format_count
from overlapscope.trace.collective_log import Signature

# Vertical layout of the lanes of collectives, in pixels from the top.

_MAX_TALL_LANES: Final = 8
_TALL_PX: Final = 42
_LOW_PX: Final = 26
GAP_PX: Final = 3
"""Gap between two lanes."""


@dataclass(frozen=True, kw_only=True)
class OrderLayout:
    """Lanes of equal height: few have room for two lines of text in a cell, many for one."""

    lanes: int

    @property
    def has_two_lines(self) -> bool:
        """Return whether a cell has room for a second line."""
        return self.lanes <= _MAX_TALL_LANES

    @property
    def lane_px(self) -> int:
        """Return the height of a lane with the gap below it."""
        return _TALL_PX if self.has_two_lines else _LOW_PX

    @property
    def height_px(self) -> int:
        """Return the height of all lanes."""
        return max(1, self.lanes) * self.lane_px

    def cell_px(self, lane: int) -> tuple[float, float]:
        """Return top and bottom of the cells of a lane."""
        top = lane * self.lane_px
        return top + GAP_PX / 2, top + self.lane_px - GAP_PX / 2


CELL_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "alpha", "hatch", "lane", "number")
BOX_COLUMNS: Final = ("left", "right", "top", "bottom")
TEXT_COLUMNS: Final = ("x", "y", "text", "ink")

HOLLOW_INK: Final = len(CATEGORIES)
"""Number of the text color for cells that are not filled."""

_LETTER_PX: Final = 6.3
_SMALL_LETTER_PX: Final = 5.8
_PADDING_PX: Final = 5
_GAP_PX: Final = 2
_MARK_INSET_PX: Final = 2
"""Inset of a mark, so that a cell that is both marked and selected shows both."""
_MIN_COLUMN_PX: Final = 8
"""Column width below which cells touch each other."""
_STEP_LABEL_PX: Final = 58
_FILLED: Final = {"completed": 1.0, "failed": 0.16, "launched": 0.16, "announced": 0.0}
_HATCHES: Final = {"completed": " ", "failed": "x", "launched": "/", "announced": " "}


def build_cell_columns(window: Window, layout: OrderLayout, column_px: float) -> Columns:
    """Return entries as rectangles: filled if completed, else hatched (failed, launched) or hollow (announced)."""
    columns = make_empty_columns(*CELL_COLUMNS)
    for cell in window.cells:
        if cell.entry is None:
            continue
        _add_box(columns, cell.lane, cell.number, layout, column_px)
        columns["category"].append(collective_category(cell.entry.signature))
        columns["alpha"].append(_FILLED[cell.entry.state])
        columns["hatch"].append(_HATCHES[cell.entry.state])
        columns["lane"].append(cell.lane)
        columns["number"].append(cell.number)
    return columns


def build_missing_columns(window: Window, layout: OrderLayout, column_px: float) -> Columns:
    """Return the cells where a rank has nothing in its log, while others do."""
    columns = make_empty_columns(*BOX_COLUMNS)
    for cell in window.cells:
        if cell.entry is None:
            _add_box(columns, cell.lane, cell.number, layout, column_px)
    return columns


def build_differing_columns(window: Window, layout: OrderLayout, column_px: float) -> Columns:
    """Return the entries that differ from those of most ranks at the same number."""
    columns = make_empty_columns(*BOX_COLUMNS)
    for cell in window.cells:
        if cell.difference is not None:
            _add_box(columns, cell.lane, cell.number, layout, column_px, inset_px=_MARK_INSET_PX)
    return columns


def build_text_columns(window: Window, layout: OrderLayout, column_px: float) -> tuple[Columns, Columns]:
    """Return the name of each cell, and below in smaller letters its subject, where there is room."""
    names, subjects = make_empty_columns(*TEXT_COLUMNS), make_empty_columns(*TEXT_COLUMNS)
    room_px = column_px - 2 * _PADDING_PX
    for cell in window.cells if room_px >= _LETTER_PX else ():
        if cell.entry is None:
            continue
        signature = cell.entry.signature
        top, bottom = layout.cell_px(cell.lane)
        ink = collective_category(signature) if cell.entry.state == "completed" else HOLLOW_INK
        x = cell.number - 0.5 + _PADDING_PX / column_px
        middle = (top + bottom) / 2
        text = next((text for text in list_name_forms(signature) if len(text) * _LETTER_PX <= room_px), "")
        small = next((text for text in list_subject_forms(cell) if len(text) * _SMALL_LETTER_PX <= room_px), "")
        if not layout.has_two_lines:
            small = ""
        if text:
            _add(names, x=x, y=middle - 8 if small else middle, text=text, ink=ink)
        if small:
            _add(subjects, x=x, y=middle + 6.5, text=small, ink=ink)
    return names, subjects


def build_step_columns(window: Window, column_px: float) -> Columns:
    """Return where steps begin; labels are left out where they would overlap."""
    columns = make_empty_columns("x", "label")
    labeled = float("-inf")
    for number, step in window.steps:
        is_clear = (number - labeled) * column_px >= _STEP_LABEL_PX
        labeled = number if is_clear else labeled
        _add(columns, x=number - 0.5, label=f"step {step}" if is_clear else "")
    return columns


_SHORT_OPS: Final = {
    "all_reduce": ("reduce", "AR"),
    "broadcast": ("bcast", "BC"),
    "all_gather": ("gather", "AG"),
    "reduce_scatter": ("scatter", "RS"),
    "all_to_all": ("a2a",),
    "barrier": ("bar",),
    "monitored_barrier": ("barrier", "bar"),
}


def list_name_forms(signature: Signature) -> list[str]:
    """Return names of a collective in a cell, from the clearest to the shortest."""
    if signature.role == "bucket":
        return [f"bucket {signature.bucket}", f"b {signature.bucket}", str(signature.bucket)]
    return [signature.op, *_SHORT_OPS.get(signature.op, ())]


def list_subject_forms(cell: Cell) -> list[str]:
    """Return texts on a collective, longest first: its difference, or its tensor and number of elements."""
    if cell.entry is None:
        return []
    signature = cell.entry.signature
    if cell.difference in ("step", "batch"):
        number = getattr(cell.entry, cell.difference)
        return [f"{cell.difference} {number}", str(number)]
    size = format_count(signature.elements) if signature.elements else ""
    if signature.role == "bucket":
        return [f"{size} elements", size]
    what = signature.role if signature.role != "user" else ""
    if not what and signature.names:
        what = signature.names[0] + (f" +{len(signature.names) - 1}" if len(signature.names) > 1 else "")
    last = what.rpartition(".")[2]
    return [form for form in (f"{what} · {size}" if what and size else "", what, last, size) if form]


def _add_box(
    columns: Columns, lane: int, number: int, layout: OrderLayout, column_px: float, inset_px: float = 0
) -> None:
    gap = (_GAP_PX / 2 + inset_px) / column_px if column_px >= _MIN_COLUMN_PX else 0
    top, bottom = layout.cell_px(lane)
    columns["left"].append(number - 0.5 + gap)
    columns["right"].append(number + 0.5 - gap)
    columns["top"].append(top + inset_px)
    columns["bottom"].append(bottom - inset_px)


def _add(columns: Columns, **row: Any) -> None:
    for name, value in row.items():
        columns[name].append(value)

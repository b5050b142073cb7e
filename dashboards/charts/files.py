"""Pictures of experiments as files."""

from __future__ import annotations

from pathlib import Path

from dashboards.charts.drawing import draw_figure
from dashboards.charts.png import png_file
from dashboards.charts.svg import svg_file
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import FigureContent


def write_pictures(folder: Path, name: str, title: str, figure: FigureContent) -> list[Path]:
    """Write a figure as NAME.svg and NAME.png.

    Raises:
        OverlapScopeError: it can't be written there, or is there already.
    """
    paths = [folder / f"{name}{suffix}" for suffix in (".svg", ".png")]
    for path in paths:
        if path.exists():
            raise OverlapScopeError(f"{path}: already exists: remove it, or give another folder with -o")
    scene = draw_figure(title, figure)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, (svg_file(scene).encode(), png_file(scene)), strict=True):
            path.write_bytes(content)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be written to ({error.strerror})") from None
    return paths

"""Scenes as SVG: in a page in its theme, in a file in the light one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from markupsafe import escape

from dashboards import theme
from dashboards.charts.scene import Dot, Path, Rectangle, Scene, Shape, Text

MARGIN_PX: Final = 20
_DASHES: Final = "6 4"

Color = Callable[[str], str]


def svg_for_page(scene: Scene) -> str:
    """The element, as wide as there is room, in the colors of the page."""
    head = f'<svg viewBox="0 0 {scene.width:g} {scene.height:g}" role="img" aria-label="{escape(scene.title)}">'
    return head + "".join(_element(shape, lambda name: f"var(--{name})") for shape in scene.shapes) + "</svg>"


def svg_file(scene: Scene) -> str:
    """A whole file, on the paper of the light theme."""
    variables = theme.css_variables("light")
    width, height = scene.width + 2 * MARGIN_PX, scene.height + 2 * MARGIN_PX
    paper = Rectangle(x=-MARGIN_PX, y=-MARGIN_PX, width=width, height=height, fill="surface")
    shapes = "\n".join(_element(shape, lambda name: variables[f"--{name}"]) for shape in (paper, *scene.shapes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="{-MARGIN_PX} {-MARGIN_PX} {width:g} {height:g}" font-family="system-ui, sans-serif" role="img" '
        f'aria-label="{escape(scene.title)}">\n'
        f"{shapes}\n</svg>\n"
    )


def _element(shape: Shape, color: Color) -> str:
    if isinstance(shape, Rectangle):
        fill = f'fill="{color(shape.fill)}"' if shape.fill else 'fill="none" pointer-events="all"'
        edge = f' stroke="{color(shape.edge)}"' if shape.edge else ""
        box = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
        return _with_tip("rect", f"{box} {fill}{edge}", shape.tip)
    if isinstance(shape, Dot):
        place = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}"'
        return _with_tip("circle", f'{place} fill="{color(shape.fill)}"', shape.tip)
    if isinstance(shape, Path):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        dashes = f' stroke-dasharray="{_DASHES}"' if shape.is_dashed else ""
        opacity = f' opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        line = f'stroke="{color(shape.color)}" stroke-width="{shape.width:g}"{dashes}{opacity}'
        return f'<polyline points="{points}" fill="none" {line}/>'
    return _text(shape, color)


def _text(shape: Text, color: Color) -> str:
    turned = f' transform="rotate(-90 {shape.x:g} {shape.y:g})"' if shape.is_upright else ""
    bold = ' font-weight="600"' if shape.is_bold else ""
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" fill="{color(shape.color)}"'
    return f"<text {place}{anchor}{bold}{turned}>{escape(shape.text)}</text>"


def _with_tip(name: str, attributes: str, tip: str) -> str:
    return f"<{name} {attributes}><title>{escape(tip)}</title></{name}>" if tip else f"<{name} {attributes}/>"

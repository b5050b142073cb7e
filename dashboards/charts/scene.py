"""A drawing as a list of shapes. What it is drawn on, and in which theme, is decided later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A filled area. Colors are names of the custom properties of ``theme.css_variables``."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    tip: str = ""
    """What is said of it when it is pointed at."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """Straight lines from point to point."""

    points: tuple[Point, ...]
    color: str
    width: float = 1.0
    is_dashed: bool = False
    opacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A measured point."""

    x: float
    y: float
    fill: str
    radius: float = 4.0
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One line of text; y is its baseline."""

    x: float
    y: float
    text: str
    color: str = "muted"
    anchor: Anchor = "start"
    size: float = 12.0
    is_bold: bool = False
    is_upright: bool = False
    """Whether it is read from bottom to top."""


Shape = Rectangle | Path | Dot | Text


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A drawing of a size, in pixels."""

    title: str
    """For those who can't see it."""
    width: float
    height: float
    shapes: tuple[Shape, ...] = field(default=(), repr=False)


def below(title: str, scenes: Iterable[Scene], gap: float = 24.0) -> Scene:
    """Drawings below each other, as one."""
    shapes: list[Shape] = []
    width = height = 0.0
    for scene in scenes:
        top = height + gap * bool(height)
        shapes += [moved(shape, top) for shape in scene.shapes]
        width, height = max(width, scene.width), top + scene.height
    return Scene(title=title, width=width, height=height, shapes=tuple(shapes))


def moved(shape: Shape, down: float) -> Shape:
    """The same shape further down."""
    if isinstance(shape, Path):
        return replace(shape, points=tuple((x, y + down) for x, y in shape.points))
    return replace(shape, y=shape.y + down)

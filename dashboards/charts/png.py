"""Scenes as PNG, without a browser: with Pillow, which Bokeh needs anyway, and the font that comes with it."""

from __future__ import annotations

import io
from functools import lru_cache
from itertools import pairwise
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from dashboards import theme
from dashboards.charts.scene import Dot, Path, Point, Rectangle, Scene, Text
from dashboards.charts.svg import MARGIN_PX

_SCALE: Final = 2
"""Pixels of the file for each of the scene."""
_SMOOTH: Final = 2
"""Drawn so many times larger and scaled down: Pillow draws lines with hard edges."""
_DASH_PX: Final = (6.0, 4.0)
_ANCHORS: Final = {"start": "ls", "middle": "ms", "end": "rs"}


def png_file(scene: Scene) -> bytes:
    """A whole file, on the paper of the light theme."""
    factor = _SCALE * _SMOOTH
    variables = theme.css_variables("light")
    size = round((scene.width + 2 * MARGIN_PX) * factor), round((scene.height + 2 * MARGIN_PX) * factor)
    canvas = _Canvas(Image.new("RGB", size, variables["--surface"]), factor, variables)
    for shape in scene.shapes:
        canvas.draw(shape)
    buffer = io.BytesIO()
    small = canvas.image.resize((size[0] // _SMOOTH, size[1] // _SMOOTH), Image.Resampling.LANCZOS)
    small.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


class _Canvas:
    """An image, in the coordinates of a scene."""

    def __init__(self, image: Image.Image, factor: int, variables: dict[str, str]) -> None:
        self.image = image
        self._draw = ImageDraw.Draw(image)
        self._factor = factor
        self._variables = variables

    def draw(self, shape: Rectangle | Path | Dot | Text) -> None:
        """Draw one shape."""
        if isinstance(shape, Rectangle):
            if shape.fill:
                corners = [self._at(shape.x, shape.y), self._at(shape.x + shape.width, shape.y + shape.height)]
                edge = self._color(shape.edge) if shape.edge else None
                self._draw.rectangle(corners, fill=self._color(shape.fill), outline=edge, width=self._factor)
        elif isinstance(shape, Dot):
            self._draw.circle(self._at(shape.x, shape.y), shape.radius * self._factor, fill=self._color(shape.fill))
        elif isinstance(shape, Path):
            color = self._mixed(shape.color, shape.opacity)
            for points in dashes(shape.points) if shape.is_dashed else [shape.points]:
                line = [self._at(x, y) for x, y in points]
                self._draw.line(line, fill=color, width=round(shape.width * self._factor), joint="curve")
        else:
            self._text(shape)

    def _text(self, shape: Text) -> None:
        font = _font(shape.size * self._factor)
        color, bold = self._color(shape.color), self._factor // 3 if shape.is_bold else 0
        if not shape.is_upright:
            anchor = _ANCHORS[shape.anchor]
            self._draw.text(self._at(shape.x, shape.y), shape.text, color, font, anchor, stroke_width=bold)
            return
        _left, _top, right, bottom = (round(edge) for edge in font.getbbox(shape.text))
        strip = Image.new("L", (right + 2, bottom + 2), 0)
        ImageDraw.Draw(strip).text((0, 0), shape.text, 255, font)
        turned = strip.rotate(90, expand=True)
        x, y = self._at(shape.x, shape.y)
        self.image.paste(color, (round(x - turned.width), round(y - turned.height / 2)), turned)

    def _at(self, x: float, y: float) -> Point:
        return (x + MARGIN_PX) * self._factor, (y + MARGIN_PX) * self._factor

    def _color(self, name: str) -> str:
        return self._variables[f"--{name}"]

    def _mixed(self, name: str, opacity: float) -> str | tuple[int, ...]:
        if opacity >= 1:
            return self._color(name)
        over, under = (tuple(int(self._color(each)[at : at + 2], 16) for at in (1, 3, 5)) for each in (name, "surface"))
        return tuple(round(opacity * a + (1 - opacity) * b) for a, b in zip(over, under, strict=True))


@lru_cache(maxsize=16)
def _font(size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # always, if a size is given
    return font


def dashes(points: tuple[Point, ...]) -> list[tuple[Point, Point]]:
    """The dashes of a line, which go on around its corners."""
    found: list[tuple[Point, Point]] = []
    is_drawn, left = True, _DASH_PX[0]
    for (x, y), (end_x, end_y) in pairwise(points):
        length = ((end_x - x) ** 2 + (end_y - y) ** 2) ** 0.5
        done = 0.0
        while length - done > 1e-9:
            part = min(left, length - done)
            if is_drawn:
                ends = [(x + (end_x - x) * at / length, y + (end_y - y) * at / length) for at in (done, done + part)]
                found.append((ends[0], ends[1]))
            done, left = done + part, left - part
            if left <= 1e-9:
                is_drawn = not is_drawn
                left = _DASH_PX[0 if is_drawn else 1]
    return found

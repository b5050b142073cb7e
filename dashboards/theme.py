"""The colors of pages and plots, in both themes; their meaning is defined only here.

Saturated hues belong to buckets, and can be distinguished with any kind of color vision (the palette of Okabe and Ito,
with a violet and a brown for its vermilion and black). Phases are muted blues and grays, so that buckets are prominent,
with one exception: finalize, the wait for gradients that were not hidden, is red, as is exposed communication wherever
it is shown; printed in gray it is darker (in the dark theme lighter) than they are. In lanes of collectives, red marks
differences between ranks; there, DDP's own traffic other than buckets is muted, and collectives that users launch are
the darkest in the light theme and the lightest in the dark one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

from bokeh.model import Model
from bokeh.palettes import Magma256

from overlapscope.breakdown.lanes import BUCKET_SLOTS, CATEGORIES, PATTERNS
from overlapscope.diagnosis import order_view

ThemeName = Literal["light", "dark"]

SHADES: Final = 15
"""Number of shades from idle to always busy; with 17 categories they fit into a byte."""

HATCHES: Final = ("left_diagonal_line", "dot", "diagonal_cross")
"""Bokeh's names of the patterns of ``overlapscope.breakdown.lanes.PATTERNS`` except the plain one.

They are drawn in the color of text on spans. Not everybody could distinguish paler or darker hues of the eight colors.
"""
assert len(HATCHES) == PATTERNS - 1

LATENESS_SHADES: Final = 255
"""Number of shades from on time to late; with the transparent one they fit into a byte."""

NUMBER_COLORS: Final = {
    "step": "accent",
    "compute": "span-backward",
    "exposed": "exposed",
    "overlap": "hidden",
    "fixed": "exposed",
    "equal_ranks": "hidden",
    "best_transfers": "span-bucket-0",
    "gain": "hidden",
    "buckets": "span-bucket-0",
}
"""Color of each number at the head of a page, by its key, as ``css_variables`` names it."""

_INK: Final[Mapping[ThemeName, Mapping[str, str]]] = {
    "light": {
        "page": "#f6f7f9",
        "surface": "#ffffff",
        "ink": "#16191d",
        "muted": "#5d6673",
        "faint": "#97a0ad",
        "line": "#dfe3e8",
        "grid": "#e9ecf0",
        "accent": "#1f5fbf",
        "hidden": "#2f7d5b",
        "exposed": "#c24137",
    },
    "dark": {
        "page": "#0e1116",
        "surface": "#161b22",
        "ink": "#e8ebf0",
        "muted": "#9aa4b2",
        "faint": "#687282",
        "line": "#2a313b",
        "grid": "#222831",
        "accent": "#78aef5",
        "hidden": "#56b98c",
        "exposed": "#ef6f64",
    },
}

_SPANS: Final[Mapping[ThemeName, tuple[str, ...]]] = {
    "light": (
        *("#e0d7c3", "#b9d0ea", "#86aadb", "#f3c998", "#a7b0bd", "#b7cfc0", "#d9cfe0"),
        *("#2b7bba", "#e8a317", "#1f9e78", "#d07fb0", "#7fc4ec", "#8a6bc2", "#d3c83a", "#a8744a"),
        *("#8b95a3", "#d35c52"),
    ),
    "dark": (
        *("#6d6655", "#6e8cb0", "#4a76ad", "#b07f4c", "#76808e", "#6d8f7c", "#7a6b86"),
        *("#4a9bd9", "#e8a92e", "#2fb88c", "#d98bbb", "#8fd0f2", "#a386dd", "#ddd24c", "#bf8a5e"),
        *("#7b8594", "#f7938a"),
    ),
}
assert all(len(colors) == len(CATEGORIES) for colors in _SPANS.values())

_SPAN_BLOCKS: Final = ("data_wait", "forward", "backward", "exposed", "optimizer", "evaluation")
_OTHER_BLOCKS: Final[Mapping[ThemeName, Mapping[str, str]]] = {
    "light": {
        "buffers": "#8b95a3",
        "inter_phase": "#ccd2da",
        "bucket_copies": "#93a6bd",
        "collectives": "#d9a05b",
        "gc": "#8a6bc2",
        "unattributed": "#ffffff",
    },
    "dark": {
        "buffers": "#7b8594",
        "inter_phase": "#66707e",
        "bucket_copies": "#73869e",
        "collectives": "#c58f4f",
        "gc": "#a386dd",
        "unattributed": "#161b22",
    },
}
"""Colors of the blocks that the timeline has no spans of."""

_FIRST_BUCKET: Final = CATEGORIES.index("bucket_0")

_OTHER_COLLECTIVES: Final[Mapping[ThemeName, tuple[str, ...]]] = {
    "light": (
        *("#bdb5a5", "#d3cab8", "#b3bfcd", "#b7cfc0", "#cbbcd6"),
        *("#33517a", "#4d3a1f", "#1d5f58", "#653e75", "#4a4f9c", "#30363f", "#5d6673"),
    ),
    "dark": (
        *("#6d6a60", "#837c6c", "#66717f", "#5f7f70", "#7d6c8d"),
        *("#d9e2f8", "#f4e2c6", "#cdf1e9", "#efdcf7", "#dcdde2", "#eceff4", "#c6ccd5"),
    ),
}
"""Colors of ``overlapscope.diagnosis.order_view.CATEGORIES`` that are not buckets: DDP's own, then the user's."""


def ink(theme: ThemeName) -> Mapping[str, str]:
    """Return the colors of the page by their role: page, surface, ink, muted, line, accent ..."""
    return _INK[theme]


def span_colors(theme: ThemeName) -> tuple[str, ...]:
    """Return the color of each category of ``overlapscope.breakdown.lanes.CATEGORIES``."""
    return _SPANS[theme]


def block_colors(theme: ThemeName) -> dict[str, str]:
    """Return the color of each block of ``overlapscope.breakdown.breakdown.BLOCKS``; spans as in the timeline."""
    spans = {name: _SPANS[theme][CATEGORIES.index(name)] for name in _SPAN_BLOCKS}
    loop = {"host_loop": _SPANS[theme][CATEGORIES.index("loop")]}
    return {**spans, **loop, **_OTHER_BLOCKS[theme]}


def collective_colors(theme: ThemeName) -> tuple[str, ...]:
    """Return the color of each of ``overlapscope.diagnosis.order_view.CATEGORIES``; buckets as in the timeline."""
    return (*_SPANS[theme][_FIRST_BUCKET : _FIRST_BUCKET + BUCKET_SLOTS], *_OTHER_COLLECTIVES[theme])


def text_color_on(color: str) -> str:
    """Return black or white, whichever has more contrast with a color: at least 4.58 for any color."""
    channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    luminance = sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def span_text_colors(theme: ThemeName) -> tuple[str, ...]:
    """Return the color of text on each of ``span_colors``."""
    return tuple(map(text_color_on, span_colors(theme)))


def collective_backgrounds(theme: ThemeName) -> tuple[str, ...]:
    """Return the background colors of text on collectives: ``collective_colors``, then that of cells without fill."""
    return (*collective_colors(theme), _INK[theme]["surface"])


def collective_text_colors(theme: ThemeName) -> tuple[str, ...]:
    """Return the color of text on each of ``collective_backgrounds``."""
    return (*map(text_color_on, collective_colors(theme)), _INK[theme]["ink"])


def shade_palette(theme: ThemeName) -> list[str]:
    """Return the palette of timelines, whose index is ``category * SHADES + shade``: from the surface to the category.

    Shade 0 is transparent. Shade 1 is strong enough to be visible, so that one short span in a wide pixel is not lost.
    Example: with 15 shades, index 0 is transparent, 14 the full color of category 0, and 15 transparent again.
    """
    surface = _INK[theme]["surface"]
    palette = []
    for color in _SPANS[theme]:
        palette.append("#00000000")
        palette += [_mix_colors(surface, color, 0.22 + 0.78 * shade / (SHADES - 1)) for shade in range(1, SHADES)]
    return palette


def lateness_palette(theme: ThemeName) -> list[str]:
    """Return the color of each shade of lateness, 0 to ``LATENESS_SHADES``: later is further from the surface.

    Shade 0 is transparent. The others are a part of Magma, whose equal steps look equally large with any kind of color
    vision; its ends, which are close to the surface of one theme and to the ink of the other, are left out.
    """
    first, last = {"light": (252, 40), "dark": (48, 252)}[theme]
    palette_indices = (round(first + (last - first) * step / (LATENESS_SHADES - 1)) for step in range(LATENESS_SHADES))
    return ["#00000000", *(Magma256[palette_index] for palette_index in palette_indices)]


@cache
def browser_colors() -> dict[str, dict[str, Any]]:
    """Return all colors that the page's script needs to paint plots, for both themes; cached, so don't modify it."""
    names: tuple[ThemeName, ...] = ("light", "dark")
    return {
        name: {
            **_INK[name],
            "span_colors": list(_SPANS[name]),
            "span_text_colors": list(span_text_colors(name)),
            "shade_palette": shade_palette(name),
            "lateness_palette": lateness_palette(name),
            "collective_colors": list(collective_colors(name)),
            "collective_backgrounds": list(collective_backgrounds(name)),
            "collective_text_colors": list(collective_text_colors(name)),
        }
        for name in names
    }


def css_variables(theme: ThemeName) -> dict[str, str]:
    """Return CSS custom properties: ``--ink``, ``--line`` ..., and ``--span-backward`` ... for each category.

    Blocks of the breakdown are ``--block-exposed`` ..., collectives ``--collective-barrier`` ...; the text color on
    each is ``--on-block-exposed`` ... ``--late-scale`` is a gradient from on time to late.
    """
    late = ", ".join([_INK[theme]["surface"], *lateness_palette(theme)[1 :: LATENESS_SHADES // 16]])
    colors = {
        **{f"span-{name}": color for name, color in zip(CATEGORIES, _SPANS[theme], strict=True)},
        **{f"block-{name}": color for name, color in block_colors(theme).items()},
        **{
            f"collective-{name}": color
            for name, color in zip(order_view.CATEGORIES, collective_colors(theme), strict=True)
        },
    }
    named = {**_INK[theme], **colors, **{f"on-{name}": text_color_on(color) for name, color in colors.items()}}
    return {
        **{f"--{name.replace('_', '-')}": color for name, color in named.items()},
        "--late-scale": f"linear-gradient(to right, {late})",
    }


def paint(model: Model, **roles: str) -> None:
    """Set color properties of a Bokeh model by role, now for the light theme and in the browser for the one in use.

    Example::

        paint(figure.xaxis[0], axis_line_color="line", major_label_text_color="muted")
    """
    light = browser_colors()["light"]
    model.update(**{name: light[role] for name, role in roles.items()})
    model.tags = [*model.tags, {"paint": roles}]


def _mix_colors(background: str, color: str, amount: float) -> str:
    under, over = (int(text[1:], 16) for text in (background, color))
    channels = [round((under >> shift & 255) * (1 - amount) + (over >> shift & 255) * amount) for shift in (16, 8, 0)]
    return "#" + "".join(f"{channel:02x}" for channel in channels)

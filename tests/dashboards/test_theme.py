"""Colors that mean different things can be told apart, on either theme and with any common color vision."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards import assets
from dashboards.theme import (
    LATENESS_SHADES,
    SHADES,
    block_colors,
    browser_colors,
    collective_colors,
    css_variables,
    ink,
    lateness_palette,
    shade_palette,
    span_colors,
    text_color_on,
)
from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.lanes import CATEGORIES
from overlapscope.diagnosis import order_view

ASSETS = Path(assets.__file__).parent

# Simulation of full dichromacy in linear RGB (Viénot, Brettel and Mollon, 1999; tritanopia after Machado, 2009).
VISION = {
    "usual": np.eye(3),
    "protan": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deutan": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritan": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(color: str) -> np.ndarray:
    srgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(VISION[vision] @ linear(one)) - lab(VISION[vision] @ linear(other))))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_buckets_that_follow_each_other_differ_clearly(theme, vision):
    colors = [c for name, c in zip(CATEGORIES, span_colors(theme), strict=True) if name.startswith("bucket_")]
    for one, other in itertools.pairwise([*colors, colors[0]]):
        assert distance(one, other, vision) > 18


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_waits_and_exposed_communication_stand_out_from_the_phases_beside_it(theme):
    colors = dict(zip(CATEGORIES, span_colors(theme), strict=True))
    for vision, neighbor in itertools.product(VISION, ("backward", "optimizer")):
        assert distance(colors["finalize"], colors[neighbor], vision) > 18
    for vision, neighbor in itertools.product(VISION, ("forward", "backward", "finalize", "optimizer")):
        assert distance(colors["exposed"], colors[neighbor], vision) > 18


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_exposed_communication_stands_out_in_gray(theme):
    spans, blocks = dict(zip(CATEGORIES, span_colors(theme), strict=True)), block_colors(theme)
    assert spans["exposed"] == blocks["exposed"], "one color on all pages"

    def apart(one: str, other: str) -> float:
        return abs(lab(linear(one))[0] - lab(linear(other))[0])

    for neighbor in ("forward", "backward", "optimizer"):
        assert apart(spans["exposed"], spans[neighbor]) > 12, neighbor
    for neighbor in ("forward", "inter_phase", "backward", "bucket_copies", "optimizer"):
        assert apart(blocks["exposed"], blocks[neighbor]) > 12, neighbor


ROLES_OF_TEXT = {
    role
    for file in ASSETS.glob("*.css")
    for rule in re.findall(r"([^{}]+)\{([^{}]*)\}", file.read_text())
    if ":disabled" not in rule[0] and "background: var(--accent)" not in rule[1]
    for role in re.findall(r"(?<![\w-])color: var\(--(\w+)\)", rule[1])
}
"""Roles of colors that styles give to text, but for buttons that can't be pressed, and those on the accent."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(theme):
    colors = ink(theme)
    assert {"ink", "muted", "exposed"} <= ROLES_OF_TEXT
    for background, role in itertools.product(("page", "surface"), ROLES_OF_TEXT & colors.keys()):
        assert contrast(colors[role], colors[background]) > (7 if role == "ink" else 4.5), (role, background)
    assert contrast(colors["surface"], colors["accent"]) > 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_can_be_read_on_every_span_block_and_collective(theme):
    """Text on a canvas is invisible to whoever checks a page, so its colors are."""
    painted, css = browser_colors()[theme], css_variables(theme)
    for inks, grounds in (("span_text_colors", "span_colors"), ("collective_text_colors", "collective_backgrounds")):
        assert len(painted[inks]) == len(painted[grounds]) >= len(CATEGORIES) - 3
        for text, ground in zip(painted[inks], painted[grounds], strict=True):
            assert contrast(text, ground) >= 4.5, (inks, text, ground)
    named = {name: color for name, color in css.items() if name.startswith(("--span-", "--block-", "--collective-"))}
    assert len(named) == len(CATEGORIES) + len(BLOCKS) + len(order_view.CATEGORIES)
    for name, color in named.items():
        assert contrast(css[name.replace("--", "--on-", 1)], color) >= 4.5, name


@given(st.integers(0, 0xFFFFFF))
def test_one_of_black_and_white_can_be_read_on_any_color(color):
    ground = f"#{color:06x}"
    assert contrast(text_color_on(ground), ground) >= 4.58
    assert contrast(text_color_on(ground), ground) == max(contrast(text, ground) for text in ("#000000", "#ffffff"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_slightest_shade_can_be_seen(theme):
    palette = shade_palette(theme)
    assert len(palette) == len(CATEGORIES) * SHADES <= 256
    for category in range(len(CATEGORIES)):
        assert distance(palette[category * SHADES + 1], ink(theme)["surface"], "usual") > 4


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_later_the_further_from_the_surface_in_even_steps(theme, vision):
    palette = lateness_palette(theme)
    assert len(palette) == LATENESS_SHADES + 1 <= 256
    assert palette[0] == "#00000000"
    shades = [lab(VISION[vision] @ linear(color)) for color in palette[1::32]]
    lightness = np.diff([shade[0] for shade in shades])
    assert np.all(lightness < -4 if theme == "light" else lightness > 4)
    distances = [np.linalg.norm(one - other) for one, other in itertools.pairwise(shades)]
    assert min(distances) > 5
    assert max(distances) < 4 * min(distances)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_least_lateness_can_be_seen(theme):
    assert distance(lateness_palette(theme)[1], ink(theme)["surface"], "usual") > 8


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_collectives_of_the_user_stand_out_from_those_of_ddp(theme, vision):
    colors = dict(zip(order_view.CATEGORIES, collective_colors(theme), strict=True))
    users = list(order_view.CATEGORIES[order_view.CATEGORIES.index("all_reduce") :])
    for user in users:
        for ddp in colors.keys() - set(users):
            assert distance(colors[user], colors[ddp], vision) > 10, (user, ddp)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_mark_of_a_difference_stands_out_from_the_line_around_it(theme, vision):
    assert distance(ink(theme)["exposed"], ink(theme)["surface"], vision) > 40

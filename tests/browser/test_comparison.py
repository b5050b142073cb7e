"""The page of a comparison, opened as the file that it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.browser.conftest import OpenPage
from tests.commands.command_line import overlapscope
from tests.synthetic import write_straggling_recording

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_opens_without_a_server_in_the_theme_of_the_system(tmp_path: Path, open_page: OpenPage, theme: str) -> None:
    for name, later_us in (("base", 0), ("new", 500)):
        luck = random.Random(name)
        late_us = [later_us + luck.randrange(100) for _ in range(30)]
        write_straggling_recording(tmp_path / name, late_us=lambda _, step, late=late_us: late[step], ranks=2, steps=30)
    ran = overlapscope("compare", tmp_path / "base", tmp_path / "new", "--format", "html")
    assert ran.returncode == 3
    (tmp_path / "comparison.html").write_text(ran.stdout)
    page = open_page((tmp_path / "comparison.html").as_uri(), theme)
    assert page.locator("html").get_attribute("data-theme") == theme
    assert page.get_by_role("heading", level=1).inner_text().startswith("Slower: ")
    zero, step = (page.locator(".waterfall").locator(at).bounding_box() for at in ("s >> nth=0", ".total i"))
    assert zero is not None
    assert step is not None
    assert step["width"] > 100
    assert abs(step["x"] - zero["x"]) < 100
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

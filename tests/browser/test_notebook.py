"""The example notebook, as somebody runs it in JupyterLab."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from overlapscope import open as open_run
from tests.browser.conftest import START_LIMIT_S, OpenPage
from tests.browser.test_comparison import COLORS
from tests.synthetic import write_straggling_recording

pytestmark = [
    pytest.mark.browser,
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed: pip install '.[notebook]'"
    ),
]

EXAMPLE: Final = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
QUIET: Final = (
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.news_url=",
    "--LabApp.extension_manager=readonly",
)
"""So that it asks nobody for newer versions, news or extensions."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example beside the recording that it opens: four ranks, of which rank 1 is 3 ms late in every step."""
    folder = tmp_path / "work"
    write_straggling_recording(folder / "traces", late_us=lambda rank, _: 3_000 * (rank == 1), ranks=4, steps=40)
    shutil.copy(EXAMPLE, folder)
    return folder


@contextlib.contextmanager
def jupyter(folder: Path, home: Path) -> Iterator[str]:
    """The address of JupyterLab over a folder, with settings of nobody."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", *QUIET]
    names = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = os.environ | {name: str(home / name.lower()) for name in names}
    home.mkdir()
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 2 * START_LIMIT_S
        while not is_there(f"http://127.0.0.1:{port}/api"):
            assert server.poll() is None, (home / "log").read_text()
            assert time.monotonic() < until, "JupyterLab did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()  # its kernels end with it
        server.wait(30)


def is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def run_all_cells(page: Page, count: int) -> None:
    """Run the cells of the notebook that is open, by the menu, until the last one of ``count`` has ended.

    Cells that are run before the kernel is there are not run later.
    """
    expect(page.get_by_role("button", name="| Idle")).to_be_visible(timeout=120_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    expect(page.locator(".jp-InputArea-prompt", has_text=f"[{count}]:")).to_be_visible(timeout=180_000)


def test_every_cell_runs_and_what_it_draws_is_to_be_seen(open_page: OpenPage, folder: Path, tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(EXAMPLE.read_text())["cells"] if cell["cell_type"] == "code"]
    with jupyter(folder, tmp_path / "home") as url:
        page = open_page(f"{url}/lab/tree/{EXAMPLE.name}")
        page.set_viewport_size({"width": 1300, "height": 6000})  # cells out of sight are not drawn
        expect(page.locator(".jp-CodeCell")).to_have_count(len(cells), timeout=120_000)
        run_all_cells(page, len(cells))
        expect(page.locator("[data-mime-type$='jupyter.error'], [data-mime-type$='jupyter.stderr']")).to_have_count(0)

        breakdown = page.locator(".jp-OutputArea-output", has=page.locator("table")).first
        expect(breakdown).to_contain_text(open_run(folder / "traces").breakdown().sentence)
        expect(breakdown.locator("tbody tr").first).to_contain_text("data wait")
        step = page.frame_locator("iframe[title=timeline]").locator("#lanes_0 canvas").nth(2)
        expect(step).to_be_visible()
        assert step.evaluate(COLORS) > 20
        curve = page.frame_locator("iframe[title=buckets]").locator(".bk-Figure canvas").first
        expect(curve).to_be_visible()
        box = curve.bounding_box()
        assert box is not None
        assert box["width"] > 300

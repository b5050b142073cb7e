"""``overlapscope record --metrics``: a file for node_exporter, while the training goes on and when it is over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from overlapscope.cli import metrics_process
from overlapscope.interop.open_metrics import compute_metrics_text
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import JOINING_FILE
from tests.cli.command_line import overlapscope
from tests.ordered import end, steps, write_order
from tests.synthetic import write_recording

TRAINER = """
import os, sys, time
from pathlib import Path
from tests.synthetic import write_recording
write_recording(Path(os.environ["OVERLAPSCOPE_TRACE"]), ranks=2, steps=5, close=False)
until = time.monotonic() + 100
while not Path(sys.argv[1]).exists():
    assert time.monotonic() < until
    time.sleep(0.05)
print(Path(sys.argv[1]).read_text())
"""
"""Goes on until there are metrics of it, and prints them."""


def values(text: str) -> dict[str, float]:
    return {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}


def test_it_is_there_while_the_training_goes_on_and_once_more_when_it_is_over(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    ran = overlapscope("record", "-o", tmp_path / "a", "--metrics", file, "--", sys.executable, "-c", TRAINER, file)
    assert ran.returncode == 0, ran.stderr
    before, after = values(ran.stdout), values(file.read_text())
    assert (before["overlapscope_live"], after["overlapscope_live"]) == (1, 0)
    assert before["overlapscope_latest_step"] == after["overlapscope_latest_step"] == 4
    assert 'run="a"' in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_file_of_an_earlier_run_is_replaced_and_no_other(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours.prom", tmp_path / "others.prom"
    ours.write_text(compute_metrics_text(write_recording(tmp_path / "earlier"), is_live=False))
    others.write_text("# TYPE node_load1 gauge\nnode_load1 0.5\n")
    train = ["--", sys.executable, "-c", "raise SystemExit(3)"]
    assert overlapscope("record", "-o", tmp_path / "a", "--metrics", ours, *train).returncode == 3
    assert not ours.exists()  # nothing was recorded, and nobody takes the old figures for new ones
    ran = overlapscope("record", "-o", tmp_path / "b", "--metrics", others, *train)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert others.read_text().startswith("# TYPE node_load1")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("members", "is_judged"), [((0, 1), True), ((0, 1, 2, 3), False)])
def test_with_the_ranks_of_one_host_alone_nothing_is_said_of_faults(
    tmp_path: Path, members: tuple[int, ...], is_judged: bool
) -> None:
    write_recording(tmp_path, world_size=len(members))
    write_order(tmp_path, {0: steps(3), 1: steps(3)}, members=members)
    end(tmp_path, (0, 1))
    known = values(compute_metrics_text(tmp_path, is_live=False))
    assert ("overlapscope_fault" in known) == ("overlapscope_verdict" in known) == is_judged
    assert "overlapscope_incidents" in known


def test_of_an_attempt_that_ended_before_anything_was_recorded_the_verdict_is_said(tmp_path: Path) -> None:
    write_recording(tmp_path)
    for rank in (0, 1):
        folder = tmp_path / "restart_1" / f"rank_{rank}"
        folder.mkdir(parents=True)
        write_json(folder / JOINING_FILE, {"rank": rank, "world_size": 2, "host": "node0", "pid": 2**22 - 1})
    known = values(compute_metrics_text(tmp_path, is_live=False))
    assert (known["overlapscope_live"], known["overlapscope_fault"]) == (0, 1)
    assert "overlapscope_step_seconds" not in known  # those of the attempt before


@pytest.mark.parametrize("is_said", [True, False])
def test_it_ends_when_told_to_and_with_the_process_that_wanted_it(tmp_path: Path, is_said: bool) -> None:
    """In the latter case nobody would know how old the figures are."""
    write_recording(tmp_path / "a")
    file, (told, teller) = tmp_path / "run.prom", os.pipe()
    keeper = threading.Thread(target=metrics_process.update_until_done, args=(tmp_path / "a", file, told))
    keeper.start()
    while not file.exists():
        time.sleep(0.01)
    assert values(file.read_text())["overlapscope_live"] == 1
    if is_said:
        os.write(teller, b".")
    os.close(teller)
    keeper.join(60)
    assert not keeper.is_alive()
    assert file.exists() == is_said
    if is_said:
        assert values(file.read_text())["overlapscope_live"] == 0
    os.close(told)


@pytest.mark.slow
def test_a_run_that_is_shorter_than_the_start_of_the_other_process_has_its_metrics(tmp_path: Path) -> None:
    file, play = tmp_path / "run.prom", TRAINER.partition("until")[0]
    ran = overlapscope("record", "-o", tmp_path / "a", "--metrics", file, "--", sys.executable, "-c", play)
    assert ran.returncode == 0, ran.stderr
    assert values(file.read_text())["overlapscope_live"] == 0


def test_nothing_heavy_is_loaded_without_it(tmp_path: Path) -> None:
    """``record`` stays beside the training for as long as that takes."""
    program = (
        "import sys; from overlapscope.cli.main import main;"
        f"main(['record', '-o', {str(tmp_path / 'a')!r}, '--', sys.executable, '-c', '']);"
        "print([name for name in ('pandas', 'pyarrow', 'panel', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"

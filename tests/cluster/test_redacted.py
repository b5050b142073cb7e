"""A real training full of names: its confidential recording has none, and neither has a copy of another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command_line import overlapscope_process as overlapscope
from tests.cluster.test_unchanged_scripts import ENVIRONMENT, script_in
from tests.redact.copies import facts_of, find_verdict, read_bytes, redact

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = """
import logging
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class ZqXwModell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.zqxwschicht = torch.nn.Linear(8, 8)
        self.zqxwturm = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, zqxweingabe):
        for zqxwstufe in (self.zqxwschicht, *self.zqxwturm):
            zqxweingabe = zqxwstufe(zqxweingabe)
        return zqxweingabe


class ZqXwOptimierer(torch.optim.SGD):
    pass


class ZqXwFehler(Exception):
    pass


def zqxwscheitern():
    raise ZqXwFehler("zqxwnachricht")


def zqxwhaken(zqxwzustand, bucket):
    zqxwarbeit = dist.all_reduce(bucket.buffer(), async_op=True)
    return zqxwarbeit.get_future().then(lambda zqxwfertig: zqxwfertig.value()[0] / 2)


def zqxwlauf():
    dist.init_process_group("gloo")
    zqxwpaar = dist.new_group([0, 1], group_desc="zqxwgruppe")
    zqxwmodell = DistributedDataParallel(ZqXwModell())
    zqxwmodell.register_comm_hook(None, zqxwhaken)
    zqxwoptimierer = ZqXwOptimierer(zqxwmodell.parameters(), lr=0.01)
    for zqxwschritt in range(20):
        zqxwmodell(torch.ones(2, 8)).sum().backward()
        zqxwoptimierer.step()
        zqxwoptimierer.zero_grad()
        zqxwwert = torch.ones(1)
        dist.all_reduce(zqxwwert, group=zqxwpaar)
        if zqxwschritt == 5:
            zqxwfaden = threading.Thread(target=zqxwscheitern, name="zqxwfaden")
            zqxwfaden.start()
            zqxwfaden.join()
        if zqxwschritt == 12 and dist.get_rank() == 1:
            try:
                zqxwscheitern()
            except ZqXwFehler:
                logging.exception("zqxwmeldung")
                raise ValueError("zqxwursache in /zqxwpfad/zqxwdatei")


zqxwlauf()
"""

NAMES = ("verzeichnis", "turm", "nachricht", "faden", "gruppe", "argument", "wahl", "haken")
"""Names of a folder, module, message, thread, group, argument, variable's value and hook, after their prefix."""


KEEP = """
"$@"
code=$?
find "$CONFIDENTIAL" -mindepth 1
cp -r "$OVERLAPSCOPE_TRACE" "$ORIGINAL"
exit $code
"""
"""Runs a command, prints what is in the folder for others when it has ended, and copies what was recorded of it."""


def test_no_name_of_a_real_training_is_left(tmp_path: Path) -> None:
    original, confidential, folder = tmp_path / "original", tmp_path / "confidential", tmp_path / "zqxwverzeichnis"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    training = ["bash", "-c", KEEP, "keep", *torchrun, script_in(folder, SCRIPT), "--zqxwargument=1"]
    kept = {"CONFIDENTIAL": str(confidential), "ORIGINAL": str(original), "TMPDIR": str(tmp_path / "tmp")}
    options = ("record", "--confidential", "-o", confidential)
    ran = overlapscope(*options, "--", *training, NCCL_ZQXW="zqxwwahl", **ENVIRONMENT, **kept)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "zqxwlauf" in ran.stderr.rpartition("ValueError")[2]  # the verdict is its owner's
    verdict = find_verdict(original)
    assert (verdict.kind, verdict.blamed, verdict.step) == ("failed", (1,), 12)
    written = read_bytes(original).lower()
    assert [name for name in NAMES if f"zqxw{name}".encode() not in written] == []
    assert redact(original, tmp_path / "copy").left_out == ()
    for of_others in (tmp_path / "copy", confidential):
        assert facts_of(find_verdict(of_others)) == facts_of(verdict)
        assert b"zqxw" not in read_bytes(of_others).lower()
    assert [*(tmp_path / "tmp").glob("overlapscope*")] == []

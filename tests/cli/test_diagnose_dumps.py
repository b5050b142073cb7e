"""``overlapscope diagnose`` of Flight Recorder dumps."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlapscope.cli.main import main

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"


@pytest.mark.parametrize(
    ("folder", "exit_code", "kind"),
    [
        ("healthy_gloo/pickle", 0, "healthy"),
        ("op_mismatch_gloo/json", 1, "different collectives"),
        ("missing_collective_gloo/pickle", 1, "stuck"),
        ("hang_3/trace_1", 1, "cannot tell"),
    ],
)
def test_tells_a_program(folder: str, exit_code: int, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(DUMPS / folder), "--json"]) == exit_code
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"]["kind"] == kind
    assert {rank["liveness"] for rank in content["ranks"]} == {"dumped"}
    assert steps_in(content) == {None}


def test_tells_people_what_dumps_can_not_say(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert main(["diagnose", str(DUMPS / "missing_collective_gloo" / "pickle")]) == 1
    printed = capsys.readouterr()
    golden("cli/diagnose_dumps", f"{printed.out}\n{printed.err}".replace(str(DUMPS), "dumps"))


def test_says_what_the_recorders_have_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(DUMPS / "wrapped_2")]) == 0
    assert " 24 " in capsys.readouterr().err


@pytest.mark.parametrize("is_folder", [True, False])
def test_refuses_a_hostile_dump_with_one_line(
    is_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class WritesAFile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch '{tmp_path / 'executed'}'",)

    file = tmp_path / "trace_0"
    file.write_bytes(pickle.dumps({"version": "2.10", "entries": [WritesAFile()]}, 4))
    assert main(["diagnose", str(tmp_path if is_folder else file)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1
    assert f"{file}: refused " in printed.err
    assert not (tmp_path / "executed").exists()


def test_judges_the_dumps_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        dump = (DUMPS / "hang_3" / f"trace_{rank}").read_bytes()
        (tmp_path / f"trace_{rank}").write_bytes(dump[: len(dump) // 2] if rank == 1 else dump)
    assert main(["diagnose", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "Rank 1, which left no dump" in printed.out
    assert f"error: {tmp_path / 'trace_1'}: refused " in printed.err


def steps_in(content: Any) -> set[Any]:
    """All values of a key ``step``, anywhere."""
    if isinstance(content, dict):
        return {content["step"]} if "step" in content else set().union(*map(steps_in, content.values()))
    return set().union(*map(steps_in, content)) if isinstance(content, list) else set()

"""Whatever ranks have come to and have left, there is a verdict, and it can be printed."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from overlapscope.diagnosis.evidence import Evidence, Failure, Liveness
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace import schema as trace_format
from tests.diagnosis.jobs import CLOSED, TIMED_OUT, group, idle, job, rank, trained
from tests.diagnosis.test_from_logs import write_model
from tests.ordered import end, fail, lives_here, stands, steps, write_order

OWN = Failure(type="ValueError", message="no such label")
LIVENESS: list[Liveness] = ["running", "sleeping", "stopped", "gone", "ended", "failed", "silent", "unknown"]


@st.composite
def jobs(draw: st.DrawFn) -> Evidence:
    """Up to four ranks, each of which has come to some point of the same order, and then to some end."""
    world = draw(st.integers(1, 4))
    known = draw(st.sets(st.integers(0, world - 1)))
    ranks = []
    for number in sorted(known):
        liveness = draw(st.sampled_from(LIVENESS))
        failure = draw(st.sampled_from([CLOSED, TIMED_OUT, OWN])) if liveness == "failed" else None
        phase = draw(st.sampled_from([None, "loop", "forward", "backward", "finalize", "optimizer"]))
        since_ns = draw(st.sampled_from([0, 10**9]))
        one = rank(number, liveness, phase=phase, step=2, since_ns=since_ns, failure=failure)
        ranks.append(idle(one, draw(st.sampled_from([0.1, 5, 60]))) if draw(st.booleans()) else one)
    windows = {
        number: trained(draw(st.integers(1, 9)), is_waiting=draw(st.booleans()))
        for number in sorted(known)
        if draw(st.booleans())
    }
    groups = [group(windows, ranks=range(world))] if windows else []
    return job(*ranks, groups=groups, world=world, is_live=draw(st.booleans()))


def check(verdict: Verdict, evidence: Evidence) -> None:
    assert verdict.sentence
    assert set(verdict.blamed) <= {*evidence.expected_ranks, *evidence.ranks}
    assert verdict.sentence.splitlines()[0] in format_report(verdict, evidence)
    json.dumps(verdict.as_dict())


@given(jobs())
def test_there_is_a_verdict_on_any_job(evidence: Evidence) -> None:
    verdict = judge(evidence)
    check(verdict, evidence)
    if verdict.kind == "healthy":
        assert not {one.liveness for one in evidence.ranks.values()} & {"gone", "failed", "stopped"}


@given(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 3))
def test_any_ranks_that_were_killed_are_the_cause_of_what_the_others_say(gone: set[int], further: int) -> None:
    ranks = [rank(n, "gone", phase="backward") if n in gone else rank(n, "failed", failure=CLOSED) for n in range(4)]
    windows = {n: trained(6 if n in gone else 6 + further) for n in range(4)}
    verdict = judge(job(*ranks, groups=[group(windows)]))
    assert verdict.kind == "killed"
    assert set(verdict.blamed) == (gone if len(gone) < 4 else set())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks: one that has failed, one that has ended, one that was killed; every file that is read."""
    folder = tmp_path_factory.mktemp("recording")
    write_order(folder, {0: steps(4), 1: steps(4), 2: steps(3)}, close=False)
    for number in range(3):
        stands(folder, number, trace_format.Phase.BACKWARD, 3)
        write_model(folder, number, bytes([0, 1, 0]))
    lives_here(folder, 2, 2**22 - 1)
    fail(folder, 0, "RuntimeError", "Connection closed by peer")
    end(folder, [1])
    return folder


@settings(suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(st.data())
def test_damage_to_any_file_leaves_a_verdict(recording: Path, data: st.DataObject) -> None:
    files = sorted(path.relative_to(recording) for path in recording.rglob("*") if path.is_file())
    copy = recording.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(recording, copy)
    for _ in range(data.draw(st.integers(1, 3))):
        path = copy / data.draw(st.sampled_from(files))
        if not path.exists():
            continue
        content = path.read_bytes()
        match data.draw(st.sampled_from(["cut", "remove", "overwrite", "json"])):
            case "cut":
                path.write_bytes(content[: data.draw(st.integers(0, max(0, min(len(content), 20_000) - 1)))])
            case "remove":
                path.unlink()
            case "overwrite":
                place = data.draw(st.integers(0, min(len(content), 20_000)))
                noise = data.draw(st.binary(min_size=1, max_size=40))
                path.write_bytes(content[:place] + noise + content[place + len(noise) :])
            case "json" if path.suffix in (".json", ".jsonl"):
                with suppress(ValueError, IndexError):  # damaged before
                    first = json.loads(content.splitlines()[0] if path.suffix == ".jsonl" else content)
                    path.write_text(json.dumps(other_values(first, data)) + "\n")
    evidence, problems = read_evidence(copy)
    assert all("\n" not in str(problem) for problem in problems)
    check(judge(evidence), evidence)


def other_values(content: dict[str, object], data: st.DataObject) -> dict[str, object]:
    """The same object, with something else for one of its values."""
    key = data.draw(st.sampled_from(sorted(content)))
    return content | {key: data.draw(st.sampled_from([None, -1, "text", [], [[1]], {"a": 1}, 2**70, 1.5]))}

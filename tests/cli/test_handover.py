"""The scripts of docs/handover.md do what they say; other programs stand in for Slurm, kubectl and a webhook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import FaultKind
from tests.cli.command_line import REPOSITORY
from tests.cli.test_diagnosis_schema import content_of
from tests.diagnosis.test_verdict_texts import CASES

SCRIPTS = REPOSITORY / "examples" / "handover"
FAKE = """#!{python}
import json, os, sys
folder = {folder!r}
name = os.path.basename(sys.argv[0])
with open(folder + "/calls.jsonl", "a") as calls:
    own = {{key: os.environ[key] for key in ("STARTS", "EXCLUDED") if key in os.environ}}
    calls.write(json.dumps([name, *sys.argv[1:], own]) + "\\n")
answers = json.load(open(folder + "/answers.json"))
given = " ".join([name, *sys.argv[1:]])
for key, texts in answers.items():
    if given.startswith(key):
        used = folder + "/" + key.replace(" ", "_")
        number = os.path.getsize(used) if os.path.exists(used) else 0
        open(used, "a").write(".")
        code, text = texts[min(number, len(texts) - 1)]
        print(text, end="")
        sys.exit(code)
"""
"""Notes how it was called, and answers the n-th call that begins so with the n-th answer."""


@dataclass
class Programs:
    """Programs that do nothing but answer."""

    folder: Path

    def answer(self, **answers: Sequence[tuple[int, str]]) -> None:
        """Exit codes and outputs by the beginning of the command line, with ``_`` for spaces."""
        named = {key.replace("_", " "): list(value) for key, value in answers.items()}
        (self.folder / "answers.json").write_text(json.dumps(named))

    def calls(self, name: str) -> list[list[Any]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [call[1:] for call in map(json.loads, lines) if call[0] == name]

    def run(self, script: str, *arguments: object, given: str = "", **environment: str) -> tuple[int, str]:
        path = os.pathsep.join([str(self.folder), os.environ["PATH"]])
        ran = subprocess.run(
            [sys.executable, SCRIPTS / script, *map(str, arguments)],
            input=given,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=os.environ | {"PATH": path} | environment,
            timeout=60,
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return ran.returncode, ran.stdout


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    for name in ("overlapscope", "scontrol", "sbatch", "kubectl"):
        file = tmp_path / name
        file.write_text(FAKE.format(python=sys.executable, folder=str(tmp_path)))
        file.chmod(0o755)
    made = Programs(tmp_path)
    made.answer()
    (tmp_path / "calls.jsonl").touch()
    return made


def diagnosis(kind: FaultKind, hosts: str = "node1 node2.cluster node3", *, certain: bool = True) -> str:
    """What ``diagnose --json`` prints of a job in which rank 1 is named if anyone is."""
    for case in CASES[kind]:
        verdict = judge(case.evidence)
        if (verdict.alternative == "") == certain and verdict.named in ((1,), ()):
            break
    else:
        raise AssertionError(f"no such case of {kind}")
    named = dict(enumerate(hosts.split()))
    ranks = {n: replace(one, host=named.get(n, "")) for n, one in case.evidence.ranks.items()}
    return json.dumps(content_of(replace(case.evidence, ranks=ranks)))


def supervised(programs: Programs, *starts: tuple[int, str]) -> tuple[int, int]:
    """The exit code, and how often a training was started whose starts end so."""
    programs.answer(
        overlapscope_record=[(code, "") for code, _ in starts], overlapscope_diagnose=[(1, s) for _, s in starts]
    )
    code, _ = programs.run("supervise.py", "-o", "traces", "--starts", 3, "--", "torchrun", "train.py", "--epochs", "3")
    recorded = [call for call in programs.calls("overlapscope") if call[0] == "record"]
    for number, call in enumerate(recorded):
        assert call[1:-1] == [
            *("--on-incident", "raise", "-o", f"traces/start_{number}"),
            *("--", "torchrun", "train.py", "--epochs", "3"),
        ]
    return code, len(recorded)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, "healthy")], (0, 1)),
        ([(137, "killed"), (0, "healthy")], (0, 2)),
        ([(1, "models differ")], (42, 1)),
        ([(0, "replicas differ")], (42, 1)),  # it went on to its end, with weights that are not the same
        ([(137, "killed"), (1, "failed"), (137, "stuck")], (43, 3)),
        ([(137, "killed"), (1, "failed"), (143, "stopped")], (143, 3)),
        ([(1, "failed"), (1, "failed")], (42, 2)),  # twice at the same place
        ([(1, ""), (0, "healthy")], (0, 2)),  # nothing was recorded
    ],
    ids=str,
)
def test_a_training_is_started_again_only_while_that_may_help(
    starts: list[tuple[int, Any]], expected: tuple[int, int], programs: Programs
) -> None:
    assert supervised(programs, *((code, diagnosis(kind) if kind else "") for code, kind in starts)) == expected


SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-3]"}


def test_slurm_submits_a_job_again_without_the_node_that_is_named(programs: Programs) -> None:
    programs.answer(scontrol_show_hostnames=[(0, "node1\nnode2\nnode3\n")])
    code, _ = programs.run("slurm_resubmit.py", "job.sbatch", given=diagnosis("killed"), **SLURM)
    ((*arguments, own),) = programs.calls("sbatch")
    assert (code, arguments) == (0, ["--dependency=afterany:17", "--exclude=node2", "job.sbatch"])
    assert own == {"STARTS": "2", "EXCLUDED": "node2"}
    programs.run("slurm_resubmit.py", "job.sbatch", given=diagnosis("killed", "node1 node3 node4"), **SLURM, **own)
    assert programs.calls("sbatch")[-1][1] == "--exclude=node2,node3"


@pytest.mark.parametrize(
    ("kind", "environment", "submitted"),
    [("failed", {}, 1), ("models differ", {}, 0), ("killed", {"STARTS": "5"}, 0), ("healthy", {}, 0)],
)
def test_slurm_submits_nothing_that_can_not_help(
    kind: FaultKind, environment: dict[str, str], submitted: int, programs: Programs
) -> None:
    programs.answer(scontrol_show_hostnames=[(0, "node1\nnode2\nnode3\n")])
    programs.run("slurm_resubmit.py", "job.sbatch", given=diagnosis(kind), **SLURM, **environment)
    calls = programs.calls("sbatch")
    assert len(calls) == submitted
    assert not any(argument.startswith("--exclude") for call in calls for argument in call[:-1])


def test_kubernetes_cordons_the_node_of_the_pod_that_is_named(programs: Programs) -> None:
    programs.answer(kubectl_get=[(0, "gpu-7")])
    programs.run(
        "kubernetes_cordon.py", "--namespace", "a", "--delete-pods", given=diagnosis("killed", "pod-0 pod-1 pod-2")
    )
    _, *did = [call[:-1] for call in programs.calls("kubectl")]
    assert did == [["cordon", "gpu-7"], ["delete", "pod", "pod-1", "-n", "a", "--wait=false"]]


def test_kubernetes_takes_a_host_that_is_no_pod_for_a_node(programs: Programs) -> None:
    programs.answer(kubectl_get=[(1, "")])
    programs.run("kubernetes_cordon.py", "--delete-pods", given=diagnosis("killed", "gpu-6 gpu-7 gpu-8"))
    assert [call[:-1] for call in programs.calls("kubectl")][1:] == [["cordon", "gpu-7"]]


@pytest.mark.parametrize(("kind", "certain"), [("failed", True), ("stuck", False), ("healthy", True)])
def test_kubernetes_cordons_no_node_that_may_be_well(kind: FaultKind, certain: bool, programs: Programs) -> None:
    programs.run("kubernetes_cordon.py", given=diagnosis(kind, certain=certain))
    assert programs.calls("kubectl") == []


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(503 if len(posted) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
        server.shutdown()


def test_an_alert_is_posted_once_for_each_news(programs: Programs, webhook: tuple[str, list[dict[str, Any]]]) -> None:
    url, posted = webhook
    looks = ["", diagnosis("healthy"), *[diagnosis("stuck", certain=False)] * 3]
    looks += [*[diagnosis("stuck")] * 2, diagnosis("slow"), diagnosis("interrupted")]
    programs.answer(overlapscope_diagnose=[(1, text) for text in looks])
    programs.run("alert.py", "traces", url, "--every", "0", "--looks", len(looks))
    told = [(one["verdict"]["code"], one["verdict"]["certainty"]) for one in posted]
    # The first was refused, and is told again.
    assert told == [("stuck", "likely"), ("stuck", "likely"), ("stuck", "certain"), ("slow", "certain")]
    assert all(one["text"].startswith(one["verdict"]["code"]) for one in posted)

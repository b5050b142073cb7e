"""The recipes run: those of frameworks with a test of their own are in ``test_clients.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import validate

from overlapscope.diagnosis.attempts import Attempt, read_attempt
from overlapscope.diagnosis.failures import find_unreachable_address
from overlapscope.lab.network.hosts import INTERFACE
from overlapscope.trace.recording import read_trace
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.clients.launch import QUIET_AND_OFFLINE, TIME_LIMIT_S, TORCHRUN, record, run
from tests.clients.slurm import start_cluster, why_not
from tests.cluster.test_unchanged_scripts import WITH_DDP

RECIPES = REPOSITORY / "examples" / "recipes"


def healthy_attempt(traces: Path, *, ranks: int) -> Attempt:
    attempt = read_attempt(traces)
    assert (attempt.verdict.kind, len(attempt.evidence.ranks)) == ("healthy", ranks), attempt.verdict.sentence
    return attempt


@pytest.mark.nightly
@pytest.mark.cluster
def test_fsdp2(tmp_path: Path) -> None:
    record([*TORCHRUN, str(RECIPES / "train_with_fsdp2.py"), "--steps", "4", "--layers", "2"], tmp_path / "traces")
    healthy_attempt(tmp_path / "traces", ranks=2)
    trace = read_trace(tmp_path / "traces")
    assert trace.steps.groupby("rank")["step"].nunique().to_dict() == {0: 4, 1: 4}
    assert {"all_gather", "reduce_scatter"} <= set(trace.collectives["op"])


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_train_kills_its_workers_and_the_training_has_ended_well(tmp_path: Path) -> None:
    run([sys.executable, str(RECIPES / "train_with_ray.py"), str(tmp_path)])
    healthy_attempt(tmp_path / "traces", ranks=2)
    trace = read_trace(tmp_path / "traces")
    assert trace.steps.groupby("rank")["step"].nunique().to_dict() == {0: 8, 1: 8}


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with ``overlapscope`` and ``torchrun``, also where no environment is activated."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("overlapscope", COMMAND), ("torchrun", [sys.executable, "-m", "torch.distributed.run"])):
        quoted = " ".join(f"'{word}'" for word in words)
        (folder / name).write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("nodes", "interface"), [(1, "lo"), (2, INTERFACE), (2, "lo")])
def test_slurm_collects_what_its_nodes_have_recorded(tmp_path: Path, programs: str, nodes: int, interface: str) -> None:
    """Also if they fail: with gloo's addresses of the wrong interface, two nodes can't reach each other."""
    (tmp_path / "train.py").write_text(WITH_DDP.format(package="torch.nn.parallel"))
    own = QUIET_AND_OFFLINE | {"PATH": programs, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": interface}
    with start_cluster(tmp_path / "slurm", nodes) as slurm:
        options = ["--nodes", nodes, "--ntasks-per-node", 2 // nodes]
        job = [RECIPES / "slurm.sbatch", "train.py"]
        code, said = slurm.submit(options, job, tmp_path, own | {"SLURM_TMPDIR": str(slurm.disk)})
    (traces,) = (tmp_path / "traces").iterdir()
    attempt = read_attempt(traces)
    assert attempt.verdict.sentence in said
    assert len(list(traces.glob("exits_*"))) >= 2
    assert not list((tmp_path / "slurm").glob("disk*/overlapscope-*"))
    is_connected = nodes == 1 or interface == INTERFACE
    assert (code == 0, attempt.verdict.kind) == (is_connected, "healthy" if is_connected else "failed"), said
    if is_connected:
        assert set(read_trace(traces).ranks["host"]) == {f"node{node}" for node in range(nodes)}
    else:
        # Of one of them, as it may be ended before it fails by itself.
        addresses = [find_unreachable_address(one.failure) for one in attempt.evidence.ranks.values()]
        assert any(address is not None and address.is_loopback for address in addresses)


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.sbatch")), ids=lambda script: script.name)
def test_a_script_for_a_scheduler_is_one_that_a_shell_understands(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.skipif(find_spec("nbclient") is None, reason="jupyter is not installed")
def test_the_notebook_records_and_shows(tmp_path: Path, programs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name, value in (QUIET_AND_OFFLINE | {"PATH": programs, "PYTHONPATH": str(REPOSITORY)}).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(RECIPES / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=TIME_LIMIT_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    healthy_attempt(tmp_path / "traces", ranks=2)
    table = notebook.cells[-2].outputs[0]
    assert "text/html" in table.data


# Of Kubernetes' API, what the manifests use; nothing else is allowed, so that a key in the wrong place is found.


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these keys, of which some are required, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
LABELS = {"type": "object", "additionalProperties": TEXT}
METADATA = closed("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})
PROBE = closed("httpGet", httpGet=closed("path port", path=TEXT, port=NUMBER), failureThreshold=NUMBER)
CONTAINER = closed(
    "name image",
    name=TEXT,
    image=TEXT,
    command=TEXTS,
    args=TEXTS,
    restartPolicy={"const": "Always"},
    livenessProbe=PROBE,
    startupProbe=PROBE,
    resources=closed(limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts={"type": "array", "items": closed("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)},
)
VOLUME = closed(
    "name",
    name=TEXT,
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
    secret=closed("secretName", secretName=TEXT),
)
POD = closed(
    "spec",
    spec=closed(
        "containers",
        subdomain=TEXT,
        restartPolicy={"enum": ["Never", "OnFailure", "Always"]},
        securityContext=closed(runAsNonRoot=FLAG, runAsUser=NUMBER, fsGroup=NUMBER),
        initContainers={"type": "array", "items": CONTAINER},
        containers={"type": "array", "items": CONTAINER, "minItems": 1},
        volumes={"type": "array", "items": VOLUME},
    ),
)
REPLICAS = closed("replicas template", replicas=NUMBER, restartPolicy=TEXT, template=POD)
KINDS = {
    ("v1", "Service"): closed("selector", clusterIP=TEXT, publishNotReadyAddresses=FLAG, selector=LABELS),
    ("batch/v1", "Job"): closed(
        "template",
        completionMode={"enum": ["Indexed", "NonIndexed"]},
        completions=NUMBER,
        parallelism=NUMBER,
        backoffLimit=NUMBER,
        template=POD,
    ),
    ("kubeflow.org/v1", "PyTorchJob"): closed(
        "pytorchReplicaSpecs",
        nprocPerNode=TEXT,
        pytorchReplicaSpecs=closed("Master", Master=REPLICAS, Worker=REPLICAS),
    ),
}
TOP = closed("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA)
MANIFESTS = sorted(RECIPES.glob("kubernetes_*.yaml"))


def pods_in(thing: Any) -> list[dict[str, Any]]:
    """All pod specs in a manifest."""
    if isinstance(thing, list):
        return [pod for each in thing for pod in pods_in(each)]
    if not isinstance(thing, dict):
        return []
    return [thing] if "containers" in thing else [pod for each in thing.values() for pod in pods_in(each)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.stem)
def test_a_manifest_has_keys_that_kubernetes_knows_and_commands_that_we_do(manifest: Path) -> None:
    from overlapscope.cli.main import build_parser

    things = list(yaml.safe_load_all(manifest.read_text()))
    for thing in things:
        spec = KINDS[thing["apiVersion"], thing["kind"]]
        validate(
            thing, closed("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
        )
    pods = pods_in(things)
    assert pods
    lines = (REPOSITORY / "examples" / "Containerfile").read_text().splitlines()
    entry = next(json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("ENTRYPOINT"))
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            words = [*container.get("command", entry), *container["args"]]
            assert build_parser().parse_args(words[1:])

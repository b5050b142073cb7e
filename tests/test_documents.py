"""What the documents show is true: commands are accepted, and run where they can be; outputs are what is printed now.

A new block is compared, run, or named below with the reason why not. What is named and not shown any more fails, too.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from overlapscope.cli.main import build_parser
from tests.cli.command_line import COMMAND, Ran, overlapscope
from tests.made_up_job import MadeUpJob, write_made_up_job
from tests.shown import ROOT, SHELL, Block, blocks, form, own_commands

BLOCKS = blocks()
COMMANDS = sorted({line for block in BLOCKS if block.language in SHELL for line in block.commands})
PYTHON = [block for block in BLOCKS if block.language == "python"]
SCRIPTS = {path.name: path for folder in ("examples", "docs") for path in (ROOT / folder).rglob("*.py")}
GOLDEN = ROOT / "tests" / "golden"
MB = 2**20

NOT_RUN = {
    "aws ": "needs a store",
    "bash .ci/device": "needs a GPU",
    "export TORCH_": "settings of torch",
    "nsys export": "needs Nsight Systems",
    "overlapscope calibrate": "needs what NCCL's Inspector wrote: tests/interop/test_nccl_inspector.py",
    "overlapscope control": "needs a running job: tests/cluster/test_recording_modes.py",
    "overlapscope demo": "trains: tests/cli/test_demo.py",
    "overlapscope fleet /shared/traces s3://": "needs a store: tests/cli/test_fleet.py",
    "overlapscope import rank*.sqlite": "needs what Nsight Systems wrote: tests/interop/test_nsight.py",
    "overlapscope lab fault ": "trains: tests/cli/test_lab.py",
    "overlapscope lab figures": "needs an experiment's results: tests/cli/test_lab_run.py",
    "overlapscope lab run": "trains: tests/cli/test_lab_run.py",
    "overlapscope lab synth": "writes gigabytes: tests/lab/test_synth.py",
    "overlapscope record": "trains: tests/cli/test_record.py",
    "overlapscope serve": "serves until Ctrl-C: tests/cli/test_serve.py",
    "overlapscope summary s3://": "needs a store: tests/cli/test_urls.py",
    "overlapscope summary traces/ --dask": "needs a cluster: tests/test_chunked_analysis.py",
    "overlapscope tune": "trains: tests/cli/test_tune.py",
    "pip install": "installs",
    "python -m benchmarks.": "measures for minutes: tests/benchmarks",
    "python alert.py": "tests/cli/test_handover.py",
    "python supervise.py": "trains: tests/cli/test_handover.py",
    "python train_with_ray.py": "needs Ray: tests/clients/test_recipes.py",
    "python3 -m venv": "installs, as .ci/run does",
    "scancel ": "needs Slurm",
    "source ": "of the environment that tests run in",
    "srun ": "needs Slurm",
    "ssh ": "needs another host",
    "sudo ": "needs root: tests/cluster/test_lab_cluster.py",
    "torchrun ": "trains",
}
"""Lines of the shell that are not run here, by how they begin."""

NOT_COMPARED = {
    "training, a process per rank": "a drawing",
    "a training process, one per rank": "a drawing",
    "alarm N is in the store": "a drawing",
    "claims judge.1, at once": "a drawing",
    "│ communication is hidden": "a drawing",
    "autograd ─────▶ hook": "a drawing",
    "the critical path: all of": "a drawing",
    "all_reduce of the loss": "a drawing",
    "location /overlapscope/ {": "needs nginx",
    "overlapscope lab: 2 hosts, 1 rank each": "needs root: tests/cluster/test_lab_cluster.py",
    "start_debug_server(": "tests/instrumented_ddp/test_debug_page.py",
    "import torch\nimport instrumented_ddp": "trains: tests/clients/test_clients.py",
    "class InstrumentedDDPStrategy": "trains: tests/clients/test_clients.py",
    'attach("traces")': "trains: tests/cluster/test_unchanged_scripts.py",
    "DistributedDataParallel  # instead of": "trains: tests/cluster/test_recording.py",
    "ShardedOptimizer(model, ": "trains: tests/cluster/test_sharded.py",
    "DedicatedServers(servers=1)": "trains: tests/cluster/test_dedicated_servers.py",
    "checkpoint.save(": "trains: tests/cluster/test_sharded_checkpoints.py",
    'Strategy(name="star"': "trains: tests/cluster/test_strategies.py",
    'strategy="ring")': "trains: tests/cluster/test_strategies.py",
    "model.defer(optimizer)": "trains: tests/cluster/test_deferred_updates.py",
    "else model.no_sync()": "trains: tests/cluster/test_deferred_updates.py",
    "_dump_fr_trace()": "needs a process group: tests/cluster/test_flight_recorder_dumps.py",
    "run.log_to(mlflow": "needs other programs: tests/interop/test_curves.py",
}
"""Other blocks that are neither compared nor run, by something that they hold."""

TRAININGS = {
    "step   90  loss": "overlapscope record --probe-buckets -o traces/ "
    "-- torchrun --nproc-per-node 2 examples/train_gpt.py",
    "Rank 1 never launched bucket 1": "overlapscope lab fault missing-branch",
}
"""Outputs that only a training prints, by something that they hold, and its command: compared every night."""

STANDS_FOR = {" by ring": " by some strategy", "training loop": "data wait"}
"""Names in outputs, and those that stand in their places in what is printed here."""

ALSO_RUN = ["overlapscope diagnose trace_0"]
"""Commands that are not shown, and whose output is."""

EXIT_CODES = {
    "overlapscope diagnose trace_0": 2,  # refused
    "overlapscope diagnose": 1,  # a fault, or no logs of collectives
}
"""Other than 0, by how lines begin."""


def why_not_run(line: str) -> str | None:
    return next((reason for key, reason in NOT_RUN.items() if line.startswith(key)), None)


def why_not_compared(block: Block) -> str | None:
    return next((reason for key, reason in (NOT_COMPARED | TRAININGS).items() if key in block.text), None)


def is_output(block: Block) -> bool:
    return block.language in ("", "text") and why_not_compared(block) is None


def lines_of(block: Block) -> list[str]:
    """Its lines in form, without those that say that something was left out."""
    text = block.text
    for name, other in STANDS_FOR.items():
        text = text.replace(name, other)
    return [form(line.removesuffix("...")).strip() for line in text.splitlines() if line.strip(". ")]


RUN = [*sorted({line.partition(" | ")[0] for line in COMMANDS if why_not_run(line) is None}), *ALSO_RUN]
RUN.sort(key=lambda line: not line.startswith("overlapscope redact"))  # other commands read their copies


# -- what there is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_every_command_line_of_a_document_is_accepted(page: str) -> None:
    lines = [line for block in BLOCKS if block.page == page and block.language in SHELL for line in block.commands]
    for block in BLOCKS:
        if (block.page, block.language) == (page, "yaml"):
            lines += re.findall(r"\boverlapscope (?:record|compare) .*", block.text)
        if (block.page, block.language) == (page, "json"):
            servers = json.loads(block.text)["mcpServers"].values()
            lines += [shlex.join([server["command"], *server["args"]]) for server in servers]
    for line in lines:
        for arguments in own_commands(line):
            build_parser().parse_args(arguments)  # raises SystemExit, with usage on stderr


def test_scripts_and_their_options_in_command_lines_exist() -> None:
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        scripts = [SCRIPTS[Path(word).name] for word in words if Path(word).name in SCRIPTS]
        if words[:2] == ["python", "-m"]:
            scripts = [ROOT / f"{words[2].replace('.', '/')}.py"]
        if words[0] == "bash":
            assert (ROOT / words[1]).exists()
        for script in scripts:
            after = words[next(place for place, word in enumerate(words) if script.stem in word) + 1 :]
            options = [word for word in after[: after.index("--") if "--" in after else None] if word.startswith("--")]
            assert [option for option in options if f'"{option}"' not in script.read_text()] == []


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_what_python_of_a_document_imports_of_ours_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("overlapscope", "instrumented_ddp")):
            assert [each.name for each in node.names if not has_name(node.module or "", each.name)] == []


def has_name(module: str, name: str) -> bool:
    """Whether a module defines or imports a name, or is a package with such a module; nothing is imported for it."""
    path = ROOT / module.replace(".", "/")
    if (path / f"{name}.py").exists():
        return True
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (
        re.search(rf"^(?:class |def |from .* import .*\b| +)?\"?{name}\b", source.read_text(), re.MULTILINE) is not None
    )


def test_reasons_are_of_what_is_shown_and_name_tests_that_exist() -> None:
    shown = {
        "NOT_RUN": [key for key in NOT_RUN if any(line.startswith(key) for line in COMMANDS)],
        "NOT_COMPARED": [key for key in NOT_COMPARED if any(key in block.text for block in BLOCKS)],
        "TRAININGS": [key for key in TRAININGS if any(key in block.text for block in BLOCKS)],
        "STANDS_FOR": [key for key in STANDS_FOR if any(key in block.text for block in BLOCKS if is_output(block))],
        "EXIT_CODES": [key for key in EXIT_CODES if any(line.startswith(key) for line in RUN)],
    }
    named = {name: list(globals()[name]) for name in shown}
    assert shown == named
    tests = re.findall(r"\btests/[\w/.]+", " ".join([*NOT_RUN.values(), *NOT_COMPARED.values()]))
    assert [test for test in tests if not (ROOT / test).exists()] == []


# -- what is run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which commands of the documents find what they read."""
    folder = tmp_path_factory.mktemp("documents")
    write_made_up_job(a_job(ranks=8), folder / "traces")
    for name in ("probed", "before", "after", "traces-9.5", "shared/traces/monday", "traces/planned"):
        write_made_up_job(a_job(ranks=2), folder / name)
    (folder / "var/lib/node_exporter").mkdir(parents=True)
    dumps = ROOT / "tests/data/flight_recorder/hang_3"
    shutil.copytree(dumps, folder / "dumps", ignore=shutil.ignore_patterns("*.json"))
    (folder / "trace_0").write_bytes(b"\x80\x02cos\nsystem\n.")
    profiles = ROOT / "tests/interop/data"
    for rank in range(2):
        content = (profiles / f"golden_nccl_worker{rank}.json").read_bytes()
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(content))
    with chdir(folder):
        yield folder


def a_job(*, ranks: int) -> MadeUpJob:
    """A noisy training that tries five bucket plans, as with ``--probe-buckets``, and in which nobody is late."""
    return MadeUpJob(
        seed=1,
        ranks=ranks,
        ranks_per_host=8,
        steps=112,
        backend="gloo",
        gradient_bytes=tuple(each * MB for each in (1, 8, 4, 8, 4, 2)),
        plans=(
            ((0,), (1, 2), (3, 4, 5)),
            ((0,), (1,), (2,), (3,), (4,), (5,)),
            ((0, 1, 2), (3, 4, 5)),
            ((0, 1), (2, 3), (4, 5)),
            ((0, 1, 2, 3, 4, 5),),
        ),
        compute_ms=120.0,
        communication=0.4,
        latency_share=0.1,
        noise="normal",
        amplitude=0.4,
        is_noise_shared=False,
        course="level",
        change=1.0,
        delay=0.0,
        delayed="every",
        has_copies=True,
        has_evaluations=False,
    )


def run(line: str, folder: Path) -> Ran:
    """Run a command line; what is at the root of the file system in it is in the folder."""
    (arguments,) = own_commands(line)
    moved = [str(folder / word[1:]) if word.startswith("/") else word for word in arguments]
    spread = [name for word in moved for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    return overlapscope(*spread, in_folder=folder)


@pytest.mark.slow
def test_commands_of_the_documents_run_and_print_what_is_shown_there(folder: Path) -> None:
    wrong: list[str] = []
    printed = [path.read_text() for path in GOLDEN.rglob("*.txt")]
    for line in RUN:
        (folder / "plan.json").unlink(missing_ok=True)  # two pages write it
        ran = run(line, folder)
        printed += [ran.stdout, ran.stderr]
        if ran.returncode != next((code for key, code in EXIT_CODES.items() if line.startswith(key)), 0):
            wrong.append(f"{line}\n[{ran.returncode}] {ran.stderr}")
    now = form("\n".join(printed))
    for block in filter(is_output, BLOCKS):
        wrong += [f"{block.page}: not printed now: {line}" for line in lines_of(block) if line not in now]
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", [each for each in PYTHON if why_not_compared(each) is None], ids=str)
def test_the_python_of_the_documents_runs(block: Block) -> None:
    if "instrumented_ddp" in block.text:
        pytest.importorskip("torch")
    exec(compile(block.text, block.page, "exec"), {})


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.parametrize("command", sorted(set(TRAININGS.values())))
def test_trainings_of_the_documents_print_what_is_shown_there(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (arguments,) = own_commands(command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    printed = form(ran.stdout + ran.stderr)
    held = [key for key, each in TRAININGS.items() if each == command]
    shown = [line for block in BLOCKS if any(key in block.text for key in held) for line in lines_of(block)]
    assert [line for line in shown if line not in printed] == []

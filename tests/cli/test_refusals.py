"""What commands refuse: an exit code and one line, word by word in golden files; nothing is written or changed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from overlapscope.bucket_model.calibration import AllReduceSample, Calibration, write_calibration
from overlapscope.cli import lab_cluster
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import JOB_FILE
from tests.cli.command_line import overlapscope
from tests.ordered import end, steps, write_order
from tests.synthetic import write_recording

REFUSED = {
    "calibrate": (
        "--nproc 0",
        "--nproc 1",
        "--nproc 2 -- torchrun",
        "--nproc 2 --inspector x.log",
        "--nproc 2 -o {empty}",
        "-o {file}/calibration.json",
        "-o {empty}/calibration.json -- torchrum",
    ),
    "compare": (
        "{traces} {none}",
        "{traces} {traces}",
        "{traces} {short}",
        "{traces} {short} --fail-above 3",
        "{traces} {short} --base-steps 10-20",
        "{traces} {short} --only step,bogus",
        "{traces} {short} --json --format md",
    ),
    "control": (
        "{none} --off",
        "{restarted} --off",
        "{restarted} --status",
        "{restarted}",
        "{restarted} --off --on",
        "{restarted} --status --off",
        "{restarted} --status --detail parameters",
        "{restarted} --sample 0",
        "{running} --off",
        "s3://bucket/run --off",
    ),
    "demo": ("-o {traces}", "--port 70000", "--port 5.5", "--steps 0"),
    "diagnose": ("{none}", "{empty}", "{file}", "{restarted} --attempt 7", "s3://bucket/run"),
    "export": (
        "{traces} -o {new} --ranks 1,9",
        "{traces} -o {new} --ranks ''",
        "{traces} -o {new} --steps 90:",
        "{traces} -o {new} --format csv --ranks 1",
        "{traces} -o {file}",
        "{traces} -o {none}/run.pftrace",
    ),
    "fleet": (
        "{none}",
        "{empty}",
        "{file}",
        "{traces} --since yesterday",
        "{traces} --since 2999-01-01 --no-cache",
        "{traces} --html {file}",
        "{traces} --metrics {file}",
        "memory://nothing/runs",
    ),
    "import": ("{file} -o {traces}", "{file} -o {new}", "{none} -o {new}"),
    "lab": (
        "fault missing-brunch",
        "fault skipped_batch",
        "fault zzz",
        "fault missing-member --ranks 2",
        "fault jitter -o {traces}",
        "run breakdwn",
        "run zzz",
        "run breakdown -o {new} --ranks 1",
        "run breakdown -o {new} --steps 5",
        "figures {empty}",
        "cluster",
        "cluster --rate fast -- true",
        "cluster --latency 2 -- true",
        "cluster --hosts 1 -- true",
        "cluster --hosts 65 -- true",
        "cluster -o {traces} -- true",
        "cluster -- no-such-program",
        "cluster -- torchrun --standalone train.py",
    ),
    "mcp": ("", "{file}", "s3://bucket/run"),
    "recommend": (
        "{none}",
        "{one_rank}",
        "{traces} --plan {file}",
        "{traces} --calibration {none}",
        "{traces} --calibration {four_ranks}",
        "{traces} --calibration {two_hosts}",
    ),
    "record": (
        "",
        "-o {new} -- torchrum train.py",
        "-o {new} -- tests/synthetic.py",
        "-o {traces} -- true",
        "-o {traces} --join -- torchrun --rdzv-id 7 train.py",
        "-o {joined} --join -- torchrun --rdzv-id=7 train.py",
        "-o {new} --join -- true",
        "-o {joined} --join --force -- true",
        "-o {file} -- true",
        "-o {new} --metrics {file} -- true",
        "-o {new} --metrics {none}/run.prom -- true",
        "-o {new} --confidential --names {new}/names.json -- true",
        "-o {new} --confidential --names {file} -- true",
        "-o {new} --confidential --key {none} -- true",
        "-o {new} --confidential --key {file} -- true",
        "-o {traces} --confidential -- true",
        "-o {new} --confidential --join -- torchrun --rdzv-id 7 train.py",
        "-o {new} --confidential --metrics {none} -- true",
        "-o {new} --names {none} -- true",
        "--limit-mb 0 -- true",
        "--limit-mb 1.5 -- true",
    ),
    "redact": (
        "{none} -o {new}",
        "{empty} -o {new}",
        "{file} -o {new}",
        "{traces}",
        "{traces} -o {empty}",
        "{traces} -o {traces}/copy",
        "{traces} -o {none}/{new} --names {file}",
        "{traces} -o {new} --names {new}/names.json",
        "{traces} -o {new} --names {none}/names.json",
        "{traces} -o {new} --names {none} --key {none}",
        "{traces} -o {new} --key {file}",
        "{traces} -o {file}/copy",
        "s3://bucket/run -o {new}",
    ),
    "report": (
        "{none} -o {new}",
        "{traces} -o {file}",
        "{traces} -o {file} --format md",
        "{traces} -o {none}/report.html",
        "s3://bucket/run -o {new}",
    ),
    "serve": ("{file}", "{traces} --port 70000", "{traces} --port abc", "s3://bucket/run"),
    "stragglers": ("{none}", "{traces} --steps 90:"),
    "summary": ("", "{none}", "{traces} --steps 90:", "{traces} --steps 5-9", "{traces} --jsn", "memory://nothing/run"),
    "tune": (
        "",
        "-o {traces} -- true",
        "-o {file} -- true",
        "-o {new} --steps 9 -- true",
        "-o {new} -- no-such-program",
    ),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("refused")
    names = (
        "empty",
        "file",
        "four_ranks",
        "new",
        "joined",
        "none",
        "one_rank",
        "restarted",
        "running",
        "short",
        "traces",
        "two_hosts",
    )
    paths = {name: folder / name for name in names}
    write_recording(paths["traces"], steps=20)
    write_recording(paths["one_rank"], ranks=1)
    write_recording(paths["joined"], ranks=1)
    write_json(paths["joined"] / JOB_FILE, {"job": "Slurm job 12"})
    write_recording(paths["short"], steps=10)
    for attempt in (paths["restarted"], paths["restarted"] / "restart_1"):
        end(write_order(attempt, {0: steps(5), 1: steps(5)}), (0, 1))
    write_order(paths["running"], {0: steps(5), 1: steps(5)})
    paths["empty"].mkdir()
    paths["file"].write_text("mine")
    for name, hosts in (("four_ranks", ("node0",) * 4), ("two_hosts", ("node0", "node1"))):
        samples = tuple(AllReduceSample(bytes=size, times_ns=(size + 1e6,)) for size in (1024, 1024**2, 64 * 1024**2))
        write_calibration(paths[name], Calibration(backend="gloo", device="cpu", hosts=hosts, samples=samples))
    return paths


@pytest.mark.parametrize("command", sorted(REFUSED))
def test_what_is_refused_is_one_line_and_nothing_is_written(
    paths: dict[str, Path],
    command: str,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command in ("calibrate", "demo", "lab", "record") and find_spec("torch") is None:
        pytest.skip("without torch it is the first thing that is missing")
    monkeypatch.setattr(lab_cluster, "find_missing_requirement", lambda _: None)
    monkeypatch.delattr(lab_cluster, "make_linked_hosts")
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    folder = paths["traces"].parent
    there_before = set(folder.iterdir())
    said = []
    for arguments in REFUSED[command]:
        ran = overlapscope(command, *shlex.split(arguments.format(**paths)))
        assert ran.stdout == ""
        *usage, line = ran.stderr.splitlines()
        assert not usage or usage[0].startswith("usage: ")
        said.append(f"$ overlapscope {command} {arguments}\n[{ran.returncode}] {line}\n")
    assert set(folder.iterdir()) == there_before
    assert paths["file"].read_text() == "mine"
    golden(f"refused/{command}", "\n".join(said).replace(f"{folder}/", ""))

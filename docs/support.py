"""Write docs/support.md: which versions and setups have been run, by results of .ci/matrix and by what tests hold.

    .ci/matrix --results docs/support.jsonl no-torch-3.12    # adds a line for each row
    python docs/support.py

Nothing is said to be tested that was not run: a row without a line is unknown.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
RESULTS: Final = DOCS / "support.jsonl"
PAGE: Final = DOCS / "support.md"
MATRIX: Final = DOCS.parent / ".ci" / "matrix"

TESTED, WORKS, REFUSED, PARTLY, UNKNOWN = "tested", "works", "refused", "partly", "unknown"
ON_A_DEVICE: Final = "one H200, torch 2.11, with the recorder before the one in C"

Claim = tuple[str, str, str, str]
"""What, its status, what there is to say, and the test, page or code that holds it."""

SETUPS: Final[dict[str, list[Claim]]] = {
    "How gradients are reduced": [
        ("our DDP", TESTED, "passes torch's own DDP tests", "`tests/conformance`"),
        ("torch's DDP, unchanged", TESTED, "", "`tests/cluster/test_stock_recording.py`"),
        ("`fully_shard` (FSDP2), HSDP", TESTED, "", "`tests/cluster/test_fsdp_recording.py`"),
        ("`replicate` built on it", WORKS, ON_A_DEVICE, "`tests/gpu/test_sharded_by_torch.py`"),
        ("loops with collectives of their own", TESTED, "", "`tests/cluster/test_own_loops.py`"),
        (
            "FSDP1, DeepSpeed",
            UNKNOWN,
            "their collectives should be recorded as the user's",
            "[Frameworks](frameworks.md)",
        ),
        ("Hugging Face Trainer, accelerate", TESTED, "", "`tests/clients/test_clients.py`"),
        ("Lightning", TESTED, "in the row `nightly`", "`tests/clients/test_clients.py`"),
        (
            "distributed autograd over RPC; sparse metadata",
            REFUSED,
            "use torch's class for this model",
            "`tests/instrumented_ddp/test_arguments.py`",
        ),
        ("settings that exclude each other", REFUSED, "", "`tests/golden/refused/strategy.txt`"),
        ("modules and optimizers that can't be sharded", REFUSED, "", "`tests/golden/refused/sharded.txt`"),
    ],
    "Where": [
        ("gloo, CPU, several processes", TESTED, "", "`tests/cluster/test_recording.py`"),
        ("several hosts", TESTED, "simulated on one machine, over gloo", "`tests/cluster/test_hosts.py`"),
        ("NCCL", WORKS, f"{ON_A_DEVICE}; ranks shared the device", "`tests/gpu/test_same_as_stock.py`"),
        ("gloo with CUDA tensors", WORKS, f"{ON_A_DEVICE}; ends are bounds", "`tests/gpu/test_same_as_stock.py`"),
        (
            "strategies of sends and receives, gloo with CUDA tensors",
            REFUSED,
            "train over NCCL, or with a strategy of the backend's",
            "`tests/gpu/test_plans.py`",
        ),
        (
            "marks on a device through its driver, in C",
            UNKNOWN,
            "tested with a simulated driver only",
            "[Clocks](clocks.md)",
        ),
        ("`nccl2` (torch 2.15)", UNKNOWN, "tested with simulated works only", "[Clocks](clocks.md)"),
        ("several GPUs, several hosts with GPUs", UNKNOWN, "", "[Clocks](clocks.md)"),
        ("ROCm", UNKNOWN, "compared with the headers of HIP 7.1", "[Clocks](clocks.md)"),
        ("MPI, UCC, other devices than CUDA", UNKNOWN, "", ""),
        (
            "Linux on aarch64",
            UNKNOWN,
            "no training yet; the code in C passed its own tests in QEMU 7.2, and the workflow *wheels* builds there",
            "`.ci/wheels`, `tests/instrumented_ddp/native`",
        ),
        ("macOS, Windows", UNKNOWN, "", ""),
    ],
    "With what": [
        ("`torch.compile`", TESTED, "on CPUs", "`tests/cluster/same_as_stock/compiled.py`"),
        (
            "compiled autograd, the Python reducer",
            PARTLY,
            "collectives and their order; the backward has no phases, which is said",
            "`tests/cluster/test_stock_recording.py`",
        ),
        (
            "CUDA graphs",
            PARTLY,
            f"{ON_A_DEVICE}: captures are left alone, and what runs in a graph is not recorded, which is said",
            "`tests/gpu/test_captures.py`",
        ),
        (
            "`CUDA_DEVICE_MAX_CONNECTIONS=1`",
            PARTLY,
            f"{ON_A_DEVICE}: phases, no buckets",
            "`tests/gpu/test_one_queue.py`",
        ),
        ("mixed precision, communication hooks, `no_sync`, `join`", TESTED, "", "`tests/cluster/same_as_stock`"),
        ("sparse gradients, our DDP", TESTED, "", "`tests/cluster/same_as_stock/parameter_kinds.py`"),
        (
            "sparse gradients, torch's DDP",
            PARTLY,
            "collectives, no buckets, which is said",
            "`tests/cluster/test_stock_recording.py`",
        ),
        ("jobs that are restarted", TESTED, "", "`tests/cluster/test_restarts.py`"),
        ("no compiler", TESTED, "the recorder in Python", "`tests/instrumented_ddp/native`"),
    ],
}

INTRO: Final = """# What it runs on

*Tested*: tests of each change hold it, with the versions of `constraints.txt` on Python 3.11, or the row of the table
has passed. *Works*: it was run where the column says, and no change repeats it. *Partly*: some of it is recorded, and
the rest is said to be missing. *Refused*: one sentence says why, and what to do. *Unknown*: never run.
`docs/support.py` writes this page.
"""
VERSIONS: Final = """## Versions

Rows of `.ci/matrix`, which anybody can run, and what was really installed. A name without a version is the newest that
there was. Rows without torch test what reads recordings, and nothing that trains.
"""


def read_rows() -> list[dict[str, str]]:
    """Return name, Python and versions of each row of ``.ci/matrix``."""
    return json.loads(subprocess.run([sys.executable, MATRIX, "--list"], capture_output=True, check=True).stdout)


def read_results() -> list[dict[str, Any]]:
    """Return what rows have come to, in the order in which they were run."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def write_page(rows: Sequence[dict[str, str]], results: Sequence[dict[str, Any]]) -> str:
    """Return the page, as Markdown."""
    latest = {result["row"]: result for result in results}
    parts = [
        INTRO,
        VERSIONS,
        _table(["row", "", "asked for", "installed", "tests", "on"], [_row(row, latest) for row in rows]),
    ]
    for title, claims in SETUPS.items():
        lines = [[what, f"**{status}**", note, held] for what, status, note, held in claims]
        parts += [f"## {title}\n", _table(["what", "", "where, how", "held by"], lines)]
    return "\n".join(parts)


def _row(row: dict[str, str], latest: dict[str, dict[str, Any]]) -> list[str]:
    asked = ", ".join(["no torch" if each == "-torch" else each for each in row["versions"].split()])
    name, asked = f"`{row['name']}`", f"Python {row['python']}{f', {asked}' * bool(asked)}"
    result = latest.get(row["name"])
    if result is None:
        return [name, f"**{UNKNOWN}**", asked, "", "never run", ""]
    if result["result"] == "left out":
        return [name, f"**{UNKNOWN}**", asked, "", result["reason"], result["date"]]
    installed = ", ".join(
        [f"Python {result['python']}", *(f"{key} {value}" for key, value in result["versions"].items())]
    )
    counts = ", ".join(f"{number:,} {what}" for what, number in result["tests"].items()) or result["reason"]
    status = TESTED if result["result"] == "passed" else "fails"
    return [name, f"**{status}**", asked, installed, counts, f"{result['date']}, {result['machine']}"]


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in cells)


if __name__ == "__main__":
    PAGE.write_text(write_page(read_rows(), read_results()))

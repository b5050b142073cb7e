"""Record the runs of docs/gallery.md and write their reports into docs/gallery/, for the site.

    python docs/gallery.py [FOLDER]

Needs `pip install -e '.[test]'`, and for the slow link root and iproute2; takes some minutes. Recordings go into
FOLDER, or into a temporary one; those that FOLDER holds already are not made again. The reports are not in git, because
BokehJS is in each of them; a site that is built without them has pages in their place that say so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from overlapscope.console import Progress
from overlapscope.pages import render_report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cluster.injected import CASES, train

REPOSITORY: Final = Path(__file__).parents[1]
GALLERY: Final = REPOSITORY / "docs" / "gallery"
GPT: Final = str(REPOSITORY / "examples" / "train_gpt.py")
STEPS: Final = 60


def run_command(*arguments: str) -> Callable[[Path], None]:
    """Return what records into a folder by a command that takes it with -o."""
    command = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()"]
    verbs, _, job = (" ".join(arguments)).partition(" -- ")

    def record(folder: Path) -> None:
        after = ["--", *job.split()] if job else []
        subprocess.run([*command, *verbs.split(), "-o", str(folder), *after], check=True)

    return record


RUNS: Final[dict[str, Callable[[Path], None]]] = {
    "healthy": run_command("demo", "--no-serve", "--steps", str(STEPS)),
    "exposed": run_command(
        *("lab", "cluster", "--rate", "200mbit", "--latency", "1ms", "--"),
        *(sys.executable, GPT, "--steps", str(STEPS), "--bucket-cap-mb", "25"),
    ),
    "straggler": lambda folder: train(CASES["slow_compute"], folder),
    "mismatch": run_command("lab", "fault", "different-collectives"),
    "drift": run_command("lab", "fault", "flipped-bit"),
    "64-ranks": run_command("lab", "synth", "--ranks", "64", "--steps", "40", "--buckets", "6"),
}


def write_report(recording: Path, output: Path) -> None:
    """Write a report, in which paths are relative to the repository."""
    with Progress() as progress:
        text, _ = render_report(recording, "html", datetime.now(), None, progress)
    output.write_text(text.replace(f"{REPOSITORY}/", "").replace(str(Path(sys.prefix)), ".venv"))
    print(f"{output}: {len(text) / 1e6:.1f} MB")


def main() -> None:
    """Record what is not there yet, and write all reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where recordings are, or go (default: a temporary one)")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="overlapscope-gallery-"))
    GALLERY.mkdir(exist_ok=True)
    for name, record in RUNS.items():
        if not (folder / name).exists():
            record(folder / name)
        write_report(folder / name, GALLERY / f"{name}.html")


if __name__ == "__main__":
    main()

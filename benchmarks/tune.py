"""What ``overlapscope tune`` chooses, held against eight settings that were really run.

    python -m benchmarks.tune FOLDER [--models lstm gpt] [--link 1gbit]

Two ranks train over gloo with torch's own DDP, one thread each, over a link. First ``tune`` runs the training as a user
would have it run. Then eight settings of bucket size and bucket views, DDP's default among them, and the one that was
chosen are run interleaved, in one process per rank, as ``benchmarks.bucket_sweep`` does it. Two models take about 12
minutes on a quiet machine.

over best     measured step with what tune says, over the shortest measured one; at most 1 % is wanted
over default  the same over DDP's default; at most 0.5 % is wanted
said          the gain that tune has measured itself, with its 99 % interval; it keeps what there is if there is none

FOLDER/MODEL holds the runs, tune.json and sweep.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.bucket_sweep import sweep, table_of
from benchmarks.quiet_machine import wait_until_quiet
from benchmarks.sweep_file import Measured, Sweep
from benchmarks.swept_training import MODELS, Setting
from overlapscope.cli.main import main as overlapscope
from overlapscope.text import format_share_change
from tests.cluster.processes import ROOT
from tests.cluster.shaped_link import LINKS, Ranks, ranks_over

SETTINGS: Final = (
    Setting(),
    Setting(gradient_as_bucket_view=True),
    *(Setting(bucket_cap_mb=cap) for cap in (1, 5, 10, 50)),
    *(Setting(bucket_cap_mb=cap, gradient_as_bucket_view=True) for cap in (5, 15)),
)
"""What the choice is held against, DDP's default first."""
PORT: Final = 29541
MAX_OVER_BEST: Final = 0.01
MAX_OVER_DEFAULT: Final = 0.005


def command_of(ranks: Ranks, model: str, steps: int) -> list[str]:
    """Return one command that starts all ranks and fails if one does."""
    shared = f"WORLD_SIZE={len(ranks.prefixes)} MASTER_ADDR={ranks.addresses[0]} MASTER_PORT={PORT}"
    shared += f" GLOO_SOCKET_IFNAME={ranks.interface} OMP_NUM_THREADS=1"
    starts = [
        f"{shlex.join(prefix)} env RANK={rank} {shared} {sys.executable} -m benchmarks.tuned_training {model} {steps} &"
        for rank, prefix in enumerate(ranks.prefixes)
    ]
    return ["bash", "-c", "\n".join([*starts, *(["wait -n || exit 1"] * len(starts))])]


def tune(ranks: Ranks, model: str, folder: Path, steps: int) -> dict[str, Any]:
    """Have ``tune`` run the training, and return what it says."""
    wait_until_quiet(15)
    command = command_of(ranks, model, 100 * steps)
    said = io.StringIO()
    where = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with mock.patch.dict(os.environ, where), contextlib.redirect_stdout(said):
        code = overlapscope(["tune", "-o", str(folder), "--force", "--steps", str(steps), "--json", "--", *command])
    if code:
        raise RuntimeError(f"overlapscope tune ended with {code}")
    (folder / "tune.json").write_text(said.getvalue())
    return dict(json.loads(said.getvalue()))


def setting_of(said: Mapping[str, Any] | None) -> Setting:
    """Return what tune says to set, as a setting of the sweep; DDP's default if it says to keep that."""
    if said is None:
        return Setting()
    caps: list[float] = said["caps_mb"] or []
    return Setting(
        bucket_cap_mb=caps[0] if len(caps) == 1 else None,
        bucket_cap_mb_list=tuple(caps) if len(caps) > 1 else None,
        gradient_as_bucket_view=True if said["bucket_views"] else None,
    )


def find(measured: Sequence[Measured], setting: Setting) -> Measured:
    """Find what was measured of a setting; several with the same buckets were measured as one."""
    return next(each for each in measured if setting in each.settings)


def row_of(model: str, found: Sweep, said: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: how good the choice is."""
    chosen = find(found.measured, setting_of(said["setting"]))
    others = [find(found.measured, setting) for setting in SETTINGS]
    over_best = chosen.median_ms / min(each.median_ms for each in others) - 1
    over_default = chosen.median_ms / others[0].median_ms - 1
    gain = said["gain"]
    return [
        model,
        setting_of(said["setting"]).label,
        f"{others[0].median_ms:.1f}",
        f"{chosen.median_ms:.1f}",
        format_share_change(over_best),
        format_share_change(over_default),
        "-" if gain is None else f"{gain['value']:.2%} ({gain['low']:.2%} to {gain['high']:.2%})",
        "yes" if over_best <= MAX_OVER_BEST and over_default <= MAX_OVER_DEFAULT else "no",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["lstm", "gpt"], metavar="MODEL")
    parser.add_argument("--link", choices=LINKS, default="1gbit", metavar="LINK", help=", ".join(LINKS))
    parser.add_argument("--steps", type=int, default=40, help="of each of tune's runs (default: 40)")
    parser.add_argument("--rounds", type=int, default=4, help="of the sweep, with 4 steps each (default: 4)")
    parser.add_argument("--seconds", type=float, default=120, help="for each sweep at most (default: 120)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 140)
    table = Table(title=f"tune over {args.link}", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("model", "chosen", "default, ms", "chosen, ms", "over best", "over default", "said", "within"):
        table.add_column(heading)
    for model in args.models:
        folder = args.folder / model
        with ranks_over(LINKS[args.link]) as ranks:
            said = tune(ranks, model, folder, args.steps)
            settings = dict.fromkeys([*SETTINGS, setting_of(said["setting"])])
            found = sweep(model, args.link, ranks, list(settings), args.rounds, args.seconds)
        found.write(folder / "sweep.json")
        console.print(said["sentence"])
        console.print(table_of(found))
        table.add_row(*row_of(model, found, said))
    console.print(table)


if __name__ == "__main__":
    main()

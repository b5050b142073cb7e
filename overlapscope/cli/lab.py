"""See what faults in distributed training look like, repeat experiments, and train over a small network: real jobs.

    overlapscope lab faults
    overlapscope lab fault missing-branch
    overlapscope lab fault missing-branch --stock
    overlapscope lab experiments
    overlapscope lab run breakdown
    overlapscope lab figures experiments/ -o figures/
    overlapscope lab synth --ranks 1024 --steps 1000 -o traces/planned
    sudo overlapscope lab cluster --hosts 2 --rate 1gbit --latency 2ms -- torchrun train.py

A fault needs PyTorch, and a minute at most; an experiment some minutes or hours; a cluster needs Linux and root.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import textwrap
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from overlapscope.cli import child_process, lab_cluster, lab_figures, lab_run, lab_synth, recording_folder
from overlapscope.cli.arguments import parse_positive_int
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.catalog import DEFAULT_WORLD_SIZE, FAULTS, Fault

_WIDTH: Final = 110


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.set_defaults(run_in_lab=lambda _: parser.print_help())
    verbs = parser.add_subparsers(dest="lab_command", metavar="COMMAND")
    faults = verbs.add_parser("faults", help="list all faults", description="List all faults, one per line.")
    faults.set_defaults(run_in_lab=_list_faults)
    fault = verbs.add_parser("fault", help="run a fault", description="Run a fault and diagnose it.")
    fault.set_defaults(run_in_lab=_run_fault)
    fault.add_argument("name", metavar="NAME", help="name from 'overlapscope lab faults'")
    fault.add_argument(
        "--ranks", type=parse_positive_int, metavar="N", help=f"number of ranks, 2 to 4 (default: {DEFAULT_WORLD_SIZE})"
    )
    fault.add_argument(
        "--stock",
        action="store_true",
        help="run torch's own DDP without recording, as you would see it without OverlapScope",
    )
    fault.add_argument("-o", "--output", type=Path, help="folder to record into (default: a new temporary one)")
    experiments = verbs.add_parser(
        "experiments", help="list all experiments", description="List all experiments, one per line."
    )
    experiments.set_defaults(run_in_lab=_list_experiments)
    for name, module, what in (
        ("run", lab_run, "run an experiment of the DDP paper"),
        ("figures", lab_figures, "draw the figures of experiments"),
        ("synth", lab_synth, "generate a recording of any size"),
        ("cluster", lab_cluster, "run on emulated hosts with rate- and latency-limited links"),
    ):
        verb = verbs.add_parser(
            name, help=what, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(verb)
        verb.set_defaults(run_in_lab=module.run)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand of the lab; for a fault, return 0 if its diagnosis matches what was injected."""
    return args.run_in_lab(args) or 0


def _run_fault(args: argparse.Namespace) -> int:
    fault = _find_fault(args.name)
    world_size = args.ranks or DEFAULT_WORLD_SIZE
    if world_size not in fault.world_sizes:
        sizes = " or ".join(map(str, fault.world_sizes))
        raise OverlapScopeError(f"{fault.name}: runs with {sizes} ranks, not with {world_size}")
    child_process.require_torch("the lab")
    return _run_stock(fault, world_size) if args.stock else _run_and_diagnose(fault, world_size, args.output)


def _list_faults(_: argparse.Namespace) -> None:
    from overlapscope.lab.truth import read_title

    width = max(len(fault.name) for fault in FAULTS)
    for heading, is_healthy in (("faults:", False), ("no fault; any diagnosis is a false alarm:", True)):
        print(heading)
        for fault in FAULTS:
            if fault.is_healthy is is_healthy:
                print(f"  {fault.name:{width}}  {read_title(fault)}")


def _list_experiments(_: argparse.Namespace) -> None:
    from overlapscope.lab.experiments.registry import EXPERIMENTS

    width = max(len(experiment.name) for experiment in EXPERIMENTS)
    for experiment in EXPERIMENTS:
        of_paper = f" ({experiment.figure})" if experiment.figure else ""
        print(f"  {experiment.name:{width}}  {experiment.title}{of_paper}")


def _find_fault(name: str) -> Fault:
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        nearest = get_close_matches(name, by_name, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see 'overlapscope lab faults'"
        raise OverlapScopeError(f"{name}: no such fault; {hint}")
    return by_name[name]


def _run_stock(fault: Fault, world_size: int) -> int:
    from overlapscope.lab import jobs
    from overlapscope.lab.truth import find_fault_script

    _print_introduction(fault)
    _print_heading(
        f"running {world_size} ranks with torch's DDP; the process group's timeout is {jobs.STOCK_TIMEOUT_S:.0f} s"
    )
    with jobs.run_fault_job(
        find_fault_script(fault), world_size, wrapper="torch", timeout_s=jobs.STOCK_TIMEOUT_S, on_line=_print_line
    ) as job:
        job.wait(patience_s=jobs.STOCK_TIMEOUT_S + 5)
        ends = job.ends()
    _print_exit_states(ends)
    _print_heading(f"with OverlapScope: overlapscope lab fault {fault.name} --ranks {world_size}")
    return 0


def _run_and_diagnose(fault: Fault, world_size: int, folder: Path | None) -> int:
    from overlapscope.lab import jobs
    from overlapscope.lab.jobs import diagnose
    from overlapscope.lab.truth import check_verdict, find_fault_script

    printed = set()

    def print_line(rank: int, line: str) -> None:
        printed.add(line.strip())
        _print_line(rank, line)

    folder = folder or Path(tempfile.mkdtemp(prefix=f"overlapscope-{fault.name}-"))
    recording_folder.create_empty_folder(folder)
    _print_introduction(fault)
    _print_heading(f"running {world_size} ranks, recorded in {folder}")
    with jobs.run_fault_job(find_fault_script(fault), world_size, trace=folder, on_line=print_line) as job:
        job.wait(patience_s=fault.patience_s)
        ends = job.ends()
        verdict, text = diagnose(folder)  # while the hanging processes can still be inspected
    _print_exit_states(ends)
    _print_heading("overlapscope diagnose")
    sentence = text.partition("\n")[0]
    print(f"{sentence}\n(the report is the one of the watchdog, above)" if sentence.strip() in printed else text)
    checks = check_verdict(fault, world_size, verdict)
    is_right = all(check.is_right for check in checks)
    _print_heading("this is what was injected" if is_right else "NOT what was injected")
    for check in checks:
        print(f"  {'right' if check.is_right else 'WRONG'}  {check}")
    quoted = shlex.quote(str(folder))
    print(f"diagnose it again: overlapscope diagnose {quoted}\nview it: overlapscope serve {quoted}")
    return 0 if is_right else 1


def _print_introduction(fault: Fault) -> None:
    from overlapscope.lab.truth import find_fault_script, read_explanation

    for paragraph in read_explanation(fault).split("\n\n"):
        print(textwrap.fill(paragraph.replace("``", "`"), _WIDTH) + "\n")
    print(f"the script: {find_fault_script(fault)}", flush=True)


def _print_line(rank: int, line: str) -> None:
    print(f"[rank {rank}] {line}", flush=True)


def _print_exit_states(ends: list[str]) -> None:
    _print_heading("; ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends)))


def _print_heading(text: str) -> None:
    print(f"\n-- {text}", flush=True)

"""Trees of the kernel's files, made up."""

from __future__ import annotations

import os
from pathlib import Path

from instrumented_ddp.machine.source import Roots


def write(root: Path, files: dict[str, str]) -> None:
    """Write files below a folder, in place: who has one open sees the change."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def cpu_stat(periods: int, throttled: int) -> str:
    return f"usage_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 5\n"


def pressure(total_us: int) -> str:
    return f"some avg10=1.00 avg60=0.00 avg300=0.00 total={total_us}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def make_host(folder: Path) -> Roots:
    """A host with everything: cgroup v2, pressure, swap, an Ethernet interface and an InfiniBand port."""
    pid = os.getpid()
    write(
        folder / "proc",
        {
            "self/cgroup": "0::/job.slice/rank\n",
            f"{pid}/status": "Name:\tpython\nVmHWM:\t  2048 kB\nVmSwap:\t   0 kB\n",
            f"{pid}/schedstat": "1000 2000 3\n",
            "pressure/cpu": pressure(1000),
            "pressure/memory": pressure(0),
            "pressure/io": pressure(0),
            "meminfo": "MemTotal: 100 kB\nSwapTotal: 100 kB\nSwapFree: 100 kB\n",
            "vmstat": "pswpin 0\npswpout 0\noom_kill 0\n",
        },
    )
    write(
        folder / "sys/fs/cgroup/job.slice",
        {
            "cpu.max": "50000 100000\n",
            "cpu.stat": cpu_stat(100, 0),
            "memory.max": "1073741824\n",
            "memory.current": "104857600\n",
            "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
            "rank/cpu.max": "max 100000\n",
            "rank/cpu.stat": cpu_stat(0, 0),
            "rank/memory.max": "max\n",
        },
    )
    for interface in ("lo", "eth0"):
        counters = {f"statistics/{side}_{what}": "0\n" for side in ("rx", "tx") for what in ("errors", "dropped")}
        write(folder / "sys/class/net" / interface, {**counters, "carrier_changes": "1\n", "speed": "10000\n"})
    write(
        folder / "sys/class/infiniband/mlx5_0/ports/1",
        {"counters/symbol_error": "3\n", "counters/link_downed": "0\n", "rate": "200 Gb/sec (4X HDR)\n"},
    )
    return Roots(proc=folder / "proc", sys=folder / "sys")

"""Measure how long all-reduces of this job's ranks take, as nccl-tests does, and write it to a file.

    torchrun --nproc-per-node 2 -m instrumented_ddp.calibrate -o traces/calibration.json

``overlapscope calibrate`` starts this module. Sizes grow from 1 kB to 256 MB, or until one all-reduce takes longer
than half a second, so that a slow network takes seconds too.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.backends import get_backend_name, require_device_per_rank
from overlapscope.bucket_model.calibration import (
    TABLE_HEADER,
    AllReduceSample,
    Calibration,
    format_sample,
    write_calibration,
)
from overlapscope.errors import OverlapScopeError
from overlapscope.pipe import ignore_broken_pipe
from overlapscope.text import count_of, format_bytes, format_ns
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.schema import count_lanes

_SMALLEST_BYTES: Final = 1024
_LARGEST_MB: Final = 256
_BYTES_PER_MB: Final = 1024**2
_MAX_ALL_REDUCE_NS: Final = 500_000_000
"""Time limit for one all-reduce; sizes that would take longer are not measured."""
_WARM_UPS: Final = 2
_MIN_REPEATS: Final = 5
_MAX_REPEATS: Final = 50
_TIME_PER_SIZE_NS: Final = 300_000_000
_PAIRS: Final = 3
"""Number of sizes measured in pairs: the largest, in which latency matters least."""
_BYTES_PER_ELEMENT: Final = 4
_NS_PER_MS: Final = 1e6
_GLOO_RELEASE_S: Final = 0.1
_ENVIRONMENT: Final = "env://"
_RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE")
_MASTER_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT")


class AllReduceTimer:
    """Timed all-reduces of one process group.

    Args:
        group: process group of all ranks.
        device: device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def measure(self, size_bytes: int, at_once: int = 1) -> AllReduceSample:
        """Time all-reduces of one size until the median is steady. Called on all ranks.

        Args:
            at_once: number of all-reduces launched together before waiting for all of them.
        """
        elements = max(1, size_bytes // _BYTES_PER_ELEMENT)
        tensors = [torch.zeros(elements, device=self._device) for _ in range(at_once)]
        warm_up_ns = [self._time_ns(tensors) for _ in range(_WARM_UPS)]
        repeats = min(max(_TIME_PER_SIZE_NS // self._slowest(min(warm_up_ns)), _MIN_REPEATS), _MAX_REPEATS)
        own_ns = torch.tensor([self._time_ns(tensors) for _ in range(repeats)])
        # The last rank to launch waited for no other rank.
        times_ns = self._reduced(own_ns, dist.ReduceOp.MIN).tolist()
        return AllReduceSample(bytes=size_bytes, times_ns=tuple(times_ns))

    def _time_ns(self, tensors: Sequence[torch.Tensor]) -> int:
        if self._device.type == "cuda":
            return self._device_time_ns(tensors)
        start_ns = host_now_ns()
        self._all_reduce(tensors)
        return host_now_ns() - start_ns

    def _device_time_ns(self, tensors: Sequence[torch.Tensor]) -> int:
        """Time all-reduces with device events, which exclude the host's delay in noticing the end."""
        torch.cuda.synchronize(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._all_reduce(tensors)
        end.record()
        end.synchronize()
        return max(1, round(start.elapsed_time(end) * _NS_PER_MS))

    def _all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        launched = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
        for work in launched:
            work.wait()

    def _slowest(self, time_ns: int) -> int:
        """Return the maximum of all ranks' times."""
        return int(self._reduced(torch.tensor([time_ns]), dist.ReduceOp.MAX).item())

    def _reduced(self, numbers: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        there = numbers.to(self._device)
        dist.all_reduce(there, how, group=self._group)
        return there.cpu()


def measure_all_sizes(
    group: dist.ProcessGroup, device: torch.device, largest_bytes: int, *, prints: bool = True
) -> Calibration:
    """Measure all sizes up to the largest. Called on all ranks.

    Args:
        prints: print a row for each on rank 0.

    Raises:
        OverlapScopeError: there is only one rank.
    """
    world_size = group.size()
    if world_size < 2:
        raise OverlapScopeError("all-reduce needs at least 2 ranks; start two or more")
    backend = get_backend_name(group, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    is_printing = prints and group.rank() == 0
    if is_printing:
        where = count_of(len(set(hosts)), "host")
        print(f"all-reduce of {world_size} ranks on {where}, {backend}, {name}; float32, outside training")
        print(TABLE_HEADER, flush=True)
    measure = AllReduceTimer(group, device).measure
    samples: list[AllReduceSample] = []
    size_bytes = _SMALLEST_BYTES
    measure(size_bytes)  # warm-up: opens connections and starts threads
    while size_bytes <= largest_bytes:
        samples.append(measure(size_bytes))
        if is_printing:
            print(format_sample(samples[-1], world_size), flush=True)
        size_bytes *= 2
        # All ranks have the same samples, so they stop at the same size.
        if 2 * samples[-1].time_ns > _MAX_ALL_REDUCE_NS:
            break
    pairs: list[AllReduceSample] = []
    if count_lanes(backend) > 1:
        pairs = [measure(sample.bytes, at_once=2) for sample in samples[-_PAIRS:]]
        if is_printing:
            print(_pair_row(pairs[-1], samples), flush=True)
    return Calibration(backend=backend, device=name, hosts=tuple(hosts), samples=tuple(samples), pairs=tuple(pairs))


def _pair_row(pair: AllReduceSample, samples: Sequence[AllReduceSample]) -> str:
    alone_ns = next(sample.time_ns for sample in samples if sample.bytes == pair.bytes)
    size, factor = format_bytes(pair.bytes), pair.time_ns / alone_ns
    return f"two of {size} at once take {format_ns(pair.time_ns)}, {factor:.2f} times as long as one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the job, measure, write the file on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrumented_ddp.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    parser.add_argument("--backend", help="backend of torch.distributed (nccl if there are GPUs, else gloo)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the tensors (cuda if there are GPUs)")
    parser.add_argument("--max-mb", type=int, default=_LARGEST_MB, metavar="N", help="largest size (%(default)s)")
    parser.add_argument("--init-method", default=_ENVIRONMENT, metavar="URL", help="how ranks meet (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        _run(args)
    except OverlapScopeError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"overlapscope calibrate: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    needed = (*_RANK_VARIABLES, *(_MASTER_VARIABLES if args.init_method == _ENVIRONMENT else ()))
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise OverlapScopeError(
            f"{', '.join(missing)}: not set; start it with torchrun, or with 'overlapscope calibrate --nproc 2'"
        )
    device = _device(args.device)
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    require_device_per_rank(backend)
    dist.init_process_group(
        backend,
        init_method=args.init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        _measure(device, args.max_mb * _BYTES_PER_MB, args.output)
    finally:
        # gloo's threads take the GIL to release tensors after a collective, and ``destroy_process_group`` joins these
        # threads while holding the GIL: with torch 2.7 every fifth run hung.
        time.sleep(_GLOO_RELEASE_S)
        dist.destroy_process_group()


def _measure(device: torch.device, largest_bytes: int, output: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    calibration = measure_all_sizes(group, device, largest_bytes)
    if group.rank() == 0:
        write_calibration(output, calibration)
        print(f"written to {output}", flush=True)


def _device(kind: str | None) -> torch.device:
    has_gpus = torch.cuda.is_available()
    if kind == "cpu" or (kind is None and not has_gpus):
        return torch.device("cpu")
    if not has_gpus:
        raise OverlapScopeError("no CUDA device found here; give --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    ignore_broken_pipe()
    sys.exit(main())

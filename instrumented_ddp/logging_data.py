"""What ``_get_ddp_logging_data()`` tells, with stock DDP's keys (torch/csrc/distributed/c10d/logger.cpp).

Some monitoring reads it. Times are taken in the first ten iterations and then in every hundredth, as stock does, but
without waiting for the device: on CUDA a time that is not known yet is left at that of the sample before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from instrumented_ddp.c10d_reducer import C10dReducer

_ALWAYS_SAMPLED_ITERATIONS: Final = 10
_DEFAULT_SAMPLE_RATE: Final = 100
_NS_PER_MS: Final = 1e6

_CPP_NAMES: Final = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

_ENVIRONMENT: Final = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT_OF_BACKEND: Final = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}

_DURATIONS: Final = {
    "forward_compute_time": ("forward_start", "backward_compute_start"),
    "backward_compute_time": ("backward_compute_start", "backward_compute_end"),
    "backward_comm_time": ("backward_comm_start", "backward_comm_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_start", "backward_compute_end"),
}
_MOMENTS: Final = {
    "forward_compute_time_start": "forward_start",
    "backward_compute_time_start": "backward_compute_start",
    "backward_comm_time_start": "backward_comm_start",
    "backward_compute_time_end": "backward_compute_end",
    "backward_comm_time_end": "backward_comm_end",
}


@dataclass
class LoggingData:
    """What torch's wrapper merges into one dictionary."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class RuntimeStats:
    """When the parts of an iteration began and ended, in the iterations that are sampled.

    Args:
        device: of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.iterations = 0
        self.sample_rate = _DEFAULT_SAMPLE_RATE
        self.is_sampled = False
        self.unix_ns: dict[str, int] = {}
        self._events: dict[str, torch.cuda.Event] = {}

    def begin_iteration(self) -> None:
        """A forward begins whose gradients are to be reduced."""
        self.iterations += 1
        self.is_sampled = self.collects_now
        self.mark("forward_start")

    @property
    def collects_now(self) -> bool:
        """Whether the present iteration is a sample."""
        return 0 < self.iterations <= _ALWAYS_SAMPLED_ITERATIONS or (
            self.iterations > 0 and self.iterations % self.sample_rate == 0
        )

    def mark(self, moment: str) -> None:
        """Remember when something happened."""
        if not self.is_sampled:
            return
        self.unix_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            event = self._events.get(moment) or torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events[moment] = event

    def duration_ns(self, start: str, end: str) -> int | None:
        """Time between two moments of the newest sample; None if it is not known."""
        if start not in self.unix_ns or end not in self.unix_ns:
            return None
        if self._device.type != "cuda":
            duration_ns = self.unix_ns[end] - self.unix_ns[start]
        elif self._events[start].query() and self._events[end].query():
            duration_ns = round(self._events[start].elapsed_time(self._events[end]) * _NS_PER_MS)
        else:
            return None
        return duration_ns if duration_ns >= 0 else None


class Logger:
    """Stands in for ``torch.distributed.Logger``, whose method names these are.

    Args:
        reducer: whose data is told.
        parameters: that it reduces.
        group: over which it reduces.
    """

    def __init__(
        self, reducer: C10dReducer, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        self._reducer = reducer
        self._parameters = parameters
        self._group = group
        self._data = LoggingData()
        self._samples = 0

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """What is known at construction."""
        reducer, texts, numbers = self._reducer, self._data.strs_map, self._data.ints_map
        if static_graph:
            self._set_static_graph()
        backend = self._group.name()
        texts |= {
            "module_name": module_name,
            "device_ids": _join(device_ids),
            "backend_name": backend,
            "bucket_sizes": self._bucket_sizes(),
            "dtypes": _join(sorted({_CPP_NAMES.get(p.dtype, str(p.dtype)) for p in self._parameters})),
        }
        for name in (*_ENVIRONMENT, *_ENVIRONMENT_OF_BACKEND.get(backend, ())):
            texts[name.removeprefix("TORCH_").lower() if "NCCL" in name else name.lower()] = os.environ.get(name, "N/A")
        numbers |= {
            "world_size": self._group.size(),
            "rank": self._group.rank(),
            "iteration": 0,
            "is_multi_device_module": len({parameter.device for parameter in self._parameters}) > 1,
            "num_parameter_tensors": len(self._parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in self._parameters),
            "output_device": output_device,
            "broadcast_buffers": broadcast_buffers,
            "has_sync_bn": has_sync_bn,
            "bucket_cap_bytes": reducer.bucket_bytes_cap,
            "find_unused_parameters": reducer.find_unused_parameters,
            "gradient_as_bucket_view": reducer.gradient_as_bucket_view,
        }
        if backend == "gloo":
            with suppress(AttributeError, RuntimeError):
                numbers["gloo_num_threads"] = self._group._get_backend(torch.device("cpu")).options._threads  # type: ignore[attr-defined]

    def set_runtime_stats_and_log(self) -> None:
        """Called at the start of each iteration, about the one before."""
        reducer, stats = self._reducer, self._reducer.stats
        if not stats.collects_now:
            return
        texts, numbers = self._data.strs_map, self._data.ints_map
        self._samples += 1
        numbers["iteration"] = stats.iterations
        numbers["unused_parameter_size"] = sum(
            self._parameters[index].numel() * self._parameters[index].element_size() for index in reducer.unused
        )
        numbers["num_buckets_reduced"] = reducer.buckets_reduced
        if reducer.has_rebuilt_buckets and not numbers.get("has_rebuilt_buckets"):
            texts["rebuilt_bucket_sizes"] = self._bucket_sizes()
            texts["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(map(str, bucket.indices)) for bucket in reducer.buckets
            )
        numbers["has_rebuilt_buckets"] = reducer.has_rebuilt_buckets
        if reducer.ready_order:
            texts["prev_iteration_grad_ready_order_indices"] = _join(reducer.ready_order)
        for name, (start, end) in _DURATIONS.items():
            duration_ns = stats.duration_ns(start, end)
            numbers.setdefault(name, 0)
            average_ns = numbers.setdefault(f"avg_{name}", 0)
            if duration_ns is not None:
                numbers[name] = duration_ns
                numbers[f"avg_{name}"] = (duration_ns + average_ns * (self._samples - 1)) // self._samples
        numbers |= {name: stats.unix_ns.get(moment, 0) for name, moment in _MOMENTS.items()}

    def set_error_and_log(self, error: str) -> None:
        """An error is about to be raised."""
        self._data.strs_map["error"] = error
        self._data.ints_map |= {"has_error": 1, "iteration": self._reducer.stats.iterations}

    def _get_ddp_logging_data(self) -> LoggingData:
        if not self._reducer.graph_is_static:
            self._data.ints_map["can_set_static_graph"] = False
        texts = dict(self._data.strs_map)
        return LoggingData(texts, {name: int(number) for name, number in self._data.ints_map.items()})

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._data.strs_map["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = True

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = True

    def _bucket_sizes(self) -> str:
        return _join(
            sum(parameter.numel() * parameter.element_size() for parameter in bucket.parameters)
            for bucket in self._reducer.buckets
        )


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))

"""Data of ``_get_ddp_logging_data()``, with stock DDP's keys (torch/csrc/distributed/c10d/logger.cpp).

Some monitoring tools read it. Its times are those of ``recording.runtime_stats``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch

from instrumented_ddp.reduction.c10d_reducer import Plans
from instrumented_ddp.reduction.reducer import Reducer

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
    """Logging data in the form that torch's wrapper merges into one dictionary."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """Replacement of ``torch.distributed.Logger``, with its method names.

    Args:
        reducer: the reducer to report on.
        bucket_bytes_cap: bucket size limit that the wrapper was given.
        plans: tells whether the buckets were rebuilt.
    """

    def __init__(self, reducer: Reducer, bucket_bytes_cap: int, plans: Plans) -> None:
        self._reducer = reducer
        self._bucket_bytes_cap = bucket_bytes_cap
        self._plans = plans
        self._parameters = reducer.parameters
        self._group = reducer.averaging.group
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
        """Collect what is known at construction."""
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
            "bucket_cap_bytes": self._bucket_bytes_cap,
            "find_unused_parameters": reducer.find_unused_parameters,
            "gradient_as_bucket_view": reducer.gradient_as_bucket_view,
        }
        if backend == "gloo":
            with suppress(AttributeError, RuntimeError):
                numbers["gloo_num_threads"] = self._group._get_backend(torch.device("cpu")).options._threads  # type: ignore[attr-defined]

    def set_runtime_stats_and_log(self) -> None:
        """Collect the statistics of the previous iteration. Called at the start of each iteration."""
        reducer, stats = self._reducer, self._reducer.events.stats
        if not stats.collects_now:
            return
        texts, numbers = self._data.strs_map, self._data.ints_map
        self._samples += 1
        numbers["iteration"] = stats.iterations
        unused = reducer.usage.unused if reducer.usage is not None else ()
        numbers["unused_parameter_size"] = sum(
            self._parameters[index].numel() * self._parameters[index].element_size() for index in unused
        )
        numbers["num_buckets_reduced"] = reducer.buckets_reduced
        has_rebuilt_buckets = self._plans.has_rebuilt
        if has_rebuilt_buckets and not numbers.get("has_rebuilt_buckets"):
            texts["rebuilt_bucket_sizes"] = self._bucket_sizes()
            texts["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(map(str, bucket.indices)) for bucket in reducer.buckets
            )
        numbers["has_rebuilt_buckets"] = has_rebuilt_buckets
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
        """Note an error that is about to be raised."""
        self._note_error(error, self._reducer.events.stats.iterations)

    def _note_error(self, error: str, iteration: int) -> None:
        self._data.strs_map["error"] = error
        self._data.ints_map |= {"has_error": 1, "iteration": iteration}

    def _get_ddp_logging_data(self) -> LoggingData:
        if self._reducer.failure is not None:
            self._note_error(*self._reducer.failure)
        if self._reducer.usage is not None and not self._reducer.usage.is_static:
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

"""Words that a confidential recording keeps: of OverlapScope, PyTorch and Python, which tell nothing of a job.

A word that is missing here becomes a pseudonym, and is no secret given away.
"""

from __future__ import annotations

import builtins
from typing import Final

from overlapscope.trace.collective_log import POINT_TO_POINT
from overlapscope.trace.environment import DETAILS
from overlapscope.trace.machine_facts import CONTROL_GROUP, GPU, HOST, INFINIBAND, INTERFACE, PROCESS, iter_facts
from overlapscope.trace.schema import DTYPES, OPS, Phase
from overlapscope.trace.user_code import SKIPPED_PACKAGES

_OPERATIONS: Final = {
    *OPS,
    *POINT_TO_POINT,
    *("reduce", "gather", "scatter", "all_to_all", "barrier", "monitored_barrier", "unknown"),
    *("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum"),
    *("bucket", "buffers", "bitmap", "construction", "plan", "join", "hook", "segment", "user"),
}
_TYPES: Final = {
    *DTYPES,
    *("complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("trained", "frozen", "buffer"),
}
_BACKENDS: Final = {"cpu", "cuda", "xpu", "mps", "meta", "gloo", "nccl", "nccl2", "mpi", "ucc", "xccl", "fake"}
_STRATEGIES: Final = {
    *("overlapped", "naive", "per_parameter", "bucketed", "round_robin", "reverse_order", "forward_order", "ring"),
    *("tree", "double_tree", "direct", "direct_two_shot", "decoupled", "priority", "sharded", "hierarchical"),
    *("bf16", "fp16", "power_sgd", "one_bit", "parameter_server", "dedicated_servers", "parameter_averaging"),
    *("deferred", "by hand", "fully_shard"),
    *("reduce-scatter", "all-gather", "push", "pull", "to the servers", "from the servers", "up the tree"),
    *("down the tree", "choice of the next slice"),
}
_REASONS: Final = {
    *("rebuild", "mixed_precision", "probe", "return", "auto", "start", "periodic", "end"),
    *("waiting", "begun", "done", "impossible", "measuring", "trying", "decided"),
    *("bypassed", "no_sync", "late", "incomplete", "hooks lost", "outside", "in part", "left out", "backwards"),
    *("caught", "forward", "future", "process", "thread", "ended", "exception", "unrecorded"),
    *("phases", "all", "C", "Python", "torch.profiler", "Nsight Systems", "none"),
}
_STATES: Final = {
    *(phase.name.lower() for phase in Phase),
    *("starting", "joining", "launched", "announced", "completed", "failed"),
    *("running", "sleeping", "stopped", "gone", "never started", "silent", "dumped"),
    *("R", "S", "D", "T", "t", "Z", "X", "I"),
}
_VERDICTS: Final = {
    *("healthy", "models differ", "settings differ", "different collectives", "missing collective"),
    *("swapped collectives", "step behind", "batch skipped", "gradients never ready", "not reduced", "not finite"),
    *("replicas differ", "uneven inputs", "groups interleaved", "waits for data", "stuck", "holds the GIL", "killed"),
    *("out of memory", "wrong world size", "slow", "interrupted", "cannot tell", "certain", "likely", "can't tell"),
}
_SETTINGS: Final = {
    *("wrapper", "torch", "instrumented_ddp", "reduced_by", "python_reducer", "strategy", "updates", "bucket_plan"),
    *("broadcast_buffers", "forward_sync_buffers", "init_sync", "bucket_cap_mb", "bucket_cap_mb_list"),
    *("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
    *("batched_grad_copy", "param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
    *("cast_forward_inputs", "cast_root_forward_inputs", "True", "False", "None", "inf", "nan"),
    *("python", "overlapscope", "module", "device_ids", "output_device", "dim", "process_group", "check_reduction"),
}
_HOOKS: Final = {
    *("default_hooks", "powerSGD_hook", "batched_powerSGD_hook", "post_localSGD_hook", "quantization_hooks"),
    *("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook", "PostLocalSGDState"),
    *("fp16_compress_wrapper", "bf16_compress_wrapper", "quantization_pertensor_hook", "quantization_perchannel_hook"),
}
_OPTIMIZERS: Final = {
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "LBFGS", "Muon"),
    *("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "amsgrad", "maximize", "foreach"),
    *("capturable", "differentiable", "fused", "rho", "alpha", "centered", "lr_decay", "decoupled_weight_decay"),
    *("of", "group", "initial_accumulator_value", "initial_lr", "momentum_decay"),
}
_FACTS: Final = {CONTROL_GROUP, GPU, HOST, INFINIBAND, INTERFACE, PROCESS, *(fact.name for _, fact in iter_facts())}

WORDS: Final = frozenset(
    _OPERATIONS
    | _TYPES
    | _BACKENDS
    | _STRATEGIES
    | _REASONS
    | _STATES
    | _VERDICTS
    | _SETTINGS
    | _HOOKS
    | _OPTIMIZERS
    | _FACTS
    | {*DETAILS}
)
"""Words of fields that hold one of a few, and of settings."""

PARTS_OF_NAMES: Final = frozenset(
    {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "module", "_orig_mod"}
)
"""Parts of the names of parameters and modules that torch has given them."""

PARTS_OF_PATHS: Final = SKIPPED_PACKAGES | {
    *("lib", "bin", "site-packages", "dist-packages", "examples", "tests", "startup"),
    *("utils", "data", "distributed", "multiprocessing", "autograd", "cuda", "fx", "nn", "optim", "parallel"),
    *("spawn.py", "forkserver.py", "connection.py", "context.py", "managers.py", "pool.py", "process.py"),
    *("queues.py", "synchronize.py", "util.py", "popen_fork.py", "popen_forkserver.py", "popen_spawn_posix.py"),
    *("serialization.py", "subprocess.py", "socket.py", "ssl.py", "selectors.py", "shutil.py", "tarfile.py"),
    *("zipfile.py", "gzip.py", "pickle.py", "threading.py", "queue.py", "typing_extensions.py"),
    *("http", "urllib", "urllib3", "requests", "concurrent", "futures", "safetensors"),
    *("webdataset", "datasets", "streaming", "litdata", "ffcv", "nvidia", "dali"),
}
"""Parts of paths by which ``user_code`` and diagnosis know libraries, and what a rank waits for."""

ENDS_OF_PATHS: Final = frozenset({"py", "ipynb", "c", "cc", "cpp", "cu", "h", "hpp", "so"})

FUNCTIONS: Final = frozenset(
    {
        *("<module>", "<lambda>", "<locals>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"),
        *("__init__", "__call__", "__del__", "__enter__", "__exit__", "__iter__", "__next__", "main"),
        *("forward", "backward", "step", "_engine_run_backward", "init_process_group"),
        *("destroy_process_group", "_shutdown", "barrier", "_exit_function", "_python_exit"),
    }
)
"""Functions of Python and torch, and names that every script has."""

ERRORS: Final = frozenset(
    {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}
    | {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
    | {"OutOfMemoryError", "AcceleratorError", "IncidentError", "OverlapScopeError", "CalledProcessError"}
    | {"ProcessRaisedException", "ProcessExitedException", "ChildFailedError", "TimeoutExpired", "Empty", "Full"}
    | {"torch", "cuda", "distributed", "multiprocessing", "spawn", "__main__", "builtins", "subprocess", "queue"}
)
"""Types of exceptions, and the modules that their names begin with."""

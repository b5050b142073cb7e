"""The allow list: what a confidential recording keeps of each JSON file, field by field.

A field that is not listed is left out, so that a new one is private until someone has thought about it. Binary files
hold numbers alone, but for the headers of collective logs, which name their group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from overlapscope.trace.confidential import code, texts
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.confidential.rules import (
    Rule,
    by,
    description,
    digest,
    each,
    endpoint,
    group,
    hidden,
    many,
    number,
    numbers,
    plan_hash,
    process,
    record,
    setting,
    source,
    text,
    tokens,
    variable,
    version,
    word,
)
from overlapscope.trace.description import CONFIDENTIAL
from overlapscope.trace.early_ends import EARLY_END_PATTERN
from overlapscope.trace.process_files import EXITS_PATTERN
from overlapscope.trace.schema import (
    CALIBRATION_FILE,
    CALL_SITES_FILE,
    CAUGHT_ERRORS_PATTERN,
    CLOCK_FILE,
    CONTROL_FILE,
    CREATED_GROUPS_FILE,
    ENDED_FILE,
    FROZEN_FILE,
    HYPERPARAMETERS_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    JOB_FILE,
    JOINING_FILE,
    LINKS_FILE,
    LOOP_FACTS_FILE,
    MACHINE_FILE,
    MODES_FILE,
    NON_FINITE_FILE,
    PARAMETERS_FILE,
    PLANS_FILE,
    RANK_FILE,
    REJOINING_FILE,
    REPLICAS_FILE,
    REPORTS_FILE,
    RUN_FILE,
    SEGMENTS_FILE,
    SIGNATURES_FILE,
    STALL_FILE,
    UNREDUCED_FILE,
)

_name: Final = text(code.hide_name)
_names: Final = many(_name)
_class: Final = hidden("class")
_reason: Final = hidden("reason")
_message: Final = text(code.hide_message)
_stacks: Final = text(code.hide_stacks)
_file: Final = text(code.hide_file)


def _of(rule: Rule, *keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys, rule)


_SITE: Final = {"file": _file, "line": number, "function": text(code.hide_function)}
_site: Final = record(_SITE)
_sites: Final = many(_site)
_FAILURE: Final = {
    "type": text(code.hide_error_type),
    "message": _message,
    "traceback": _stacks,
    **_of(number, "time_ns", "has_begun_next_iteration"),
}
_SIGNATURE: Final = {
    **_of(word, "op", "reduce_op", "dtype", "role", "strategy", "phase"),
    **_of(number, "signature", "elements", "bytes", "peer", "tag", "model", "plan_epoch", "bucket", "round", "rounds"),
    "shapes": numbers,
    "names": _names,
    "plan_hash": plan_hash,
}
_PROCESS: Final = {
    **_of(number, "rank", "world_size", "pid", "time_ns"),
    "host": hidden("host"),
    "boot_id": hidden("boot"),
}
_VERSIONS: Final = by(word, version)
_ENVIRONMENT: Final = by(variable, setting)
_PROBED: Final = {"state": word, "why": _reason, **_of(number, "plans", "steps", "first_step")}
_MODEL: Final = record(
    {
        "model": number,
        "class": _class,
        "ddp_arguments": by(word, setting),
        "comm_hook": tokens,
        "comm_hook_call_site": _site,
        "updates": word,
        "trial": record({"given": many(word)}),
        "probing": record(_PROBED),
        "auto": record(
            {
                **_PROBED,
                "decisions": many(
                    record(
                        {
                            **_of(number, "after_reductions", "step", "measured_steps", "chosen"),
                            "trials": many(
                                record({"setting": tokens, **_of(number, "buckets", "predicted_ns", "measured_ns")})
                            ),
                            "why": _reason,
                        }
                    )
                ),
            }
        ),
        "sharding": record(
            {
                **_of(numbers, "shard_groups", "replica_groups"),
                "units": many(
                    record(
                        {
                            "module": _name,
                            **_of(number, "is_root", "reshards", "is_async"),
                            **_of(numbers, "forward_prefetch", "backward_prefetch"),
                        }
                    )
                ),
            }
        ),
    }
)
_COMMUNICATION: Final = record(
    {
        **_of(number, "ranks", "steps", "time_ns", "compute_ns", "exposed_ns", "idle_ns"),
        "groups": many(
            record(
                {
                    "group": description,
                    "op": word,
                    **_of(
                        number, "is_bucket", "is_join", "ranks", "count", "bytes", "time_ns", "exposed_ns", "wait_ns"
                    ),
                    **_of(number, "groups", "members"),
                    "last_ranks": by(word, numbers),
                }
            )
        ),
    }
)
_RUN: Final = record(
    {
        **_of(number, "format_version", "world_size", "started_unix_ns", "timeout_s", CONFIDENTIAL),
        "ranks": numbers,
        "backend": tokens,
        **_of(word, "detail", "device_marks"),
        "ends_are_bounds": _reason,
        "recorder": record({"language": word, "why": _reason}),
        "argv": many(_file),
        "versions": _VERSIONS,
        "environment": _ENVIRONMENT,
        "models": many(_MODEL),
        "imported": record({"from": word, "file": _file, "notes": many(_reason), "communication": _COMMUNICATION}),
    }
)
_RANK: Final = record(
    {
        **_PROCESS,
        **_of(number, "is_launched", "ends_are_kernels"),
        "device": tokens,
        "clock_samples": many(record(_of(number, "monotonic_ns", "unix_ns"))),
    }
)
_BUCKET: Final = record(
    {
        "dtype": word,
        "device": tokens,
        "bytes": number,
        "parameters": many(record({**_of(number, "index", "elements", "bytes"), "name": _name, "shape": numbers})),
    }
)
_CAUGHT: Final = record(
    {
        "how": word,
        "failure": record({**_FAILURE, "call_site": _site}),
        **_of(process, "thread", "process"),
        **_of(number, "step", "last_step", "last_ns", "count", "count_in_step"),
    }
)
_VERDICT: Final = record(
    {
        **_of(word, "kind", "certainty"),
        **_of(numbers, "blamed", "suspected", "concerned"),
        **_of(number, "step", "last_step", "number", "bucket"),
        "group": group,
        "parameters": _names,
        "call_sites": by(word, _site),
        "windows": by(
            word,
            many(
                record(
                    {
                        **_of(number, "number", "step", "batch", "flags", "announced_ns", "launched_ns"),
                        "completed_ns": number,
                        "phase": word,
                        "call_site": _site,
                        "signature": record(_SIGNATURE),
                    }
                )
            ),
        ),
        "alternative": lambda _, value: texts.ALTERNATIVE if value else "",
        **_of(lambda *_: [], "evidence", "advice", "also", "remarks"),
        "sentence": lambda *_: "",
    }
)


def _report(pseudonyms: Pseudonyms, value: Any) -> Any:
    """Hide a report of a watchdog: its sentences are made anew from its fields, for they quote names."""
    found = record(
        {
            **_of(number, "report", "time_ns", "step", "rank", "pid", "retracted_ns"),
            "process_state": word,
            "verdict": _VERDICT,
            "message": lambda *_: "",
        }
    )(pseudonyms, value)
    if found and isinstance(found.get("verdict"), dict):
        found["message"] = found["verdict"]["sentence"] = texts.describe_reported(found["verdict"])
    return found


_LOOP_FACTS: Final = record(
    {
        "user_reduced": many(record(_of(number, "model", "all", "some", "none"))),
        "repeated": many(
            record({**_of(number, "model", "step", "updates", "backwards"), "by": word, "site": hidden("line")})
        ),
        "micro_batches": many(record({**_of(number, "model", "last_step"), "changes": numbers})),
        "unheld": many(record({**_of(number, "model", "count"), "names": _names})),
        "batches": many(each(number, digest("batch"))),
    }
)
_PARAMETERS: Final = record(
    {
        "model": number,
        "class": _class,
        "parameters": many(each(_name, numbers, word)),
        "frozen": _names,
        "modules": by(_name, _class),
        "settings": by(word, tokens),
        **_SITE,
    }
)
_REPLICAS: Final = record(
    {
        "model": number,
        "key": digest("replica"),
        "class": _class,
        **_of(numbers, "ranks", "numbers"),
        "processor": hidden("processor"),
        "tensors": many(each(_name, word)),
        "left_out": many(each(_name, _reason)),
    }
)
_UNREDUCED: Final = record(
    {
        **_of(number, "model", "step", "parameter_count", "backwards", "reduced_backwards", "updates", "last_step"),
        "is_averaged_by_user": number,
        "cause": word,
        "call_site": _site,
        "call_sites": _sites,
        "parameters": _names,
    }
)
_NON_FINITE: Final = record(
    {
        **_of(number, "model", "step", "bucket", "tensors", "last_step", "has_nan", "is_batch_finite"),
        "unseen_since_step": number,
        **_of(_names, "parameters", "weights_before", "weights_after"),
        "finite_steps": numbers,
    }
)
_ENDED: Final = record(
    {
        **_FAILURE,
        **_SITE,
        "how": word,
        **_of(number, "rank", "pid", "step", "is_after_update", "has_lost_parent", "is_detached", "exit_status"),
        "caught": record({**_FAILURE, **_SITE, "how": word}),
        "exit_text": _message,
        "unrecorded_because": _reason,
    }
)
_EXIT: Final = record(
    {
        **_of(number, "pid", "status", "time_ns", "signaled_at_ns", "signal_received", "rank"),
        **_of(number, "is_command", "is_of_multiprocessing"),
        "boot_id": hidden("boot"),
    }
)
_EARLY_END: Final = record(
    {**_PROCESS, **_FAILURE, "exit_status": number, "exit_text": _message, **_of(_sites, "frames", "exit_frames")}
)
_MODE: Final = record({**_of(number, "step", "agreed_step", "from_step", "every", "time_ns"), "detail": word})
_SAMPLES: Final = many(record({"bytes": number, "times_ns": numbers}))

RULES: Final[Mapping[str, Rule]] = {
    RUN_FILE: _RUN,
    RANK_FILE: _RANK,
    JOINING_FILE: record({**_PROCESS, **_SITE, "versions": _VERSIONS, "environment": _ENVIRONMENT}),
    REJOINING_FILE: record({**_PROCESS, **_SITE, **_of(number, "call", "has_joined")}),
    CLOCK_FILE: record({"reason": word, "reference": hidden("boot"), "pings": number, "best": numbers}),
    MODES_FILE: _MODE,
    PLANS_FILE: record({**_of(number, "model", "epoch"), "hash": plan_hash, "reason": word, "buckets": many(_BUCKET)}),
    SEGMENTS_FILE: record(
        {
            **_of(number, "segment", "bucket", "lane", "round", "rounds"),
            "phase": word,
            **_of(numbers, "sends", "receives"),
        }
    ),
    LINKS_FILE: record(
        {
            "time_ns": number,
            "connections": many(
                record(
                    {
                        **_of(endpoint, "local", "peer"),
                        **_of(number, "bytes_acked", "bytes_received", "busy_us", "rwnd_limited_us"),
                        **_of(number, "sndbuf_limited_us", "delivery_bytes_per_s", "rtt_us", "min_rtt_us"),
                        "retransmits": number,
                    }
                )
            ),
        }
    ),
    MACHINE_FILE: record(
        {
            **_of(number, "source", "time_ns", "since_ns"),
            **_of(source, "name", "unreadable"),
            "label": hidden("label"),
            "values": by(word, number),
            "facts": many(word),
            "why": _reason,
        }
    ),
    SIGNATURES_FILE: record(_SIGNATURE),
    CREATED_GROUPS_FILE: record({"name": group, "ranks": numbers, "backend": tokens, "call_site": _site}),
    CALL_SITES_FILE: record({"call_site": number, **_SITE}),
    PARAMETERS_FILE: _PARAMETERS,
    REPLICAS_FILE: _REPLICAS,
    HYPERPARAMETERS_FILE: record(
        {
            "key": digest("optimizer"),
            "class_name": word,
            "names": many(tokens),
            "updates": number,
            "changes": many(record({**_of(number, "update", "step"), "values": numbers})),
        }
    ),
    UNREDUCED_FILE: _UNREDUCED,
    INTERRUPTED_BACKWARDS_FILE: record({"step": number, "call_site": _site}),
    NON_FINITE_FILE: _NON_FINITE,
    LOOP_FACTS_FILE: _LOOP_FACTS,
    CAUGHT_ERRORS_PATTERN: _CAUGHT,
    FROZEN_FILE: record({"step": number, "models": by(word, _names)}),
    STALL_FILE: record(
        {
            **_of(number, "time_ns", "longest_recovered_stall_ns", "cpu_share", "is_working"),
            "has_begun_next_iteration": number,
            "stacks": _stacks,
        }
    ),
    REPORTS_FILE: _report,
    ENDED_FILE: _ENDED,
    EXITS_PATTERN: _EXIT,
    EARLY_END_PATTERN: _EARLY_END,
    CONTROL_FILE: record({"modes": many(_MODE)}),
    JOB_FILE: record({"job": hidden("job")}),
    CALIBRATION_FILE: record(
        {
            "format": lambda *_: "overlapscope calibration",
            **_of(number, "version", "world_size"),
            **_of(tokens, "backend", "device"),
            "hosts": many(hidden("host")),
            **_of(_SAMPLES, "samples", "pairs"),
        }
    ),
}
"""Rule of each JSON file, and of each line of a file of lines, by its name or pattern."""


def hide_content(pseudonyms: Pseudonyms, kind: str, content: Any) -> Any:
    """Return what a confidential recording has in place of a JSON file, or of a line of one.

    Args:
        pseudonyms: receives names, and fields that were dropped because they are not in the list.
        kind: name or pattern of the file in ``RULES``.
    """
    before, pseudonyms.unknown = pseudonyms.unknown, set()
    found = RULES[kind](pseudonyms, content)
    pseudonyms.unknown = before | {f"{kind}: {key}" for key in pseudonyms.unknown}
    return found | {CONFIDENTIAL: True} if kind == RUN_FILE and isinstance(found, dict) else found

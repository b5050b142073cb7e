"""Sentences of ``overlapscope tune``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapscope.bucket_model.plans import format_caps
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.interval import Interval
from overlapscope.text import count_of, format_ns, format_share, format_share_change, format_share_range
from overlapscope.trace.ddp_trial import SIZE_ARGUMENTS, VIEWS_ARGUMENT, DDPSetting
from overlapscope.tuning.candidates import Choice, Kept
from overlapscope.tuning.verdict import MeasuredGain, TuningOutcome

AS_IT_IS: Final = "as it is"
"""Name of the script's own settings."""
_MIN_GAIN: Final = f"{100 * MIN_GAIN:g} %"

_KEPT: Final[dict[Kept, str]] = {
    "sizes: auto": 'The script lets bucket_cap_mb="auto" choose its buckets, so no sizes were tried.',
    "sizes: plan": "The script gives a bucket_plan, so no sizes were tried.",
    "sizes: strategy": "The script sets a strategy of its own, so no sizes were tried.",
    "views: on": "The script sets gradient_as_bucket_view=True, which stays.",
    "views: given": "The script sets gradient_as_bucket_view=False, so bucket views were not tried.",
    "compression: not allowed": "Gradients were sent as they are; --allow-compression also tries half of their bytes.",
}


def format_setting(setting: DDPSetting) -> str:
    """Name a setting in a few words, by DDP's arguments."""
    parts = []
    if setting.caps_mb is not None:
        parts.append(format_caps(list(setting.caps_mb)) if setting.caps_mb else "bucket_cap_mb=None")
    if setting.bucket_views:
        parts.append(f"{VIEWS_ARGUMENT}=True")
    if setting.compression:
        parts.append(f"{setting.compression} compression hook")
    return ", ".join(parts) or AS_IT_IS


def format_code(setting: DDPSetting) -> str:
    """Write a setting as the lines to put into the script."""
    arguments = format_setting(DDPSetting(caps_mb=setting.caps_mb, bucket_views=setting.bucket_views))
    lines = []
    if setting.compression:
        lines.append("from torch.distributed.algorithms.ddp_comm_hooks import default_hooks")
    lines.append(f"model = DistributedDataParallel(..., {arguments})" if arguments != AS_IT_IS else "")
    if setting.compression:
        lines.append(f"model.register_comm_hook(None, default_hooks.{setting.compression}_compress_hook)")
    return "\n".join(filter(None, lines))


def describe_own_settings(choice: Choice) -> str:
    """Name the script's own bucket sizes."""
    sizes = choice.own.sizes
    own = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return f"The script's own setting: {own}." if own else "The script leaves bucket sizes at DDP's default."


def describe_kept(choice: Choice) -> Iterator[str]:
    """Say what was not tried, and why."""
    for what in choice.kept:
        yield _KEPT[what]


def describe_plans(choice: Choice) -> Iterator[str]:
    """Name what is to be run, each with its predicted change of the step."""
    for size in choice.sizes:
        yield f"{format_setting(size.setting)}: {describe_prediction(size.gain)}"
    for addition in choice.additions:
        what = format_setting(addition.on(DDPSetting(), addition.gain).setting)
        yield f"{what}, on top of the fastest: {describe_prediction(addition.gain)}"


def describe_change(gain: MeasuredGain) -> str:
    """Format a measured change of the step, with its interval."""
    change = Interval(value=-gain.gain.value, low=-gain.gain.high, high=-gain.gain.low)
    return (
        f"{format_ns(gain.base_ns)} → {format_ns(gain.new_ns)} a step ({format_share_change(change.value)}, "
        f"99 % interval {format_share_range(change)}), measured by {count_of(gain.pairs, 'pair')} of runs"
    )


def format_outcome(outcome: TuningOutcome, choice: Choice) -> str:
    """Say what to set, or to keep what there is, in one or two sentences."""
    if outcome.best is None or outcome.gain is None:
        if choice.is_hopeless:
            return f"Keep what you have: {_explain_hopeless(choice)}"
        return "Keep what you have: none of the settings that were tried could be measured."
    setting = format_setting(outcome.best.setting)
    measured = describe_change(outcome.gain)
    if outcome.verdict == "set":
        return f"Set {setting}: {measured}."
    if outcome.verdict == "keep: no gain":
        return (
            f"Keep what you have: nothing that was tried gains {_MIN_GAIN}. The fastest of it is {setting}: {measured}."
        )
    return f"Keep what you have: nothing that was tried is surely faster. The fastest of it is {setting}: {measured}."


def _explain_hopeless(choice: Choice) -> str:
    if choice.reachable < MIN_GAIN:
        at_most = format_share(choice.reachable)
        return (
            f"no setting can gain {_MIN_GAIN}, as exposed communication and copies of gradients, without waits for "
            f"later ranks, are {at_most} of the step."
        )
    names = ", ".join((*SIZE_ARGUMENTS[:1], VIEWS_ARGUMENT))
    return f"no other setting of {names} is predicted to come near a gain of {_MIN_GAIN}."


def describe_prediction(gain: Interval) -> str:
    """Format a predicted gain as a change of the step."""
    change = Interval(value=-gain.value, low=-gain.high, high=-gain.low)
    return f"{format_share_change(change.value)} ({format_share_range(change)})"


def format_gain_range(gain: Interval) -> str:
    """Format the bounds of a measured gain."""
    return format_share_range(gain)

"""Texts of verdicts on replicas that drifted apart, and on gradients that were never reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapscope.diagnosis.evidence import UnreducedCause, UnreducedStep
from overlapscope.diagnosis.replica_drift import ComparedReplicas, HyperparameterDifference, ReplicaDifference
from overlapscope.diagnosis.text import at_line, first_few, join_and, plural
from overlapscope.diagnosis.texts.collectives import NO_MAJORITY
from overlapscope.diagnosis.verdict import VerdictText
from overlapscope.diagnosis.wait_graph import find_minority
from overlapscope.text import capitalize, count_of, format_ranks, rank_list


def unreduced(
    ranks: Sequence[int],
    step: UnreducedStep,
    *,
    is_proven: bool,
    may_be_averaged: bool,
    first_compared: int | None = None,
    unknown: Sequence[int] = (),
) -> VerdictText:
    """Describe an optimizer step with gradients that were never averaged.

    Args:
        step: what the first of the ranks has recorded.
        is_proven: True if the replicas are known to differ since.
        may_be_averaged: True if the models may rightly be averaged later.
        first_compared: step in which the replicas were first compared, if that was later, and they differed.
        unknown: other ranks that are not known to have come as far as this update.
    """
    evidence = [_EVIDENCE.get(step.cause, _UNKNOWN_CAUSE).format(gradients=_gradients_text(step), cause=step.cause)]
    if len(step.call_sites) > 1:
        evidence.append(f"The backwards that were not reduced: {join_and([str(site) for site in step.call_sites])}.")
    if step.updates > 1:
        evidence.append(f"{step.updates:,} updates used such gradients, the latest in step {step.last_step}.")
    if is_proven:
        evidence.append("The parameters are known to differ between ranks since then.")
    if unknown:
        evidence.append(f"Whether {rank_list(unknown)} reduced theirs in step {step.step} is not known.")
    return {
        "sentence": f"{capitalize(rank_list(ranks))} stepped the optimizer in step {step.step} with gradients "
        f"that were {_not_reduced_text(step)}, so the replicas drift apart.",
        "alternative": _alternative(step, may_be_averaged=may_be_averaged, first_compared=first_compared),
        "evidence": tuple(evidence),
        "advice": (_UNREDUCED_ADVICE.get(step.cause, _UNKNOWN_CAUSE_ADVICE),),
    }


def _alternative(step: UnreducedStep, *, may_be_averaged: bool, first_compared: int | None) -> str:
    if first_compared is not None:
        return f"the parameters were first compared in step {first_compared}, and may have differed before"
    if step.cause in ("outside", "in part"):
        return _MEANT_TO_DIFFER
    if step.cause not in _EVIDENCE:
        return "the cause may be harmless, which a later version may know"
    return (
        "the models may be averaged every few steps on purpose, which no collective so far has done" * may_be_averaged
    )


_MEANT_TO_DIFFER: Final = (
    "each rank may be meant to have its own values of these parameters, which are in no DDP instance"
)


def _not_reduced_text(step: UnreducedStep) -> str:
    at = at_line(step.call_site)
    if step.reduced_backwards:
        all_backwards = step.backwards + step.reduced_backwards
        of = f"{step.backwards:,} of {count_of(all_backwards, 'backward')}{at}"
        return f"not all reduced: {of} came after the reduction"
    if step.cause == "hooks lost":
        return f"never reduced{', from a backward' if at else ''}{at}: DDP's hooks on {_count_text(step)} were gone"
    if step.cause == "outside":
        return f"never reduced{at}: {_count_text(step)} ({_names_text(step)}) {_is(step)} in no DDP instance"
    if step.cause == "in part":
        return f"not all reduced{at}: the all-reduces of this loop leave out {_count_text(step)} ({_names_text(step)})"
    if step.cause == "left out":
        return f"not reduced{at}: the all-reduce that comes before nearly all other updates was left out"
    if step.cause == "incomplete":
        return f"never reduced{', from a backward' if at else ''}{at}: a bucket never had all its gradients"
    return f"never reduced{', from a backward' if at else ''}{at}{' under no_sync()' * (step.cause == 'no_sync')}"


def _count_text(step: UnreducedStep) -> str:
    return count_of(step.parameter_count, "parameter")


def _is(step: UnreducedStep) -> str:
    return "is" if step.parameter_count == 1 else "are"


def _names_text(step: UnreducedStep) -> str:
    hidden = step.parameter_count - len(step.parameters)
    return first_few((*step.parameters, *[""] * hidden))


def _gradients_text(step: UnreducedStep) -> str:
    if step.cause in ("outside", "in part", "left out"):
        return f"The gradients of {_names_text(step)}"
    if not step.parameter_count:
        return f"Gradients of model {step.model}"
    return f"The gradients of {_count_text(step)} of model {step.model} ({_names_text(step)})"


_EVIDENCE: Final[dict[UnreducedCause, str]] = {
    "bypassed": "{gradients} were accumulated, but none of its buckets was launched.",
    "no_sync": "{gradients} were accumulated by backwards whose forward ran under no_sync() or with "
    "require_backward_grad_sync=False, and no reduction came after them.",
    "late": "{gradients} were accumulated by backwards that came after the reduction: their forward had been called "
    "before it, and DDP reduces only one backward after a forward.",
    "incomplete": "{gradients} had arrived, and others that their bucket waits for had not, so nothing was averaged.",
    "hooks lost": "{gradients} have no hook of DDP any more: casting or moving the module after DDP() has wrapped it "
    "makes autograd drop them, and nothing is reduced from then on.",
    "outside": "{gradients} were in no bucket, and no other collective of their size was launched between two updates.",
    "in part": "{gradients} were given to no collective, neither by themselves nor in a copy, and others were.",
    "left out": "{gradients} were given to no collective before this update, and to one before nearly all others.",
}
_UNKNOWN_CAUSE: Final = "{gradients} were not reduced, for a cause that this version does not know: {cause!r:.40}."
_UNKNOWN_CAUSE_ADVICE: Final = "Diagnose with the version of OverlapScope that has made the recording."
_UNREDUCED_ADVICE: Final[dict[UnreducedCause, str]] = {
    "bypassed": "Call the DDP object itself, not its .module; run the last backward outside no_sync().",
    "no_sync": "Run forward and backward of the last micro batch before each update outside no_sync().",
    "late": "Call DDP once for all inputs of a step, or run each backward before the next forward, all but the last "
    "under no_sync().",
    "incomplete": "Pass find_unused_parameters=True, or remove what forward does not use.",
    "hooks lost": "Cast and move the module before DDP() wraps it, or wrap it again afterwards.",
    "in part": "All-reduce the gradients of all parameters that the optimizer updates.",
    "left out": "Look for the condition under which this loop does not reach its all-reduce.",
    "outside": "Wrap the module that holds these parameters in DDP as well, or all-reduce their gradients before the "
    "update.",
}


def harmless_unreduced(ranks: Sequence[int], step: UnreducedStep) -> str:
    """Describe updates with gradients of one rank alone that did no harm."""
    why = (
        "the user's collectives have averaged as much since"
        if step.is_averaged_by_user
        else "the parameters are the same on all ranks all the same"
    )
    return (
        f"{count_of(step.updates, 'update')} of model {step.model} on {rank_list(ranks)} used gradients that DDP had "
        f"not reduced, first in step {step.step}{at_line(step.call_site)}; {why}."
    )


def model_text(one: ComparedReplicas, models: int) -> str:
    """Format a model, by its number if there are several."""
    if one.is_outside:
        return f"no DDP instance, which {one.class_name} updates,"
    return f"the model ({one.class_name})" if models == 1 else f"model {one.model} ({one.class_name})"


def differ(
    compared: ComparedReplicas,
    difference: ReplicaDifference,
    model: str,
    steps: tuple[int | None, int],
    setting: HyperparameterDifference | None,
    *,
    are_settings_equal: bool,
    has_settings: bool,
    has_uneven_inputs: bool,
) -> VerdictText:
    """Describe parameters that differ between ranks.

    Args:
        model: the model as text.
        steps: first and last step in which they may have begun to differ; None if unknown.
        setting: a setting of an optimizer that explains it.
        are_settings_equal: True if the settings of the optimizers are known to be the same.
        has_settings: True if the settings are known.
        has_uneven_inputs: True if ranks are or were under ``join()``.
    """
    is_since_start = steps[0] is None and difference.differs_at == 0
    what = _difference_text(compared, difference, model, is_past=is_since_start)
    if is_since_start and compared.init_sync:
        sentence = f"Before the first step {what}, although DDP had made the replicas equal when it was built."
    elif is_since_start:
        sentence = f"Before the first step {what}, and DDP did not make them equal (init_sync=False)."
    else:
        since = _since_text(difference, *steps)
        sentence = f"The replicas differ since {since}: {what}.{f' {_setting_text(setting, steps)}' if setting else ''}"
    evidence = _evidence(compared, difference, are_settings_equal=are_settings_equal)
    advice = [_advice(difference, setting, has_settings=has_settings)]
    if has_uneven_inputs and setting is None and not is_since_start and len(difference.names) > 1:
        evidence.append(_STATE_AFTER_JOIN)
        advice.insert(0, _ADVICE_ON_JOIN)
    return {
        "sentence": sentence,
        "alternative": "; or ".join(_alternatives(compared, difference)),
        "evidence": tuple(evidence),
        "advice": tuple(advice),
    }


_STATE_AFTER_JOIN: Final = (
    "Ranks have used join(), which makes parameters equal at its end, but not the state of optimizers, as momentum or "
    "Adam's averages: a rank with fewer batches makes fewer updates, and its later ones differ."
)
_ADVICE_ON_JOIN: Final = (
    "Give all ranks equally many batches; or use ZeroRedundancyOptimizer under Join([model, optimizer]), which updates "
    "the state of a joined rank, too."
)


def _difference_text(compared: ComparedReplicas, difference: ReplicaDifference, model: str, *, is_past: bool) -> str:
    names = difference.names
    count = f"{'at least ' if difference.uncompared else ''}{len(names):,} of {compared.tensors:,}"
    if len(names) == compared.tensors > 1:
        count = "both" if len(names) == 2 else f"all {len(names):,}"
    are = plural(names, "was", "were") if is_past else plural(names, "is", "are")
    kind = "frozen parameters" if difference.kind == "frozen" else "parameters"
    sides = sides_text(compared.ranks, difference.sides)
    return f"{count} {kind} ({first_few(names)}) of {model} {are} not the same on {sides}"


def _since_text(difference: ReplicaDifference, earliest: int | None, latest: int) -> str:
    if earliest is None:
        return f"step {difference.differs_step} or before"
    return f"step {earliest}" if earliest == latest else f"a step from {earliest} to {latest}"


def _setting_text(setting: HyperparameterDifference, replicas_differ: tuple[int | None, int]) -> str:
    values = join_and([f"{value:g} on {rank_list(ranks)}" for value, ranks in setting.values[::-1]])
    since = f" since step {setting.step}" if setting.is_since_then else f" in step {setting.step}"
    if setting.is_since_then and replicas_differ == (setting.step, setting.step):
        since = " since then"
    return f"The {setting.name} of {setting.class_name} is {values}{since}."


def _evidence(compared: ComparedReplicas, difference: ReplicaDifference, *, are_settings_equal: bool) -> list[str]:
    notes = []
    these = plural(difference.names, "This parameter", "These parameters")
    if difference.equal_step is not None:
        them = f"{these} {plural(difference.names, 'was', 'were')}"
        if not difference.is_at_once:
            them = "The first of these parameters was"
        notes.append(
            f"{them} bitwise equal at the beginning of step {difference.equal_step}, and not at that of step "
            f"{difference.differs_step}."
        )
    if others := difference.uncompared:
        have = plural(others, "other has", "others have")
        notes.append(f"{len(others):,} {have} not been compared since step {difference.differs_step}.")
    buckets = sorted({compared.buckets[name] for name in difference.names if name in compared.buckets})
    if buckets:
        are = plural(difference.names, "is", "are")
        notes.append(f"{these} {are} in {plural(buckets, 'bucket', 'buckets')} {format_ranks(buckets)}.")
    if are_settings_equal and difference.differs_at:
        notes.append("The settings of the optimizers (learning rate and others) are the same on all ranks.")
    if unknown := sorted(set(compared.ranks).difference(*difference.sides)):
        notes.append(f"What {rank_list(unknown)} had at the same time is not known.")
    if not find_minority(difference.sides, len(compared.ranks)):
        notes.append(NO_MAJORITY)
    if compared.left_out:
        notes.append(f"Not compared: {first_few([f'{name}: {why}' for name, why in compared.left_out])}.")
    return notes


def _advice(difference: ReplicaDifference, setting: HyperparameterDifference | None, *, has_settings: bool) -> str:
    if setting is not None:
        return f"Compute the {setting.name} from what all ranks have in common, such as the step or a reduced loss."
    if difference.equal_step is None and difference.differs_at == 0:
        return "Load weights before DDP() wraps the model, or the same ones on all ranks."
    return _advice_on(difference.names if has_settings else ())


def _advice_on(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "Look for code that changes this parameter on one rank; if there is none, test that machine's memory."
    return (
        "Load the same weights and optimizer state on all ranks; let no update depend on what one rank alone has seen."
    )


def _alternatives(compared: ComparedReplicas, difference: ReplicaDifference) -> list[str]:
    found = [_MEANT_TO_DIFFER] if compared.is_outside else []
    if len(compared.processors) > 1 and difference.differs_at > 0:
        processors = "; ".join(f"{name} on {rank_list(ranks)}" for name, ranks in compared.processors.items())
        found.append(
            f"ranks compute on different processors or numbers of threads, which may round differently: {processors}"
        )
    if compared.comm_hook is not None and difference.differs_at > 0:
        found.append(f"the communication hook {compared.comm_hook} may mean replicas to differ")
    if difference.kind == "frozen":
        found.append("these parameters are not trained, and the model may keep rank-specific values in them")
    return found


def differ_at_end(
    one: ComparedReplicas, names: Sequence[str], sides: Sequence[Sequence[int]], model: str, equal_step: int | None
) -> VerdictText:
    """Describe parameters that were equal in all comparisons, but not when the recording ended.

    Args:
        names: the parameters that differ.
        sides: ranks with equal parameters.
        model: the model as text.
        equal_step: last step at whose beginning they were compared.
    """
    when = "" if equal_step is None else f"in step {equal_step} or later "
    return {
        "sentence": f"When the recording ended, {len(names):,} of {one.tensors:,} parameters of {model} "
        f"({first_few(names)}) {plural(names, 'was', 'were')} not the same on {sides_text(one.ranks, sides)}: {when}"
        f"something changed {plural(names, 'it', 'them')} on some ranks only.",
        "alternative": f"{plural(names, 'it', 'they')} may rightly have been changed there after the last update",
        "advice": (_advice_on(names),),
    }


def sides_text(ranks: Sequence[int], sides: Sequence[Sequence[int]]) -> str:
    """Format sides: ``rank 1 as on ranks 0, 2``; all sides if none has a majority."""
    odd = find_minority(sides, len(ranks))
    others = [rank for rank in ranks if rank not in odd]
    return f"{rank_list(odd)} as on {rank_list(others)}" if odd else join_and(list(map(rank_list, sides)))


def comparison_notes(one: ComparedReplicas, model: str) -> list[str]:
    """Return the results of the comparison of a model's replicas for a healthy job."""
    notes = []
    if one.difference is not None and one.difference.was_made_equal:
        notes.append(
            f"Parameters of {model} differ between ranks, but had been made equal again before, as by averaging models."
        )
    elif one.difference is not None and one.is_outside:
        notes.append(_own_values_note(one, one.difference.names))
    elif one.difference is not None:
        why = f"{one.comm_hook} lets them" if one.comm_hook else "models do that are averaged every few steps"
        notes.append(f"Parameters of {model} differ between ranks, as {why}.")
    elif one.latest_step is not None:
        notes += _equal_notes(one, model)
    elif one.at_end is not None and not one.at_end.differing:
        notes.append(
            f"Parameters of {model} could be compared when the recording ended only: they are the same on "
            f"{rank_list(one.ranks)}."
        )
    elif one.at_end is None:
        notes.append(
            f"Parameters of {model} have not been compared: no two ranks have left fingerprints of the same step."
        )
    if one.was_different is not None:
        first, last = one.was_different
        notes.append(f"They differed from step {first} to step {last}, and were made equal again.")
    if one.buffers is not None:
        names = first_few(one.buffers.names)
        notes.append(f"Buffers of {model} differ between ranks ({names}), as broadcast_buffers is off.")
    return notes


def _own_values_note(one: ComparedReplicas, names: Sequence[str]) -> str:
    return (
        f"{count_of(len(names), 'parameter')} that {one.class_name} updates ({first_few(names)}) "
        f"{plural(names, 'is', 'are')} in no DDP instance, and {plural(names, 'was', 'were')} not the same on "
        f"{rank_list(one.ranks)} from the first update on: each rank trains its own."
    )


def _equal_notes(one: ComparedReplicas, model: str) -> list[str]:
    is_equal_at_end = one.at_end is not None and not one.at_end.differing
    notes = [
        f"{count_of(one.tensors, 'parameter')} of {model} {'is' if one.tensors == 1 else 'are'} the same on "
        f"{rank_list(one.ranks)} in {one.moments:,} comparisons, the latest at the beginning of step "
        f"{one.latest_step}{', and when the recording ended' if is_equal_at_end else ''}."
    ]
    if one.at_end is not None and one.at_end.differing:
        names = one.at_end.differing
        meant = f"{one.comm_hook} means them to differ, " if one.comm_hook else ""
        notes.append(
            f"When the recording ended, {len(names):,} of them ({first_few(names)}) {plural(names, 'was', 'were')} not "
            f"the same on {sides_text(one.ranks, one.at_end.sides)}: either {meant}the last updates differ, or "
            "what came after them is not done on all ranks, such as loading the best checkpoint."
        )
    return notes

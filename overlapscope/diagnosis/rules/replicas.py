"""Rules for replicas that drifted apart: nothing fails, but the ranks no longer train one model."""

from __future__ import annotations

from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    HyperparameterDifference,
    ReplicaDifference,
    compare_hyperparameters,
)
from overlapscope.diagnosis.text import first_few, group_into_ranges, join_and, plural, rank_list
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_AVERAGED_ON_PURPOSE = "post_localSGD"
"""Part of the name of torch's hook that reduces within groups of ranks, and averages replicas now and then."""


def find_replica_drift(facts: Facts) -> Verdict | None:
    """Find the first model whose parameters differ between ranks, unless they are made equal now and then."""
    found = [one for one in facts.evidence.replicas if _has_drifted(one)]
    if not found:
        return None
    compared = min(found, key=lambda one: one.difference.differs_step)  # type: ignore[union-attr]
    difference = compared.difference
    assert difference is not None
    blamed = find_minority(difference.sides, len(compared.ranks))
    has_settings, others = compare_hyperparameters(
        {rank: facts.ranks[rank].hyperparameters for rank in compared.ranks if rank in facts.ranks}
    )
    setting = next((one for one in others if _explains(one, difference)), None)
    earliest, latest = difference.equal_step, difference.differs_step - 1
    if setting is not None and setting.is_since_then and earliest is not None:
        earliest = latest = setting.step
    return Verdict(
        kind="replicas differ",
        sentence=_sentence(facts, compared, difference, earliest, latest, setting),
        alternative="; or ".join(_alternatives(compared, difference)),
        blamed=blamed,
        concerned=tuple(sorted(rank for side in difference.sides for rank in side)),
        step=earliest,
        last_step=None if earliest == latest or earliest is None else latest,
        parameters=difference.names,
        bucket=_bucket(compared, difference),
        evidence=tuple(_evidence(compared, difference, blamed, has_settings=has_settings and not others)),
        advice=(_advice(difference, setting, has_settings=has_settings),),
    )


def find_replica_drift_at_end(facts: Facts) -> Verdict | None:
    """Find the first model whose parameters were equal in all comparisons, but differ when recordings end."""
    return next((_differ_at_end(facts, one) for one in facts.evidence.replicas if _has_drifted_at_end(one)), None)


def note_replica_comparison(facts: Facts) -> list[str]:
    """Return the results of the comparison for a healthy job."""
    sentences = []
    for one in facts.evidence.replicas:
        of = _model_text(facts, one)
        if one.difference is not None:
            sentences.append(
                f"Parameters of {of} differ between ranks, and were made equal again before: as by averaging models."
                if one.difference.was_made_equal
                else f"Parameters of {of} differ between ranks, as {one.comm_hook} lets them."
            )
        elif one.latest_step is not None:
            what = "parameter" if one.tensors == 1 else "parameters"
            sentences.append(
                f"{one.tensors:,} {what} of {of} {plural(range(one.tensors), 'is', 'are')} the same on "
                f"{rank_list(one.ranks)} in {one.moments:,} comparisons, the newest at the beginning of step "
                f"{one.latest_step}{_same_at_end_text(one)}."
            )
            sentences += _end_text(one)
        if one.was_different is not None:
            first, last = one.was_different
            sentences.append(f"They differed from step {first} to step {last}, and were made equal again.")
        if one.buffers is not None:
            sentences.append(
                f"Buffers of {of} differ between ranks ({first_few(one.buffers.names)}), as broadcast_buffers is off."
            )
    return sentences


def _same_at_end_text(one: ComparedReplicas) -> str:
    return ", and when the recording ended" if one.at_end is not None and not one.at_end.differing else ""


def _end_text(one: ComparedReplicas) -> list[str]:
    """Format what differs only at the end, as if one rank had loaded a checkpoint."""
    if one.at_end is None or not one.at_end.differing:
        return []
    names = one.at_end.differing
    were = plural(range(len(names)), "was", "were")
    return [
        f"When the recording ended, {len(names):,} of them ({first_few(names)}) {were} not the same on "
        f"{_sides_text(one.ranks, one.at_end.sides)}: either the last updates differ, or what came after them is not "
        f"done on all ranks, such as loading the best checkpoint."
    ]


def _has_drifted_at_end(one: ComparedReplicas) -> bool:
    """Return True if parameters differ only at the end, but not all: loading a checkpoint would change all of them."""
    is_complete = one.at_end is None or not one.at_end.differing or one.at_end.is_all_trained
    return not is_complete and one.difference is None and one.was_different is None and one.comm_hook is None


def _differ_at_end(facts: Facts, one: ComparedReplicas) -> Verdict:
    at_end = one.at_end
    assert at_end is not None
    count = len(at_end.differing)
    were = plural(range(count), "was", "were")
    last_step = max((facts.ranks[rank].steps_done for rank in one.ranks if rank in facts.ranks), default=0) - 1
    when = "" if at_end.equal_step is None else f"in step {at_end.equal_step} or later "
    return Verdict(
        kind="replicas differ",
        sentence=f"When the recording ended, {count:,} of {one.tensors:,} parameters of {_model_text(facts, one)} "
        f"({first_few(at_end.differing)}) {were} not the same on {_sides_text(one.ranks, at_end.sides)}: {when}something "
        f"changed {'it' if count == 1 else 'them'} on some ranks only.",
        alternative=f"{'it' if count == 1 else 'they'} may rightly have been changed there after the last update",
        blamed=find_minority(at_end.sides, len(one.ranks)),
        concerned=one.ranks,
        step=at_end.equal_step,
        last_step=None if at_end.equal_step is None or last_step <= at_end.equal_step else last_step,
        parameters=at_end.differing,
        advice=(_advice_on(at_end.differing),),
    )


def _sides_text(ranks: tuple[int, ...], sides: tuple[tuple[int, ...], ...]) -> str:
    """Format sides: ``rank 1 as on ranks 0 and 2``; all sides if none has a majority."""
    odd = find_minority(sides, len(ranks))
    others = [rank for rank in ranks if rank not in odd]
    return f"{rank_list(odd)} as on {rank_list(others)}" if odd else join_and(list(map(rank_list, sides)))


def _has_drifted(one: ComparedReplicas) -> bool:
    if one.difference is None or one.difference.was_made_equal:
        return False
    return _AVERAGED_ON_PURPOSE not in (one.comm_hook or "")


def _sentence(
    facts: Facts,
    compared: ComparedReplicas,
    difference: ReplicaDifference,
    earliest: int | None,
    latest: int,
    setting: HyperparameterDifference | None,
) -> str:
    count, all_of_them = len(difference.names), len(difference.names) == compared.tensors
    number = f"all {count:,}" if all_of_them and count > 1 else f"{count:,} of {compared.tensors:,}"
    number = "both" if all_of_them and count == 2 else number
    is_since_start = earliest is None and difference.differs_at == 0
    are = ("was" if count == 1 else "were") if is_since_start else ("is" if count == 1 else "are")
    kind = "frozen parameters" if difference.kind == "frozen" else "parameters"
    what = f"{number} {kind} of {_model_text(facts, compared)} ({first_few(difference.names)})"
    where = f"{are} not the same on {_sides_text(compared.ranks, difference.sides)}"
    if is_since_start:
        if compared.init_sync:
            return f"Before the first step {what} {where}, although DDP had made the replicas equal when it was built."
        return f"Before the first step {what} {where}, and DDP was told not to make them equal (init_sync=False)."
    if earliest is None:
        when = f"step {difference.differs_step} or before"
    elif earliest == latest:
        when = f"step {earliest}"
    else:
        when = f"a step from {earliest} to {latest}"
    sentence = f"The replicas differ since {when}: {what} {where}."
    return sentence if setting is None else f"{sentence} {_setting_text(setting)}"


def _setting_text(setting: HyperparameterDifference) -> str:
    values = join_and([f"{value:g} on {rank_list(ranks)}" for value, ranks in setting.values[::-1]])
    since = f" since step {setting.step}" if setting.is_since_then else f" in step {setting.step}"
    return f"The {setting.name} of {setting.class_name} is {values}{since}."


def _explains(setting: HyperparameterDifference, difference: ReplicaDifference) -> bool:
    """Return True if a hyperparameter splits the ranks in the same way, and did so when replicas began to differ."""
    is_same = {ranks for _, ranks in setting.values} == {tuple(sorted(side)) for side in difference.sides}
    is_before = setting.step < difference.differs_step
    is_first = difference.equal_step is None or not setting.is_since_then or setting.step >= difference.equal_step
    return is_same and is_before and is_first and difference.differs_at > 0


def _evidence(
    compared: ComparedReplicas, difference: ReplicaDifference, blamed: tuple[int, ...], *, has_settings: bool
) -> list[str]:
    sentences = []
    if difference.equal_step is not None:
        them = "They were" if difference.is_at_once else "The first of them was"
        sentences.append(
            f"{them} the same to the bit at the beginning of step {difference.equal_step}, and not at that of step "
            f"{difference.differs_step}."
        )
    buckets = sorted({compared.buckets[name] for name in difference.names if name in compared.buckets})
    if buckets:
        sentences.append(f"They are in bucket{'s' if len(buckets) > 1 else ''} {join_and(group_into_ranges(buckets))}.")
    if has_settings and difference.differs_at:
        sentences.append("The settings of the optimizers (learning rate and others) are the same on all ranks.")
    if unknown := sorted(set(compared.ranks).difference(*difference.sides)):
        sentences.append(f"What {rank_list(unknown)} had at the same time is not known.")
    if not blamed:
        sentences.append("No side has a majority, so no rank is blamed.")
    if compared.left_out:
        names = first_few([f"{name}: {why}" for name, why in compared.left_out])
        sentences.append(f"Not compared: {names}.")
    return sentences


def _advice(difference: ReplicaDifference, setting: HyperparameterDifference | None, *, has_settings: bool) -> str:
    if setting is not None:
        return f"Compute the {setting.name} from what all ranks have in common, such as the step or a reduced loss."
    if difference.equal_step is None and difference.differs_at == 0:
        return "Load weights before DDP() wraps the model, or the same ones on all ranks."
    return _advice_on(difference.names if has_settings else ())


def _advice_on(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return "Look for code that changes this parameter on one rank; if there is none, test that machine's memory."
    return (
        "Load the same weights and optimizer state on all ranks; let no update depend on what one rank alone has seen."
    )


def _alternatives(compared: ComparedReplicas, difference: ReplicaDifference) -> list[str]:
    found = []
    if len(compared.processors) > 1 and difference.differs_at > 0:
        found.append(
            f"ranks compute on different processors or numbers of threads, which may round differently: "
            f"{'; '.join(f'{name} on {rank_list(ranks)}' for name, ranks in compared.processors.items())}"
        )
    if compared.comm_hook is not None and difference.differs_at > 0:
        found.append(f"the communication hook {compared.comm_hook} may mean replicas to differ")
    if difference.kind == "frozen":
        found.append("these parameters are not trained, and the model may keep what is each rank's own in them")
    return found


def _bucket(compared: ComparedReplicas, difference: ReplicaDifference) -> int | None:
    """Return the bucket of the parameters, if it is the same for all."""
    buckets = {compared.buckets.get(name) for name in difference.names}
    return buckets.pop() if len(buckets) == 1 else None


def _model_text(facts: Facts, compared: ComparedReplicas) -> str:
    if len(facts.evidence.replicas) == 1:
        return f"the model ({compared.class_name})"
    return f"model {compared.model} ({compared.class_name})"

"""Settings that ranks recorded (DDP arguments, environment, versions), and where they differ: live and from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.diagnosis.evidence import CallSite, RankEvidence, RankSettings
from overlapscope.diagnosis.process_state import parse_call_site
from overlapscope.diagnosis.text import join_and
from overlapscope.errors import Problem
from overlapscope.text import rank_list
from overlapscope.trace.json_files import read_lines
from overlapscope.trace.schema import PARAMETERS_FILE

HOOK: Final = "comm_hook"
_NO_HOOK: Final = "none"
_NOT_SET: Final = "not set"


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """A setting that differs between the ranks that recorded it."""

    model: int | None
    """Number of the DDP instance; None: the process."""
    name: str
    ranks_with: dict[str, tuple[int, ...]]
    """Ranks with each value, the value of most ranks first."""

    @property
    def is_variable(self) -> bool:
        """Return True for an environment variable."""
        return self.name.isupper()

    def value_of(self, rank: int) -> str | None:
        """Return the value on a rank; None if unknown."""
        return next((value for value, ranks in self.ranks_with.items() if rank in ranks), None)

    def __str__(self) -> str:
        sides = [f"{value} on {rank_list(ranks)}" for value, ranks in self.ranks_with.items()]
        return f"{self.name} is {join_and(sides[::-1])}"


def read_rank_settings(folder: Path, run: Mapping[str, Any], problems: list[Problem]) -> tuple[RankSettings, ...]:
    """Read the settings of a rank: of the process first, then of its DDP instances.

    Args:
        folder: folder of the rank.
        run: content of its ``run.json``; of ``joining.json`` if it has not got further.
    """
    process: list[RankSettings] = []
    if isinstance(run.get("environment"), dict) and isinstance(
        run.get("versions"), dict
    ):  # an imported recording has neither
        recorded = {name: run[name] for name in ("backend", "timeout_s") if run.get(name) is not None}
        recorded |= run["versions"] | run["environment"]
        process = [RankSettings(values={str(name): str(value) for name, value in recorded.items()})]
    described = run.get("models")
    hooks = {
        one["model"]: one
        for one in (described if isinstance(described, list) else ())
        if isinstance(one, dict) and "model" in one
    }

    def model_of(line: Any) -> list[RankSettings]:
        number = int(line["model"])
        hook = hooks.get(number, {})
        values = {str(name): str(value) for name, value in line["settings"].items()}
        values[HOOK] = str(hook.get(HOOK, _NO_HOOK))
        where = parse_call_site(hook.get("comm_hook_call_site") or {})
        return [RankSettings(model=number, values=values, call_site=parse_call_site(line), hook_call_site=where)]

    return (*process, *read_lines(folder / PARAMETERS_FILE, problems, model_of))


def find_setting_differences(ranks: Mapping[int, RankEvidence]) -> tuple[SettingDifference, ...]:
    """Find the settings that differ between ranks, of DDP instances first."""
    recorded = [(rank, settings) for rank, one in sorted(ranks.items()) for settings in one.settings]
    variables = {name for _, settings in recorded for name in settings.values if name.isupper()}
    found: dict[tuple[int | None, str], dict[str, list[int]]] = {}
    for rank, settings in recorded:
        not_set = dict.fromkeys(sorted(variables), _NOT_SET) if settings.model is None else {}
        for name, value in (not_set | settings.values).items():
            found.setdefault((settings.model, name), {}).setdefault(value, []).append(rank)
    return tuple(
        SettingDifference(
            model=model,
            name=name,
            ranks_with={
                value: tuple(with_it)
                for value, with_it in sorted(values.items(), key=lambda side: (-len(side[1]), side[1]))
            },
        )
        for (model, name), values in sorted(found.items(), key=lambda one: one[0][0] is None)
        if len(values) > 1
    )


def find_setting_line(one: RankEvidence, model: int, *, is_hook: bool = False) -> CallSite | None:
    """Return the line at which a rank created a DDP instance, or registered its communication hook, if it has one."""
    settings = next((each for each in one.settings if each.model == model), None)
    if settings is None:
        return None
    return (settings.hook_call_site if is_hook else None) or settings.call_site

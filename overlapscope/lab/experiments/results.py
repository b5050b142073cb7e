"""Results of an experiment: a Parquet file with a row for each trial, rewritten after each of them.

It contains all that is needed to repeat a trial. Results that were measured under other conditions are not mixed:
hosts, device, versions and links have to be those of the first row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.trial import ExperimentTrial
from overlapscope.text import count_of, format_bytes, format_ns

# Conditions under which trials are measured.


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Hosts, devices, versions and links of a measurement."""

    hosts: tuple[str, ...]
    """Host name of each rank."""
    device: str
    versions: Mapping[str, str]
    link_latency_ns: float
    """Time of an all-reduce of 1 kB by all ranks."""
    link_bytes_per_s: float
    """Rate of each link in an all-reduce of some MB, as nccl-tests' busbw."""
    argv: tuple[str, ...]

    def columns(self) -> dict[str, Any]:
        """Return the conditions as columns of a row."""
        return {
            "hosts": list(self.hosts),
            "device": self.device,
            "versions": json.dumps(dict(self.versions), sort_keys=True),
            "link_latency_ns": self.link_latency_ns,
            "link_bytes_per_s": self.link_bytes_per_s,
            "argv": list(self.argv),
        }


def describe_conditions(rows: pd.DataFrame) -> str:
    """Describe the conditions of results: ranks, hosts, links and versions, as the end of a sentence."""
    row = rows.iloc[-1]
    where = f"{count_of(len(row['hosts']), 'rank')} on {count_of(len(set(row['hosts'])), 'host')}, {row['device']}"
    link = (
        f"links carry {format_bytes(row['link_bytes_per_s'])}/s, an all-reduce of 1 kB takes "
        f"{format_ns(row['link_latency_ns'])}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in json.loads(row["versions"]).items())
    return f"{where}; {link}; {versions}."


RESULTS_FILE: Final = "results.parquet"
RECORDINGS_FOLDER: Final = "recordings"
_MAX_RATE_RATIO: Final = 2.0
"""Ratio of rates from which links count as different: the measurement of a link is short, and varies."""
_REQUIRED_COLUMNS: Final = ("trial", "experiment", "failure")


class Results:
    """Rows of one experiment, and its folder.

    Args:
        folder: Folder of the experiment; made if it does not exist.

    Raises:
        OverlapScopeError: The folder contains something else, or its results can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / RESULTS_FILE
        self._rows: list[dict[str, Any]] = []
        if self._path.exists():
            self._rows = read_results(folder).to_dict("records")  # type: ignore[assignment]
        elif folder.exists() and (not folder.is_dir() or _list_foreign_files(folder)):
            raise OverlapScopeError(f"{folder}: holds something else than results; give another folder with -o")
        try:
            (folder / RECORDINGS_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OverlapScopeError(f"{folder}: can't be created ({error.strerror})") from None

    @property
    def done(self) -> frozenset[str]:
        """Return the keys of the trials that need not be repeated. Failed trials may succeed another time."""
        return frozenset(row["trial"] for row in self._rows if not row["failure"])

    def recording(self, trial: ExperimentTrial) -> Path:
        """Return the folder that a trial is recorded into."""
        return self.folder / RECORDINGS_FOLDER / trial.folder_name

    def add(
        self, trial: ExperimentTrial, conditions: Conditions, measured: Mapping[str, Any], failure: str = ""
    ) -> None:
        """Store what was measured in a trial, or why it failed, replacing an earlier failure."""
        self._rows = [row for row in self._rows if row["trial"] != trial.key]
        row = {"trial": trial.key, **asdict(trial), **conditions.columns(), **measured, "failure": failure}
        self._rows.append({**row, "recording": f"{RECORDINGS_FOLDER}/{trial.folder_name}"})
        draft = self._path.with_suffix(".part")
        pd.DataFrame(self._rows).to_parquet(draft, index=False)
        os.replace(draft, self._path)  # an interrupted run keeps all rows but the last

    def check(self, conditions: Conditions) -> None:
        """Check that new rows may be added to the existing ones.

        Raises:
            OverlapScopeError: These were measured on other hosts or devices, with other versions or over another link.
        """
        first = next(iter(self._rows), None)
        if first is None:
            return
        now, differs = conditions.columns(), ""
        for name in ("hosts", "device", "versions"):
            if _plain(first[name]) != now[name]:
                differs = f"with {name} {_plain(first[name])}, and here it is {now[name]}"
        rates = (float(first["link_bytes_per_s"]), conditions.link_bytes_per_s)
        # Within a host the processors carry the traffic, and their load varies.
        if len(set(conditions.hosts)) > 1 and max(rates) > _MAX_RATE_RATIO * min(rates):
            then, here = (f"{format_bytes(rate)}/s" for rate in rates)
            differs = f"over links that carried {then}, and these carry {here}"
        if differs:
            raise OverlapScopeError(f"{self.folder}: its results were measured {differs}; give another folder with -o")


def read_results(folder: Path) -> pd.DataFrame:
    """Read the rows of an experiment: its trials' settings and results.

    Raises:
        OverlapScopeError: There are none, or they can't be read.
    """
    path = folder / RESULTS_FILE
    try:
        table = pd.read_parquet(path)
    except FileNotFoundError:
        raise OverlapScopeError(
            f"{folder}: no results in it; 'overlapscope lab run NAME -o FOLDER' makes some"
        ) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise OverlapScopeError(f"{path}: can't be read ({error})") from None
    if missing := [name for name in _REQUIRED_COLUMNS if name not in table]:
        raise OverlapScopeError(f"{path}: these are no results of an experiment; there is no column {missing[0]}")
    return table


def find_results(folders: Sequence[Path]) -> list[Path]:
    """Find the folders of experiments among these folders and directly in them."""
    found: list[Path] = []
    for folder in folders:
        with suppress(OSError):
            found += [
                path.parent
                for path in (folder / RESULTS_FILE, *sorted(folder.glob(f"*/{RESULTS_FILE}")))
                if path.is_file()
            ]
    return list(dict.fromkeys(found))


def _list_foreign_files(folder: Path) -> list[Path]:
    """List the files in a folder that are not ours."""
    return [path for path in folder.iterdir() if path.name != RECORDINGS_FOLDER]


def _plain(value: Any) -> Any:
    return list(value) if not isinstance(value, str) else value

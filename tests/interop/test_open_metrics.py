"""Metrics, parsed with Prometheus's own client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from overlapscope.analysis import Analysis
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.interop.open_metrics import FAMILIES, Sample, format_open_metrics, generate_samples
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording, write_straggling_recording

Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


def values_in(text: str, families: Mapping[str, str] = FAMILIES) -> Values:
    """By name, the values by label; the same in both formats."""
    both = []
    for parse in (parse_open_metrics, parse_text):
        values: Values = {}
        for family in parse(text):
            assert (family.type, family.documentation) == ("gauge", families[family.name])
            for one in family.samples:
                values.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
        both.append(values)
    assert both[0] == both[1]
    return both[0]


def test_the_blocks_of_a_step_sum_to_it(tmp_path: Path) -> None:
    analysis = Analysis(read_trace(write_recording(tmp_path, steps=9)))
    values = values_in(format_open_metrics({"a run": list(generate_samples(analysis, None))}))
    (step,) = values["overlapscope_step_seconds"].values()
    blocks = values["overlapscope_block_seconds"]
    assert step == pytest.approx(0.01)
    assert sum(blocks.values()) == pytest.approx(step)
    assert sum(values["overlapscope_exposed_seconds"].values()) == pytest.approx(
        blocks[("block", "exposed"), ("run", "a run")]
    )
    assert values["overlapscope_latest_step"] == {(("run", "a run"),): 8}


def test_who_others_wait_for_has_a_saving(tmp_path: Path) -> None:
    late = write_straggling_recording(tmp_path, late_us=lambda rank, _: 3000 * (rank == 2))
    values = values_in(format_open_metrics({"late": list(generate_samples(Analysis(read_trace(late)), None))}))
    ((labels, saving),) = values["overlapscope_straggler_saving_seconds"].items()
    assert dict(labels) == {"cause": "compute", "host": "", "link": "", "ranks": "2", "run": "late"}
    assert saving == pytest.approx(0.003, rel=0.01)


def test_what_is_not_known_has_no_sample(tmp_path: Path) -> None:
    nothing = Analysis(read_trace(write_recording(tmp_path, steps=0)))
    values = values_in(format_open_metrics({"run": list(generate_samples(nothing, None))}))
    assert values["overlapscope_steps_counted"] == {(("run", "run"),): 0}
    assert not {"overlapscope_step_seconds", "overlapscope_fault", "overlapscope_overlap_ratio"} & values.keys()
    assert Diagnosis.of(tmp_path) is None


def test_the_dashboard_asks_for_what_there_is_and_the_document_lists_all() -> None:
    docs = Path(__file__).parents[2] / "docs"
    asked = set(re.findall(r"overlapscope_\w+", (docs / "grafana.json").read_text()))
    assert asked <= FAMILIES.keys()
    listed = set(re.findall(r"`(overlapscope_\w+)`", (docs / "export.md").read_text()))
    assert listed == FAMILIES.keys()


def test_names_of_runs_are_text_whatever_they_are() -> None:
    name = 'a "run"\\\nof 2'
    text = format_open_metrics({name: [Sample("overlapscope_ranks", 2)], "other": [Sample("overlapscope_ranks", 3)]})
    assert values_in(text)["overlapscope_ranks"] == {(("run", name),): 2, (("run", "other"),): 3}

"""Report as a short text in Markdown, to be pasted into an issue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from dashboards.recording import Snapshot
from dashboards.report.about import about, name_of, without_path
from dashboards.report.sections import Content, Section, content_of
from overlapscope.model.prediction_rows import SIZE_COLUMNS, size_rows

_MOST_ROWS: Final = 16
_MOST_PROBLEMS: Final = 12
_MARK: Final = re.compile(r"[\\`*<\[|~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|^[#>+-](?=\s)")
_REFERENCE: Final = re.compile(r"(?<!\w)[@#](?=\w)")
"""Text that GitHub renders as a user or an issue, escaped or not."""
_QUOTED: Final = re.compile(r"`([^`\n]+)`")


def report_markdown(snapshot: Snapshot, now: datetime) -> str:
    """Return the report of a recording; ``now`` is when it is made."""
    content = content_of(snapshot)
    lines = [f"# OverlapScope: {plain(name_of(snapshot.trace.path))}"]
    if content.attempts:
        lines += ["", plain(content.attempts)]
    for section in content.sections:
        if section.name == "timeline":
            continue  # the timeline is useless without zooming
        lines += ["", f"## {section.title}", "", *_lines_of(content, section)]
    lines += ["", "## About", "", *(f"- {label}: {plain(value)}" for label, value in about(snapshot.trace, now))]
    lines += _problems(snapshot)
    return without_path("\n".join(lines) + "\n", snapshot.trace.path)


def plain(text: object) -> str:
    r"""Return text that Markdown shows as it is, on one line: names in a recording may contain anything.

    Text between backticks is code, unless it contains a mark that would break a table.
    """
    joined = " ".join(str(text).replace("\N{NO-BREAK SPACE}", " ").split())
    parts = _QUOTED.split(joined)
    return "".join(
        f"`{part}`"
        if number % 2 and "|" not in part
        else _REFERENCE.sub("\\g<0>\N{ZERO WIDTH SPACE}", _MARK.sub(r"\\\g<0>", part))
        for number, part in enumerate(parts)
    )


def table(columns: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a table whose first column is text and whose others are numbers."""
    return [
        f"| {' | '.join(map(plain, columns))} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(map(plain, row))} |" for row in rows[:_MOST_ROWS]),
        *([f"\nand {len(rows) - _MOST_ROWS:,} more"] if len(rows) > _MOST_ROWS else []),
    ]


def _lines_of(content: Content, section: Section) -> Iterator[str]:
    if section.reason is not None:
        yield plain(" ".join([f"{section.reason['headline']}.", section.reason["message"], section.reason["advice"]]))
        return
    said = section.variables
    if section.name == "overview":
        yield from _overview(said)
    elif section.name == "stragglers":
        yield from _stragglers(said)
    elif section.name == "buckets" and content.advice is not None:
        yield from [f"**{plain(said['sentence'])}**", ""]
        yield plain(" ".join([*said["further"], said["basis"], *said["missing"]]))
        yield from ["", *table(SIZE_COLUMNS, size_rows(content.advice.recommendation))]
    elif section.name == "order":
        yield from _order(said)


def _overview(said: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{plain(said['sentence'])}**", "", plain(said["basis"])]
    if not said["rank_rows"]:
        return
    yield ""
    for each in said["headlines"]:
        yield f"- {plain(each.label)}: **{plain(each.value)}**" + (f" ({plain(each.note)})" if each.note else "")
    on_path = ["on the critical path"] if said["has_job"] else []
    rows = [
        [
            row.label if row.block else f"of it {row.label}",
            row.mean,
            row.interval,
            row.share,
            *([row.job] if on_path else []),
        ]
        for row in said["account"]
    ]
    total = [said["account_step"], said["account_interval"], "100 %", *([said["account_step"]] if on_path else [])]
    yield from ["", *table(["a step", "mean", "90 % interval", "share", *on_path], [*rows, ["step", *total]])]
    if said["worth_doing"]:
        yield from ["", "Worth doing, by what each alone would save of the mean step:", ""]
        yield from (
            f"- {plain(row.what)}: saves {row.saves} ({row.share}; {row.interval})" for row in said["worth_doing"]
        )
    yield from [
        "",
        *table(["rank", "where", *said["columns"]], [[r.rank, r.place, *r.cells] for r in said["rank_rows"]]),
    ]


def _stragglers(said: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{plain(said['verdict'])}**", "", plain(said["basis"])]
    if said["blame"]:
        rows = [
            [row.who, row.blame, row.evidence, row.delay, row.cost, f"{row.saving} ({row.saving_interval})", row.step]
            for row in said["blame"]
        ]
        columns = ["who", "why", "evidence", "delay", "cost", "saves if fixed", "worst step"]
        yield from ["", *table(columns, rows)]


def _order(said: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{plain(said['kind'])}: {plain(said['sentence'])}**"]
    if said["alternative"]:
        yield f"This is likely, not certain: {plain(said['alternative'])}."
    if said["basis"]:
        yield from ["", plain(said["basis"])]
    lists = [
        ("Where the ranks stood", [f"{who}: {where}" for who, where in said["standings"]]),
        ("Evidence", said["evidence"]),
        ("What to try", said["advice"]),
        ("Also found, probably consequences", said["also"]),
        ("What the watchdog reported", [f"{row.when}: {row.sentence} {row.retracted}" for row in said["reports"]]),
    ]
    for title, sentences in lists:
        if sentences:
            yield from ["", f"{title}:", "", *(f"- {plain(sentence)}" for sentence in sentences)]


def _problems(snapshot: Snapshot) -> Iterator[str]:
    of_order = snapshot.diagnosis.problems if snapshot.diagnosis is not None else ()
    problems = list(dict.fromkeys(problem.message for problem in [*snapshot.trace.problems, *of_order]))
    if problems:
        yield from ["", "Problems with the recording:", ""]
        yield from (f"- {plain(message)}" for message in problems[:_MOST_PROBLEMS])
        if len(problems) > _MOST_PROBLEMS:
            yield f"- and {len(problems) - _MOST_PROBLEMS:,} more"

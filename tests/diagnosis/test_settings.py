"""Settings that ranks don't have in common: the cause where they explain what differs, else a note."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from instrumented_ddp.recording.metadata import collect_environment, collect_model_settings
from overlapscope.diagnosis.evidence import Evidence, RankEvidence, RankSettings
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.rank_settings import read_rank_settings
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import PARAMETERS_FILE
from tests.diagnosis.jobs import BEFORE_SECOND, entry, group, held_up, idle, job, rank, site
from tests.ordered import bucket

BITMAP = Signature(op="all_reduce", dtype="int32", elements=16, role="bitmap")
USERS = Signature(op="all_reduce", reduce_op="sum", dtype="float32", elements=3)
BUFFERS = Signature(op="broadcast", dtype="float32", elements=64, peer=0, role="buffers")
CONSTRUCTION = Signature(op="broadcast", dtype="float32", elements=900, peer=0, role="construction")
SAME = {
    "wrapper": "torch",
    "find_unused_parameters": "False",
    "static_graph": "False",
    "broadcast_buffers": "True",
    "bucket_cap_mb": "25",
    "gradient_as_bucket_view": "False",
    "comm_hook": "none",
}


def set_up(number: int, model: int = 0, **given: str) -> RankEvidence:
    """A rank whose DDP instance was made in line 20."""
    return rank(number, settings=(RankSettings(model=model, values=SAME | given, call_site=site(20)),))


def ranks_at(*launched: Signature, given: dict[str, str]) -> Evidence:
    """Three ranks that all did one thing and then these; rank 1 was given other settings."""
    windows = {number: (entry(1, USERS), entry(2, signature)) for number, signature in enumerate(launched)}
    order = group(windows, first_divergence=2, divergence="signature")
    ranks = [set_up(number, **(given if number == 1 else {})) for number in range(len(launched))]
    return job(*ranks, groups=[order])


@pytest.mark.parametrize(
    ("name", "value", "others", "own"),
    [
        ("find_unused_parameters", "True", USERS, BITMAP),
        ("find_unused_parameters", "True", bucket(0), replace(bucket(0), plan_hash="other", elements=7)),
        ("static_graph", "True", bucket(0), BITMAP),
        ("broadcast_buffers", "False", BUFFERS, bucket(0)),
        ("broadcast_buffers", "False", CONSTRUCTION, replace(CONSTRUCTION, elements=836)),
        ("comm_hook", "fp16_compress_hook", bucket(0), replace(bucket(0), reduce_op="sum", dtype="float16")),
    ],
)
def test_a_setting_that_makes_the_difference_is_the_verdict(
    name: str, value: str, others: Signature, own: Signature
) -> None:
    verdict = judge(ranks_at(others, own, others, given={name: value}))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("settings differ", (1,), "certain")
    assert f"{name} is {value} on rank 1" in verdict.sentence
    assert verdict.call_sites == dict.fromkeys(range(3), site(20))
    assert any("collective 2" in sentence for sentence in verdict.evidence), "what differs is the evidence"


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("find_unused_parameters", "True", replace(USERS, elements=5)),
        ("broadcast_buffers", "False", BITMAP),
        ("gradient_as_bucket_view", "True", replace(bucket(0), plan_hash="other")),
        ("bucket_cap_mb", "50", replace(bucket(0), plan_hash="other")),  # rank 0's sizes count at the rebuild
    ],
)
def test_a_setting_that_has_nothing_to_do_with_it_is_only_noticed(name: str, value: str, own: Signature) -> None:
    verdict = judge(ranks_at(bucket(0), own, bucket(0), given={name: value}))
    assert verdict.kind != "settings differ"
    assert any(f"{name} is {value}" in sentence for sentence in verdict.evidence)


def test_a_setting_that_is_split_otherwise_than_the_ranks_is_not_the_cause() -> None:
    evidence = ranks_at(bucket(0), BITMAP, bucket(0), given={})
    evidence.ranks[2] = set_up(2, find_unused_parameters="True")
    assert judge(evidence).kind == "different collectives"


def test_caps_count_where_torch_never_rebuilds_the_buckets() -> None:
    evidence = ranks_at(bucket(0), replace(bucket(0), plan_hash="other"), bucket(0), given={})
    for number, cap in enumerate(("25", "50", "25")):
        evidence.ranks[number] = set_up(number, find_unused_parameters="True", bucket_cap_mb=cap)
    assert judge(evidence).kind == "settings differ"


def test_the_settings_of_another_model_are_not_the_cause() -> None:
    evidence = ranks_at(bucket(0), BITMAP, bucket(0), given={})
    for number in range(3):
        other = set_up(number, model=1, find_unused_parameters=str(number == 1)).settings
        evidence.ranks[number] = replace(evidence.ranks[number], settings=evidence.ranks[number].settings + other)
    assert judge(evidence).kind == "different collectives"


def test_with_two_ranks_nobody_is_blamed() -> None:
    verdict = judge(ranks_at(bucket(0), BITMAP, given={"find_unused_parameters": "True"}))
    assert (verdict.kind, verdict.blamed) == ("settings differ", ())


def test_what_else_speaks_against_a_rank_does_not_count_where_a_setting_explains_it() -> None:
    evidence = ranks_at(bucket(0), BITMAP, given={"find_unused_parameters": "True"})
    error = replace(BEFORE_SECOND, step=0, last_step=0)
    evidence.ranks[1] = replace(evidence.ranks[1], caught=(error,))
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed, verdict.suspected) == ("settings differ", (), ())


def test_settings_that_differ_are_no_fault_of_a_healthy_job() -> None:
    ranks = [set_up(number, static_graph=str(number == 1)) for number in range(3)]
    same = group({number: (entry(1, bucket(0)),) for number in range(3)})
    verdict = judge(job(*(replace(one, liveness="ended") for one in ranks), groups=[same]))
    assert (verdict.kind, verdict.evidence) == ("healthy", ())


def test_variables_are_noticed_in_a_standstill_only() -> None:
    threads = {
        number: (RankSettings(values={"torch": "2.13"} | ({"OMP_NUM_THREADS": "1"} if number == 1 else {})),)
        for number in range(3)
    }
    late = replace(idle(rank(1, phase="forward", step=2), 60), settings=threads[1])
    ranks = {number: replace(one, settings=threads[number]) for number, one in held_up(late).ranks.items()}
    standstill = judge(replace(held_up(late), ranks=ranks))
    assert (standstill.kind, "OMP_NUM_THREADS" in str(standstill.evidence)) == ("stuck", True)
    stopped = judge(replace(held_up(late), ranks=ranks | {1: replace(ranks[1], liveness="stopped")}))
    assert (stopped.kind, "OMP_NUM_THREADS" in str(stopped.evidence)) == ("stopped", False)


def test_values_that_are_nobodys_business_are_not_written_down() -> None:
    assert collect_environment(
        {
            "NCCL_ALGO": "Ring",
            "OMP_NUM_THREADS": "4",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NCCL_TOPO_FILE": "topology.xml",
            "NCCL_NET_PLUGIN": "/home/me/plugin.so",
            "NCCL_SOME_TOKEN": "abc",
            "TORCHELASTIC_RUN_ID": "7",
            "RANK": "3",
            "AWS_SECRET_ACCESS_KEY": "abc",
        }
    ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}


def test_what_a_rank_has_written_is_read_again(tmp_path: Path) -> None:
    given = collect_model_settings(
        {"static_graph": True, "broadcast_buffers": None, "device_ids": [1]}, wrapper="torch"
    )
    line = {"model": 0, "class": "Net", "parameters": [], "settings": given, "file": "a.py", "line": 3, "function": "f"}
    (tmp_path / PARAMETERS_FILE).write_text(dump_json_line(line))
    hook_line = {"file": "a.py", "line": 9, "function": "f"}
    run = {
        "versions": {"torch": "2.13"},
        "environment": {},
        "models": [{"model": 0, "comm_hook": "compress", "comm_hook_call_site": hook_line}],
    }
    process, model = read_rank_settings(tmp_path, run, problems := [])
    assert process.values == {"torch": "2.13"}
    assert model.values == {
        "wrapper": "torch",
        "broadcast_buffers": "True",
        "static_graph": "True",
        "comm_hook": "compress",
    }
    assert (str(model.call_site), str(model.hook_call_site), problems) == ("a.py:3 (f)", "a.py:9 (f)", [])

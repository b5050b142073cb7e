"""Rates and latencies as ``tc`` writes them, and what a machine may lack for hosts of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.network import link
from overlapscope.lab.network.link import Link, find_missing_requirement, parse_latency, parse_rate

NEAR, FAR = Link(bits_per_s=1e9), Link(bits_per_s=1e9, latency_ms=2)


@given(st.integers(1, 999), st.sampled_from([("mbit", 1e6), ("Mbit", 1e6), ("gbit", 1e9)]))
def test_a_rate_is_its_number_times_its_unit(number, unit):
    name, bits = unit
    if number * bits <= 100e9:
        assert math.isclose(parse_rate(f"{number}{name}"), number * bits)
    else:
        with pytest.raises(OverlapScopeError, match="1mbit to 100gbit"):
            parse_rate(f"{number}{name}")


@given(st.integers(1, 1000), st.sampled_from([("us", 1e-3), ("ms", 1.0)]))
def test_a_latency_is_its_number_times_its_unit(number, unit):
    name, ms = unit
    assert math.isclose(parse_latency(f"{number}{name}"), number * ms)


def test_fractions_and_no_latency_at_all_can_be_written():
    assert parse_rate("2.5gbit") == 2.5e9
    assert parse_latency("0.5ms") == 0.5
    assert parse_latency("0") == 0


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "1 gbit", "-1gbit", "1gbit; reboot", "nan"])
def test_what_is_no_rate_is_answered_with_examples(text):
    with pytest.raises(OverlapScopeError) as refused:
        parse_rate(text)
    assert str(refused.value) == f"{text}: not a rate; write it as tc does, such as 1gbit or 25mbit"


@pytest.mark.parametrize("text", ["", "2", "2m", "-2ms", "2ms 3ms", "inf"])
def test_what_is_no_latency_is_answered_with_examples(text):
    with pytest.raises(OverlapScopeError) as refused:
        parse_latency(text)
    assert str(refused.value) == f"{text}: not a latency; write it as tc does, such as 2ms or 500us"


def test_what_no_link_here_can_have_is_refused():
    for text in ("1kbit", "0mbit", "200gbit"):
        with pytest.raises(OverlapScopeError, match="a link can have 1mbit to 100gbit"):
            parse_rate(text)
    with pytest.raises(OverlapScopeError, match="up to 1s"):
        parse_latency("2s")


@pytest.fixture
def able(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has everything; its files and programs."""
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    (tmp_path / "tun").touch()
    for name in ("ip", "tc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(link, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(link, "_TUN", tmp_path / "tun")
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path


def test_a_machine_that_has_everything_lacks_nothing(able):
    assert find_missing_requirement(NEAR) is None
    assert find_missing_requirement(FAR) is None


def test_it_takes_linux(able, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert find_missing_requirement(NEAR) == "this needs network namespaces, which only Linux has; this is darwin"


@pytest.mark.parametrize(
    ("effective", "lacking"),
    [
        ("0000000000000000", "CAP_NET_ADMIN and CAP_SYS_ADMIN"),
        ("0000000000001000", "CAP_SYS_ADMIN"),
        ("00000000a80425fb", "CAP_NET_ADMIN and CAP_SYS_ADMIN"),  # root in a container of Docker
    ],
)
def test_who_lacks_a_capability_is_told_which_and_to_use_sudo(able, effective, lacking):
    (able / "status").write_text(f"CapEff:\t{effective}\n")
    assert find_missing_requirement(NEAR) == f"this needs root ({lacking}) to make network namespaces; run it with sudo"


def test_a_missing_program_is_named_with_its_package(able):
    (able / "tc").unlink()
    assert find_missing_requirement(NEAR) == "there is no program tc; install the package iproute2"
    (able / "ip").unlink()
    assert find_missing_requirement(NEAR) == "there is no program ip and no tc; install the package iproute2"


def test_only_a_latency_needs_the_tun_device(able):
    (able / "tun").unlink()
    assert find_missing_requirement(NEAR) is None
    missing = find_missing_requirement(FAR)
    assert missing is not None
    assert missing.endswith("can't be used, and a latency needs it; try 'modprobe tun', or leave out the latency")

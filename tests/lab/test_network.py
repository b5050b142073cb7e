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
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(OverlapScopeError, match="not a rate"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "2", "2m", "-2ms", "2ms 3ms", "inf"])
def test_what_is_no_latency_is_refused(text):
    with pytest.raises(OverlapScopeError, match="not a latency"):
        parse_latency(text)


@pytest.mark.parametrize("text", ["1kbit", "0mbit", "200gbit"])
def test_a_rate_that_no_link_here_can_have_is_refused(text):
    with pytest.raises(OverlapScopeError, match="1mbit to 100gbit"):
        parse_rate(text)


def test_refusals(golden):
    said = []
    for parse, text in ((parse_rate, "fast"), (parse_latency, "2m"), (parse_rate, "200gbit"), (parse_latency, "2s")):
        with pytest.raises(OverlapScopeError) as refused:
            parse(text)
        said.append(str(refused.value))
    golden("lab/links", "\n".join(said))


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


def test_what_a_machine_lacks_is_named_with_how_to_get_it(able, monkeypatch, golden):
    lacking = []
    (able / "tun").unlink()
    assert find_missing_requirement(NEAR) is None
    lacking.append(find_missing_requirement(FAR))
    (able / "tc").unlink()
    lacking.append(find_missing_requirement(NEAR))
    (able / "ip").unlink()
    lacking.append(find_missing_requirement(NEAR))
    for effective in ("0000000000000000", "0000000000001000", "00000000a80425fb"):  # the last: root in Docker
        (able / "status").write_text(f"CapEff:\t{effective}\n")
        lacking.append(find_missing_requirement(NEAR))
    monkeypatch.setattr("sys.platform", "darwin")
    lacking.append(find_missing_requirement(NEAR))
    golden("lab/requirements", "\n".join(map(str, lacking)).replace(str(able), "/dev/net"))

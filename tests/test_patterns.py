"""Microbenchmarks as graphs: their replayed times in closed form, and as Chakra files."""

from __future__ import annotations

import pytest

from lumos_nb import replay
from lumos_nb.errors import InputError
from lumos_nb.exchange.chakra import pattern, validate, write


@pytest.mark.parametrize(("compute_us", "transfer_us"), [(100, 30), (30, 100)])
def test_the_slower_of_two_streams_sets_the_pace(compute_us, transfer_us):
    graph = pattern(4, 5, compute_us=compute_us, collective="all_gather", size_bytes=1024, transfer_us=transfer_us)
    expected_us = 5 * max(compute_us, transfer_us) + min(compute_us, transfer_us)
    assert replay(graph).makespan_ns == 1000 * expected_us


def test_what_does_not_overlap_adds_up():
    graph = pattern(4, 5, compute_us=100, collective="all_to_all", size_bytes=1024, transfer_us=30, overlapped=False)
    assert replay(graph).makespan_ns == 5 * 130_000


def test_each_alone():
    chain = pattern(2, 7, compute_us=10, flops=1e9)
    assert replay(chain).makespan_ns == 70_000
    assert chain.ops["flops"].sum() == 14e9
    collectives = pattern(8, 3, collective="reduce_scatter", size_bytes=4096, transfer_us=20)
    assert replay(collectives).makespan_ns == 60_000
    assert collectives.ops["kind"].to_list().count("join") == 3
    assert set(collectives.ops.filter(kind="comm")["comm_bytes"]) == {4096}


def test_patterns_leave_as_valid_chakra_files(tmp_path):
    graph = pattern(4, 2, compute_us=10, flops=1e9, collective="all_reduce", size_bytes=1024, transfer_us=5)
    write(graph, tmp_path / "out", target="astra-sim")
    assert validate(tmp_path / "out", target="astra-sim").is_empty()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({}, "nothing", id="neither"),
        pytest.param({"collective": "all_reduced"}, "all_reduced", id="an unknown collective"),
        pytest.param({"compute_us": float("nan")}, "compute_us=nan", id="no time"),
        pytest.param({"compute_us": 1, "rounds": 0}, "rounds=0", id="no round"),
        pytest.param({"compute_us": 1e300}, r"compute_us=1e\+300", id="longer than an int64"),
        pytest.param({"compute_us": 1, "flops": "a"}, "flops='a'", id="work in words"),
        pytest.param({"compute_us": 1, "flops": float("nan")}, "flops=nan", id="no work"),
        pytest.param({"compute_us": 1, "transfer_us": None}, "transfer_us=None", id="no time to transfer"),
        pytest.param({"compute_us": 1, "rounds": 10**9}, "ranks times rounds is 2,000,000,000", id="gigabytes"),
        pytest.param({"collective": "all_reduce", "size_bytes": -1}, "size_bytes=-1", id="a negative size"),
    ],
)
def test_impossible_patterns_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        pattern(2, **options) if "rounds" not in options else pattern(2, options.pop("rounds"), **options)

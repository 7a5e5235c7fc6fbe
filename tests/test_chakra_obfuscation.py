"""Obfuscated files: no original string or shape beyond the policy in the bytes, and the same workload."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import InputError
from tests.chakra_files import COLL, COMP, framed, head, message

SECRETS = (
    "alice",
    "titan",
    "node17",
    "corp",
    "geheim",
    "secret_proj",
    "llm_v9",
    "/home",
    "aten",
    "pipeline_a",
    "Transf",
)
SHAPES = ("12289", "4097", "777216", "31337")


def job(folder: Path) -> Path:
    """Two ranks whose every field and attribute has something to hide."""
    texts = {"values": "['/home/alice/x.pt', 31337]", "shapes": "[[4097, 12289], []]", "types": "['Tensor(geheim)']"}
    for rank in (0, 1):
        scope = {"layer": ("string", "titan.7"), "parent": ("string", "Transformer"), "phase": ("string", "forward")}
        seen = {
            "op_schema": ("string", "aten::mm(Tensor geheim)"), "rf_id": ("int64", 31337), "tid": ("int64", 31337),
            "lane": ("string", "cpu:31337"), "num_ops": ("int64", 777216), "host": ("string", "node17.corp"),
            "kind": ("string", "cpu"), "is_cpu_op": ("bool", True),
        }  # fmt: skip
        comm = {
            "comm_type": ("int64", 0), "comm_size": ("int64", 777216), "pg_name": ("string", "pipeline_a"),
            "kind": ("string", "comm"), "lane": ("string", "gpu0:31337"), "stream": ("int64", 31337),
        }  # fmt: skip
        nodes = [
            message(31337, COMP, seen | scope, name="llm_v9::secret_proj_4097", duration_micros=1000, inputs=texts,
                    outputs=texts, start_time_micros=31337),
            message(777216, COLL, comm | scope, name="ncclSecret_geheim", duration_micros=500, data_deps=[31337]),
            message(12289, COMP, seen | scope, name="llm_v9::secret_proj_4097", duration_micros=70, data_deps=[777216]),
        ]  # fmt: skip
        data = framed([head(input_file="/home/alice", host="node17.corp"), *nodes])
        (folder / f"titan.{rank}.et").write_bytes(data)
    (folder / "titan.groups.json").write_text('{"pipeline_a": [0, 1]}')
    return folder


def bytes_of(found: ln.chakra.Obfuscated, folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in found.write(folder))


@pytest.mark.parametrize("merge", ["none", "chains"])
def test_nothing_original_survives_in_the_bytes(tmp_path, merge):
    found = ln.chakra.obfuscate(job(tmp_path), ln.chakra.Policy(seed=1, merge=merge))
    data = bytes_of(found, tmp_path / "out")
    text = data.decode("latin-1").lower()
    assert [secret for secret in SECRETS if secret.lower() in text] == []
    assert [shape for shape in SHAPES if shape in text] == []
    table = found.ranks[0].table
    kept = {"id", "name", "type", "data_deps", "ctrl_deps", "start_us", "dur_us", "rest"}
    kept |= {"is_cpu_op", "comm_type", "comm_size", "pg_name", "lane", "kind", "tid", "stream"}
    assert {name for name in table.columns if table[name].null_count() < len(table)} == kept
    numbers = {31337, 777216, 12289, 4097}
    for name in set(table.columns) - {"start_us"}:
        if table[name].dtype.is_integer():
            assert not numbers & {*table[name].drop_nulls()}, name
    assert found.ranks[0].about == {"version": "0.0.4"}


def test_the_workload_stays_what_it_was(tmp_path):
    folder = job(tmp_path)
    found = ln.chakra.obfuscate(folder, ln.chakra.Policy(time_scale=3, seed=1))
    found.write(tmp_path / "out")
    assert ln.chakra.validate(tmp_path / "out").is_empty()
    before, after = (ln.replay(ln.chakra.to_graph(path)) for path in (folder, tmp_path / "out"))
    assert after.makespan_ns == 3 * before.makespan_ns == 3 * 1_570_000
    table = found.ranks[1].table
    assert table.select("id", "data_deps", "dur_us", "comm_size").rows() == [
        (0, [], 3000, None), (1, [0], 1500, 1 << 20), (2, [1], 210, None),
    ]  # fmt: skip
    assert table["name"][0] == table["name"][2] != table["name"][1]
    assert found.ranks[0].table["name"].to_list() == table["name"].to_list()


def test_policies_give_away_what_they_say(tmp_path):
    folder = job(tmp_path)
    bucketed = ln.chakra.obfuscate(folder, ln.chakra.Policy(shapes="bucketed", scopes="kept", names="kept"))
    row = bucketed.ranks[0].table.row(0, named=True)
    assert (row["input_shapes"], row["num_ops"]) == ("[[8192, 16384], []]", 1 << 20)
    assert (row["name"], row["layer"], row["parent"]) == ("llm_v#::secret_proj_#", "titan.#", "Transformer")
    text = bytes_of(bucketed, tmp_path / "b").decode("latin-1")
    assert [shape for shape in SHAPES if shape in text] == []
    assert [secret for secret in ("alice", "node17", "aten") if secret in text] == []
    exact = ln.chakra.obfuscate(folder, ln.chakra.Policy(shapes="exact", names="kept")).ranks[0].table
    assert exact["input_shapes"][0] == "[[4097, 12289], []]"
    assert exact["comm_size"][1] == exact["num_ops"][0] == 777216
    assert exact["layer"].null_count() == 3


def test_times_are_off_by_no_more_than_the_bound_and_a_secret_factor_is_drawn(tmp_path):
    folder = job(tmp_path)
    was = ln.chakra.read_file(folder / "titan.0.et").table["dur_us"]
    off = [ln.chakra.obfuscate(folder, ln.chakra.Policy(time_jitter=0.1, seed=s)).ranks[0].table for s in range(20)]
    shares = pl.concat(table["dur_us"] / was for table in off)
    assert 0.9 - 1e-2 <= shares.min() < 0.97 < 1.03 < shares.max() <= 1.1 + 1e-2
    assert all(table["start_us"].sum() == 0 for table in off)
    drawn = [ln.chakra.obfuscate(folder, ln.chakra.Policy(time_scale=None, seed=s)).ranks[0].table for s in range(8)]
    factors = [table["dur_us"][0] / was[0] for table in drawn]
    assert len(set(factors)) == 8
    assert 0.5 <= min(factors) < max(factors) <= 2


def test_graphs_and_nodes_are_taken_and_the_report_says_what_is_left(tmp_path):
    graph = ln.build_graph(ln.load_run(ln.datasets.path("gpt-tp")))
    found = ln.chakra.obfuscate(graph, ln.chakra.Policy(seed=3))
    learned = dict(found.report.iter_rows())
    assert learned["ranks"] == "2, in 1 groups of 2 ranks"
    assert learned["network"].startswith("16 ALL_REDUCE of")
    assert learned["times"] == "exact"
    assert "What the obfuscated files of 2 rank(s) still say" in repr(found)
    names = {*graph.ops["name"], *graph.ops["parent"].drop_nulls()}
    words = {word for name in names for word in re.findall("[A-Za-z_:]{5,}", name)}
    text = bytes_of(found, tmp_path).decode("latin-1")
    assert [word for word in words if word in text and word not in ("event", "launch", "unexplained")] == []
    result = ln.replay(ln.chakra.to_graph(tmp_path))
    assert abs(result.makespan_ns - ln.replay(graph).makespan_ns) <= 5000
    one = ln.chakra.obfuscate(ln.chakra.read_file(tmp_path / "chakra.0.et"))
    assert len(one.ranks[0].table) == len(found.ranks[0].table)


@pytest.mark.parametrize("name", ["gpt-tp", "gpt-pp", "gpt-single"])
def test_merged_chains_take_as_long(tmp_path, name):
    graph = ln.build_graph(ln.load_run(ln.datasets.path(name)))
    whole, merged = (ln.chakra.obfuscate(graph, ln.chakra.Policy(merge=how, seed=1)) for how in ("none", "chains"))
    assert sum(len(nodes.table) for nodes in merged.ranks.values()) < 0.1 * len(graph.ops)
    for found, folder in ((whole, "whole"), (merged, "merged")):
        found.write(tmp_path / folder)
        assert ln.chakra.validate(tmp_path / folder).is_empty()
    before, after = (ln.replay(ln.chakra.to_graph(tmp_path / folder)) for folder in ("whole", "merged"))
    assert after.makespan_ns == before.makespan_ns
    assert after.ops.group_by("rank").agg(pl.sum("dur_ns")).sort("rank").equals(
        before.ops.group_by("rank").agg(pl.sum("dur_ns")).sort("rank")
    )  # fmt: skip


def test_chains_end_where_something_branches_off_or_comes_between(tmp_path):
    """1 - 2 - 3 on a lane, of which another lane waits for 2; 5 - 6 - 7 on one lane beside 8, which is between them."""
    lanes = {1: 7, 2: 7, 3: 7, 4: 9, 5: 11, 6: 11, 8: 11, 7: 11}
    needs = {2: [1], 3: [2], 4: [2], 6: [5], 7: [6]}
    table = pl.DataFrame({
        "id": [*lanes], "stream": [*lanes.values()], "data_deps": [needs.get(id, []) for id in lanes],
        "dur_us": [10 * id for id in lanes], "num_ops": [id if id < 6 else None for id in lanes],
        "name": [f"k{id % 2}" for id in lanes],
    })  # fmt: skip
    found = ln.chakra.obfuscate(
        ln.chakra.Nodes.of(table), ln.chakra.Policy(merge="chains", shapes="exact", names="kept")
    )
    kept = ("id", "name", "dur_us", "num_ops", "data_deps")
    assert found.ranks[0].table.select(kept).rows() == [
        (0, "merged", 30, 3, []), (1, "k1", 30, 3, [0]), (2, "k0", 40, 4, [0]), (3, "merged", 110, 5, []),
        (4, "k0", 80, None, []), (5, "k1", 70, None, [3]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    [
        {"names": "none"},
        {"merge": "all"},
        {"shapes": 2},
        {"time_scale": 0},
        {"time_scale": float("nan")},
        {"time_scale": 1e300},
        {"time_scale": 10**400},
        {"time_jitter": 1},
        {"seed": -1},
        {"seed": 1.5},
    ],
)
def test_policies_that_say_nothing_are_refused(policy):
    with pytest.raises(InputError, match=next(iter(policy))):
        ln.chakra.Policy(**policy)


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"give a ln\.chakra\.Policy"):
        ln.chakra.obfuscate(job(tmp_path), {"names": "kept"})

"""Execution traces: every schema, what is refused and how, and that nothing of a file is lost."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumos_nb.errors import InputError, RunError, TraceError, UnsupportedFormat
from lumos_nb.traces.execution_trace import load_execution_trace

TENSOR = [7, 8, 0, 12, 4, "cuda:0"]
GROUP = '[{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "group_size": 2}]'


def io(*arguments: tuple[Any, Any, str, Any]) -> dict[str, Any]:
    names = ("values", "shapes", "types", "strides")
    return {name: [argument[k] for argument in arguments] for k, name in enumerate(names)}


def node(node_id: int, parent: int, name: str, inputs: Any = (), outputs: Any = (), **attrs: Any) -> dict[str, Any]:
    said = {"rf_id": node_id + 100, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
    kinds = {int: "uint64", str: "string"}
    listed = [{"name": k, "type": kinds[type(v)], "value": v} for k, v in (said | attrs).items()]
    return {
        "id": node_id, "name": name, "ctrl_deps": parent, "inputs": io(*inputs), "outputs": io(*outputs),
        "attrs": listed,
    }  # fmt: skip


def small() -> list[dict[str, Any]]:
    """A child before its parent, a list of tensors, a collective, a group, a Triton kernel."""
    tensor = (TENSOR, [3, 4], "Tensor(float)", [4, 1])
    pair = [[9, 8, 4, 4, 4, "cuda:0"], "<None>", [10, 8, 8, 4, 2, "cpu"]]
    listed = (pair, [[4], [], [2, 2]], "GenericList[Tensor(float),None,Tensor(c10::Half)]", [[1], [], [2, 1]])
    comm = [
        ([TENSOR], [[3, 4]], "GenericList[Tensor(float)]", [[4, 1]]), (33, [], "Int", []),
        (["0", "default_pg"], [[], []], "Tuple[String,String]", [[], []]), (1, [], "Int", []),
        ("allreduce", [], "String", []), ([], [], "GenericList[]", []), ([5, 7], [[], []], "GenericList[Int,Int]", []),
        (0, [], "Int", []), (1, [], "Int", []), (2, [], "Int", []),
    ]  # fmt: skip
    triton = node(8, 2, "triton_poi_0", [tensor, (16, [], "Int", [])], kernel_backend="triton", kernel_file="k.py")
    triton["inputs"]["strides"].pop()  # as torch writes it
    return [
        node(2, 1, "[pytorch|profiler|execution_trace|thread]", scope=7),
        node(5, 4, "aten::cat", [listed], [tensor], op_schema='aten::cat(str x="\\n")', seq_id=3),
        node(4, 2, "step", scope=7),
        node(6, 2, "record_param_comms", comm, [tensor], pg_name="0", dtype="Float"),
        node(7, 2, "## process_group:init ##", [(GROUP, [], "String", [])], scope=7),
        triton,
        node(1, 1, "[pytorch|profiler|execution_trace|process]", scope=7, tid=0),
    ]


def write(path: Path, nodes: list[Any], schema: str = "1.1.1-chakra.0.0.4", **more: Any) -> Path:
    text = json.dumps({"schema": schema, "pid": 1, "nodes": nodes} | more).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def et(tmp_path: Path) -> Any:
    return load_execution_trace(write(tmp_path / "et.json", small()))


def test_a_row_a_node_in_the_order_of_the_file(et: Any) -> None:
    found = et.nodes.select("node_id", "parent", "kind", "rf_id", "sequence", "thread").rows()
    assert found == [
        (2, 1, "thread", 102, -1, 1),
        (5, 4, "operator", 105, 3, 1),
        (4, 2, "annotation", 104, -1, 1),
        (6, 2, "comm", 106, -1, 1),
        (7, 2, "group", 107, -1, 1),
        (8, 2, "function", 108, -1, 1),
        (1, None, "process", 101, -1, 0),
    ]
    assert et.nodes["op_schema"][1] == 'aten::cat(str x="\\n")'  # escapes undone
    assert et.nodes.filter(pl.col("kernel_backend") == "triton")["kernel_file"].to_list() == ["k.py"]
    assert et.attributes.select("node_id", "name", "value").rows() == [(6, "pg_name", '"0"'), (6, "dtype", '"Float"')]


def test_tensors_of_lists_have_their_own_rows(et: Any) -> None:
    found = et.tensors.filter(node_id=5).sort("side", "item").drop("node_id", "position")
    assert found.rows() == [
        ("input", 0, 9, 8, 4, 4, 4, "cuda:0", "float", [4], [1]),
        ("input", 1, 10, 8, 8, 4, 2, "cpu", "c10::Half", [2, 2], [2, 1]),
        ("output", 0, 7, 8, 0, 12, 4, "cuda:0", "float", [3, 4], [4, 1]),
    ]
    triton = et.arguments.filter(node_id=8).select("position", "type", "value", "strides").rows()
    assert triton == [(0, "Tensor(float)", '[7,8,0,12,4,"cuda:0"]', "[4,1]"), (1, "Int", "16", None)]


def test_groups_and_collectives(et: Any) -> None:
    assert et.groups.rows() == [("0", "default_pg", "cuda:nccl", [], 2)]
    assert et.comms.row(0, named=True) == {
        "node_id": 6, "collective": "allreduce", "sequence": 33, "group": "0", "description": "default_pg", "rank": 1,
        "dtype": "float", "in_numel": 12, "out_numel": 12, "in_bytes": 48, "in_splits": [], "out_splits": [5, 7],
        "rank_start": 0, "rank_stride": 1, "group_size": 2,
    }  # fmt: skip


def members(traces: Path) -> list[tuple[Path, int | None]]:
    names = [
        "param/linear_et.json.gz", "param/pt2_et.json.tar.gz", "param/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz",
        "chakra/1.0.2-chakra.0.0.4.tgz", "hta/execution_trace/benchmark_simple_add_et.json.gz",
        "astra-sim/megatron-tp8/megatron_et_3.json.gz", "astra-sim/et_plus/dlrm_eg_5_plus.json.gz",
    ]  # fmt: skip
    return [(traces / name, None) for name in names] + [(traces / "param/dlrm_pytorch_et.tar.gz", 6)]


def as_json(path: Path, rank: int | None) -> dict[str, Any]:
    if path.name.endswith((".tgz", ".tar.gz")):
        with tarfile.open(path) as archive:
            names = [m for m in archive.getmembers() if m.name.endswith(".json") and not m.name.startswith("._")]
            chosen = names[0] if rank is None else next(m for m in names if m.name.endswith(f"_{rank}.json"))
            file = archive.extractfile(chosen)
            assert file
            found = json.load(file)
    else:
        found = json.loads(gzip.decompress(path.read_bytes()))
    assert isinstance(found, dict)
    return found


def test_nothing_of_published_traces_is_lost(traces: Path) -> None:
    """Every argument, attribute and tensor, against Python's own decoder."""
    for path, rank in members(traces):
        et, plain = load_execution_trace(path, rank=rank), as_json(path, rank)["nodes"]
        nested = "ctrl_deps" in plain[0]
        assert et.nodes["node_id"].to_list() == [one["id"] for one in plain]
        keys = ["fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema", "kernel_file"]
        columns = ["forward_parent", "sequence", "scope", "thread", "forward_thread", "op_schema", "kernel_file"]
        said = [{a["name"]: a["value"] for a in one["attrs"]} if nested else one for one in plain]
        for key, column in zip(keys, columns, strict=True):
            assert et.nodes[column].to_list() == [one.get(key) for one in said], (path, key)
        for side in ("input", "output"):
            own = et.arguments.filter(side=side)
            for column, key in (("value", "values"), ("shape", "shapes"), ("type", "types")):
                flat = {"values": f"{side}s", "shapes": f"{side}_shapes", "types": f"{side}_types"}[key]
                expected = [x for one in plain for x in (one[f"{side}s"][key] if nested else one[flat])]
                found = own[column].to_list() if key == "types" else json.loads(f"[{','.join(own[column])}]")
                assert found == expected, (path, side, key)
        for nodes, each in et.tensors.group_by("node_id", "side", "position", "item"):
            assert len(each) == 1, nodes


def test_collectives_agree_with_torchs_own_attributes(traces: Path) -> None:
    et = load_execution_trace(traces / "param/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz")
    said = et.attributes.pivot("name", index="node_id", values="value").with_columns(
        pl.col("in_msg_nelems", "out_msg_nelems", "pg_size").cast(pl.Int64),
        pl.col("collective_name").str.strip_chars('"'),
    )
    both = et.comms.join(said, on="node_id")
    assert len(both) == 27
    for ours, theirs in (("in_numel", "in_msg_nelems"), ("out_numel", "out_msg_nelems"), ("group_size", "pg_size")):
        assert both[ours].to_list() == both[theirs].to_list()
    assert both["collective"].to_list() == both["collective_name"].to_list()


def test_folders_and_archives_by_rank(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        write(tmp_path / f"rank-{rank}.et.json.gz", small(), time=f"of {rank}")
    (tmp_path / "rank-0.json").write_text('{"traceEvents": []}')
    assert load_execution_trace(tmp_path, rank=10).metadata["time"] == "of 10"
    with pytest.raises(TraceError, match=r"3 execution traces .*give the rank"):
        load_execution_trace(tmp_path)
    with pytest.raises(TraceError, match="0 execution traces of rank 2"):
        load_execution_trace(tmp_path, rank=2)
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "rank-1.et.json.gz", "job/rank-1.et.json.gz")
    assert load_execution_trace(tmp_path / "all.tar.gz").path == tmp_path / "all.tar.gz" / "rank-1.et.json.gz"


def broken(change: Any) -> list[Any]:
    nodes: list[Any] = json.loads(json.dumps(small()))
    change(nodes)
    return nodes


WRONG = [
    pytest.param(lambda n: n[1].pop("id"), r"node 1 of its list \(name \"aten::cat\"\): .*`id`", id="no id"),
    pytest.param(lambda n: n[1].update(id="5"), r"node 1 of its list \(id \"5\", .*Expected `int`", id="id is text"),
    pytest.param(lambda n: n[1].update(id=2**70), "node 1 of its list", id="id beyond 64 bit"),
    pytest.param(lambda n: n[1].update(id=2), "node 2 is there 2 times, at 0 and 1", id="id twice"),
    pytest.param(lambda n: n[2].update(ctrl_deps=5), "node 5 .aten::cat. is its own ancestor", id="circle of two"),
    pytest.param(lambda n: n[1].update(ctrl_deps=5), "node 5 .aten::cat. is its own ancestor", id="its own parent"),
    pytest.param(lambda n: n[1]["inputs"]["types"].pop(), r"node 5: 1 input value\(s\) for 0 type", id="no type"),
    pytest.param(lambda n: n[1]["inputs"].update(types=[3]), "node 5: the input type 3 is no string", id="type is 3"),
    pytest.param(lambda n: n[1]["inputs"].update(values={}), "node 5: its input value are no list", id="no list"),
    pytest.param(lambda n: n[1]["outputs"]["values"][0].pop(), "node 5: output 0 should be a tensor", id="5 fields"),
    pytest.param(lambda n: n[1]["outputs"].update(shapes=["x"]), "node 5: its tensor's shape", id="shape is text"),
    pytest.param(lambda n: (n[1]["outputs"].update(strides=[]), n[5]["inputs"].update(strides=[[[4], 1]])),
                 r"node 8: its tensor's strides \[\[4\],1\] cannot", id="strides of lists, after none"),
    pytest.param(lambda n: n[1]["inputs"]["values"][0].pop(), "node 5: input 0, .* other shapes", id="short list"),
    pytest.param(lambda n: n[1]["attrs"].append({"name": 3}), "node 5: .*is no attribute", id="attribute"),
    pytest.param(lambda n: n[1]["attrs"].append(n[1]["attrs"][0]), "node 5 has two attributes rf_id", id="two rf_id"),
    pytest.param(lambda n: n[1]["attrs"][0].update(value="x"), "node 5: its rf_id", id="rf_id is text"),
    pytest.param(lambda n: n[1].pop("inputs"), "node 1 of its list .*`inputs`", id="no inputs"),
    pytest.param(lambda n: n[4]["inputs"]["values"].__setitem__(0, "{"), "node 7: .*process groups", id="groups"),
    pytest.param(lambda n: n.__setitem__(3, 17), "node 3 of its list", id="a number for a node"),
    pytest.param(lambda n: n.clear(), "list of nodes is empty", id="no nodes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_said_with_file_and_node(change: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", broken(change))
    with pytest.raises(TraceError, match=message) as error:
        load_execution_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("schema", ["9.9.0", "1.1.2-chakra.0.0.4", "1.2.0", "1.0.0"])
def test_other_schemas_are_named(schema: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=f"schema {schema} is (newer|older) than .*1.0.1 to 1.1.1"):
        load_execution_trace(write(tmp_path / "et.json", small(), schema))


def test_odd_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="'newest' is no version"):
        load_execution_trace(write(tmp_path / "et.json", small(), "newest"))
    with pytest.raises(RunError, match="does not exist"):
        load_execution_trace(tmp_path / "none.json")
    with pytest.raises(InputError, match="rank is '3'"):
        load_execution_trace(tmp_path, rank="3")  # type: ignore[arg-type]
    (tmp_path / "kineto.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match=r"kineto.json: .*no JSON object with a schema and nodes"):
        load_execution_trace(tmp_path / "kineto.json")
    (tmp_path / "et.json").write_bytes(b'{"schema": "1.0.1", "nodes": [{"id": 1, "name": "\xff"}]}')
    with pytest.raises(TraceError, match="Invalid UTF-8"):
        load_execution_trace(tmp_path / "et.json")
    path = write(tmp_path / "et.json", small())
    path.write_bytes(path.read_bytes().replace(b"allreduce", b"all\xffreduce"))
    with pytest.raises(TraceError, match="node 6: its input value are no list, or no UTF-8"):
        load_execution_trace(path)


def test_a_parent_that_is_not_there_is_noted(tmp_path: Path) -> None:
    et = load_execution_trace(write(tmp_path / "et.json", broken(lambda n: n[1].update(ctrl_deps=99))))
    assert et.notes.select("what", "count").rows() == [("parents", 1)]
    assert et.nodes["parent"][1] == 99


def test_numbers_that_are_not_finite_and_other_orders_of_keys(tmp_path: Path) -> None:
    nodes = small()
    nodes[1]["inputs"] = io((float("inf"), [], "Double", []))
    nodes[1]["attrs"] = [dict(reversed(list(one.items()))) for one in nodes[1]["attrs"]]
    et = load_execution_trace(write(tmp_path / "et.json", nodes))
    assert et.arguments.filter(node_id=5, side="input")["value"].to_list() == ["null"]
    assert et.nodes.filter(node_id=5)["rf_id"].item() == 105


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(7)))
def test_any_order_of_the_nodes_reads_alike(tmp_path: Path, order: list[int]) -> None:
    nodes = small()
    sorted_, mixed = (
        load_execution_trace(write(tmp_path / name, each))
        for name, each in (("a.json", nodes), ("b.json", [nodes[k] for k in order]))
    )
    assert mixed.nodes.sort("node_id").equals(sorted_.nodes.sort("node_id"))
    key = ["node_id", "side", "position", "item"]
    assert mixed.tensors.sort(key).equals(sorted_.tensors.sort(key))


@st.composite
def gloo_threads(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Nodes of a thread that issues to gloo, as torch's observer writes them, and the true parent of each call."""
    nodes, truth, stack, open_calls, records = [], {}, [2], [], []
    rf_id = 100

    def enter(rf: int) -> int:
        stack.append(10 + rf)
        return stack[-2]

    def leave(rf: int, name: str, parent: int) -> None:
        if len(stack) > 1:
            stack.pop()  # whatever is on top, as the observer does
        nodes.append(node(10 + rf, parent, name, rf_id=rf, op_schema=f"{name}()"))

    for what in draw(st.lists(st.sampled_from(["call", "return", "issue", "end"]), max_size=40)):
        if what == "call" or what == "issue":
            rf_id += 1
            truth[10 + rf_id] = 10 + open_calls[-1][0] if open_calls else 2
            open_calls.append((rf_id, "c10d::allreduce_" if what == "issue" else "aten::mm", enter(rf_id)))
            if what == "issue":
                rf_id += 1
                truth[10 + rf_id] = 10 + rf_id - 1
                records.append((rf_id, "gloo:all_reduce", enter(rf_id)))
                leave(*open_calls.pop())
        elif what == "return" and open_calls:
            leave(*open_calls.pop())
        elif what == "end" and records:
            leave(*records.pop(draw(st.integers(0, len(records) - 1))))
    for left in (*reversed(open_calls), *records):
        leave(*left)
    thread = node(2, 1, "[pytorch|profiler|execution_trace|thread]", scope=7, rf_id=0)
    process = node(1, 1, "[pytorch|profiler|execution_trace|process]", scope=7, tid=0, rf_id=0)
    return [thread, *nodes, process], truth


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gloo_threads())
def test_parents_that_gloo_muddles_are_mended(
    tmp_path: Path, case: tuple[list[dict[str, Any]], dict[int, int]]
) -> None:
    nodes, truth = case
    et = load_execution_trace(write(tmp_path / "et.json", nodes))
    assert dict(et.nodes.filter(pl.col("node_id") > 2).select("node_id", "parent").iter_rows()) == truth
    changed = sum(truth[one["id"]] != one["ctrl_deps"] for one in nodes if one["id"] > 2)
    assert et.notes["count"].sum() == changed


def test_the_order_of_calls_gives_the_parents_of_published_traces(traces: Path, tmp_path: Path) -> None:
    """Where the parents are right: a record of gloo's put beside them changes none."""
    for name in ("param/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz", "param/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz"):
        whole = json.loads(gzip.decompress((traces / name).read_bytes()))
        said = load_execution_trace(traces / name).nodes
        last = max(one["id"] for one in whole["nodes"])
        thread = next(one for one in said.iter_rows(named=True) if one["kind"] == "thread")
        for tid in said["thread"].unique():
            last += 1
            more = node(last, thread["node_id"], "gloo:send", rf_id=10**9, tid=tid, op_schema="gloo")
            for side in ("inputs", "outputs"):  # as its schema has them
                more[side] = {name: [] for name in whole["nodes"][0][side]}
            whole["nodes"].append(more)
        et = load_execution_trace(write(tmp_path / "et.json", whole["nodes"], whole["schema"]))
        both = said.join(et.nodes, on="node_id", how="left")
        assert both.filter(pl.col("parent") != pl.col("parent_right")).is_empty()

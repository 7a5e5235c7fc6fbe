"""Chakra files against protobuf's own reading of them: bytes, tables, JSON, and what is no Chakra file."""

from __future__ import annotations

import gzip
import json
import random
import re
import tarfile
import tracemalloc
from pathlib import Path

import polars as pl
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

import lumos_nb as ln
from lumos_nb.errors import ChakraError, SchemaError
from lumos_nb.exchange.chakra.messages import KINDS, message_class
from lumos_nb.exchange.chakra.tables import ATTRIBUTES, NODES
from tests.chakra_files import COLL, SEND, framed, frames, head, message, published, write

NODE = message_class("Node")


def as_protobuf_says(table: pl.DataFrame, messages: list[bytes]) -> None:
    """Check every column against protobuf."""
    nodes = [NODE.FromString(one) for one in messages]
    assert table["id"].to_list() == [node.id for node in nodes]
    assert table["name"].to_list() == [node.name for node in nodes]
    assert table["ctrl_deps"].to_list() == [list(node.ctrl_deps) for node in nodes]
    assert table["data_deps"].to_list() == [list(node.data_deps) for node in nodes]
    assert table["dur_us"].to_list() == [node.duration_micros for node in nodes]
    assert table["start_us"].to_list() == [node.start_time_micros for node in nodes]
    assert [text or "" for text in table["input_shapes"]] == [node.inputs.shapes for node in nodes]
    assert [text or "" for text in table["output_types"]] == [node.outputs.types for node in nodes]
    for i, node in enumerate(nodes):
        said = {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr if one.name in ATTRIBUTES}
        assert {name: table[name][i] for name in ATTRIBUTES if table[name][i] is not None} == said


def test_every_published_file_reads_as_protobuf_reads_it_and_is_written_byte_for_byte(traces, tmp_path):
    files = published(traces, tmp_path)
    assert len(files) == 1 + 64 + 8
    for path in files:
        data = path.read_bytes()
        nodes = ln.chakra.read_file(path)
        assert ln.chakra.write_file(nodes, tmp_path / "again.et").read_bytes() == data
        if path.name in ("chakra.0.et", "Resnet50_DataParallel.0.et", "custom_allreduce.3.et"):
            as_protobuf_says(nodes.table, list(frames(data))[1:])


def test_nodes_put_together_anew_and_json_say_the_same(traces, tmp_path):
    for path in published(traces, tmp_path)[::24]:
        nodes = ln.chakra.read_file(path)
        made = ln.chakra.Nodes(nodes.table.with_columns(frame=pl.lit(None, pl.Binary)), nodes.metadata)
        for name in ("a.et", "a.et.gz", "a.json", "a.jsonl", "a.jsonl.gz"):
            again = ln.chakra.read_file(ln.chakra.write_file(made, tmp_path / name))
            assert again.table.drop("frame").equals(nodes.table.drop("frame")), name
            assert again.metadata == nodes.metadata
        parts, whole = (
            [NODE.FromString(one) for one in list(frames(file.read_bytes()))[1:]] for file in (tmp_path / "a.et", path)
        )
        for part, was in zip(parts, whole, strict=True):  # protobuf agrees, but for the order of attributes
            for node in (part, was):
                node.attr.sort(key=lambda one: one.name)
            assert part == was
        assert len(json.loads((tmp_path / "a.json").read_text())["nodes"]) == len(parts)
        assert all(json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())


def test_the_feeders_json_is_read(traces, tmp_path):
    with tarfile.open(traces / "chakra/json_trace.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    nodes = ln.chakra.read_file(tmp_path / "jsonData/chakra.0.json")
    assert nodes.table["type"].value_counts().sort("count").rows() == [("COMM_COLL_NODE", 21), ("COMP_NODE", 3643)]
    small = ln.chakra.read_file(tmp_path / "jsonData/small_chakra.0.json").table
    assert small.filter(id=435)["data_deps"].to_list() == [[432, 216, 217]]
    assert small["dur_us"].to_list() == [318, 28, 4, 85, 79, 28, 153]


ODD = message(
    2**64 - 1,
    99,
    {
        "comm_size": ("string", "12"),
        "comm_tag": ("sint64", -5),
        "tensor_size": ("uint64", 2**64 - 1),
        "num_ops": ("uint64", 7),
        "stream": ("int32", -3),
        "involved_dim": ("bool_list", [True, False]),
        "ratio": ("double", 0.25),
    },
    name="größe",
    data_deps=[2**63, 0, 5],
) + bytes([0xF8, 0x07, 0x2A])  # field 127, which no schema has


def test_odd_nodes_keep_unknown_fields_wide_numbers_and_attributes_of_other_types(tmp_path):
    nodes = ln.chakra.read_file(write(tmp_path / "a.0.et", ODD, message(3)))
    row = nodes.table.row(0, named=True)
    assert (row["id"], row["type"], row["name"], row["data_deps"]) == (2**64 - 1, "99", "größe", [2**63, 0, 5])
    assert (row["num_ops"], row["stream"], row["comm_size"], row["tensor_size"]) == (7, -3, None, None)
    changed = ln.chakra.Nodes(nodes.table.with_columns(dur_us=pl.lit(9, pl.UInt64)), nodes.metadata)
    for name in ("b.et", "b.json", "b.jsonl"):
        again = ln.chakra.read_file(ln.chakra.write_file(changed, tmp_path / name)).table
        assert again.drop("frame").equals(changed.table.drop("frame"))
        written = ln.chakra.write_file(ln.chakra.Nodes(again), tmp_path / "c.et").read_bytes()
        node = NODE.FromString(list(frames(written))[1])
        said = {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr if one.name != "involved_dim"}
        wide = {"comm_tag": -5, "tensor_size": 2**64 - 1, "num_ops": 7, "stream": -3}
        assert said == {"comm_size": "12", "ratio": 0.25, **wide}
        assert node.SerializeToString().find(bytes([0xF8, 0x07, 0x2A])) >= 0


def test_dependencies_that_are_not_packed_and_fields_in_any_order_are_read(tmp_path):
    loose = bytes([0x38, 5, 0x28, 1, 0x28, 2, 0x08, 9, 0x2A, 1, 3, 0x12, 1, 65])
    table = ln.chakra.read_file(write(tmp_path / "a.0.et", loose)).table
    as_protobuf_says(table, [loose])
    assert table["data_deps"].to_list() == [[1, 2, 3]]


def test_a_changed_node_alone_is_written_anew(tmp_path):
    first, second = (message(i, name=str(i), attributes={"comm_size": ("uint64", 4)}) for i in (1, 2))
    nodes = ln.chakra.read_file(write(tmp_path / "a.0.et", first, second))
    table = nodes.table.with_columns(comm_size=pl.when(pl.col("id") == 2).then(8).otherwise("comm_size"))
    again = list(frames(ln.chakra.write_file(ln.chakra.Nodes(table, nodes.metadata), tmp_path / "b.et").read_bytes()))
    assert again[1] == first
    assert again[2] == message(2, name="2", attributes={"comm_size": ("int64", 8)})
    flipped = ln.chakra.write_file(ln.chakra.Nodes(nodes.table.reverse()), tmp_path / "c.et").read_bytes()
    assert list(frames(flipped))[1:] == [second, first]


def test_a_file_of_many_blocks_streams_in_order(tmp_path):
    many = [message(i, name="x" * 900, data_deps=[i - 1] if i else []) for i in range(12_000)]
    path = write(tmp_path / "a.0.et", *many)
    packed = tmp_path / "b.0.et.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    tables = list(ln.chakra.stream_file(packed))[1:]
    assert len(tables) > 2
    assert pl.concat(tables)["id"].to_list() == list(range(12_000))
    assert ln.chakra.write_file(ln.chakra.read_file(packed), tmp_path / "c.et").read_bytes() == path.read_bytes()


value = st.one_of(
    *(st.tuples(st.just(kind), st.integers(0, 2**31 - 1)) for kind in KINDS if "int" in kind or "fixed" in kind),
    st.tuples(st.just("string"), st.text(max_size=9)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("int64"), st.integers(-(2**63), 2**63 - 1)),
)
names = st.sampled_from([*ATTRIBUTES, "other"])
ids = st.integers(0, 2**64 - 1)
nodes = st.builds(
    message, ids, st.integers(0, 9), st.dictionaries(names, value, max_size=4), name=st.text(max_size=20),
    data_deps=st.lists(ids, max_size=5), ctrl_deps=st.lists(ids, max_size=3), duration_micros=ids,
)  # fmt: skip


@given(st.lists(nodes, min_size=1, max_size=5))
@example([b"R\x18\n\x0btensor_sizeH\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])  # a size of -1 fits no column
def test_any_nodes_come_through_columns_as_they_were(tmp_path_factory, messages):
    folder = tmp_path_factory.mktemp("any")
    messages = [one or message(1) for one in messages]
    read = ln.chakra.read_file(write(folder / "a.0.et", *messages))
    assert ln.chakra.write_file(read, folder / "b.et").read_bytes() == (folder / "a.0.et").read_bytes()
    made = ln.chakra.Nodes(read.table.with_columns(frame=pl.lit(None, pl.Binary)), read.metadata)
    for name in ("c.et", "c.json"):
        again = ln.chakra.read_file(ln.chakra.write_file(made, folder / name)).table
        assert again.drop("frame").equals(read.table.drop("frame"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "is empty", id="nothing"),
        pytest.param(framed([head()]) + b"\xff\xff\xff\xff\x0f1234", "byte 8: a message states", id="huge length"),
        pytest.param(framed([head()]) + b"\xff" * 20, "byte 8: a message states", id="endless length"),
        pytest.param(framed([head(), message(1)])[:-1], "byte 8: the file ends in the middle", id="truncated"),
        pytest.param(framed([head()]) + b"\x00", "byte 8: a node is of no bytes", id="empty node"),
        pytest.param(framed([head(), b"\x08" + b"\xff" * 11]), "byte 9, in the message", id="endless number"),
        pytest.param(framed([head(), b"\x08\x01\x2a\x05\x01"]), "byte 11, .* middle of a field", id="cut list"),
        pytest.param(framed([head(), b"\x08\x01\x0b\x0c"]), "byte 11, .* kind that protobuf 3", id="group"),
        pytest.param(framed([head(), b"\x08\x01\x00\x01"]), "byte 11, .* number 0", id="field 0"),
        pytest.param(framed([head(), b"\x12\x02\xff\xfe"]), "byte 11: this text is no UTF-8", id="no UTF-8"),
        pytest.param(framed([b"\x0b"]), "byte 0: this is no GlobalMetadata", id="no metadata"),
        pytest.param(b"\x1f\x8b\x08\x00damaged", "gzip", id="damaged gzip"),
    ],
)  # fmt: skip
def test_what_is_no_chakra_file_is_refused_with_its_byte(tmp_path, data, said):
    path = tmp_path / "a.0.et"
    path.write_bytes(data)
    with pytest.raises(ChakraError, match=said) as caught:
        ln.chakra.read_file(path)
    assert str(path) in str(caught.value)


def test_damaged_bytes_never_do_more_than_raise(tmp_path):
    """What we accept protobuf accepts too, and a table made of it can be written."""
    rng = random.Random(5)
    attributes = {"comm_size": ("int64", 3), "pg_name": ("string", "0")}
    second = message(1, COLL, attributes, inputs={"values": "[1]", "shapes": "[[2]]"})
    sound = framed([head(schema="1"), ODD, second, message(2, SEND)])
    path = tmp_path / "a.0.et"
    refused = 0
    for _ in range(1500):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        path.write_bytes(data)
        try:
            nodes = ln.chakra.read_file(path)
        except ChakraError:
            refused += 1
            continue
        for one in frames(bytes(data)):
            try:
                NODE.FromString(one)
            except DecodeError:  # only in what has no column, whose insides we leave alone
                assert any(nodes.table["rest"]) or one == next(frames(bytes(data)))
        ln.chakra.write_file(nodes, tmp_path / "b.et")
    assert 300 < refused < 1500


def test_a_long_message_takes_no_more_memory_than_the_file_has(tmp_path):
    path = tmp_path / "a.0.et"
    path.write_bytes(framed([head()]) + b"\xff\xff\xff\x1f" + b"\x08")  # states 64 MiB less a byte
    tracemalloc.start()
    with pytest.raises(ChakraError, match="ends in the middle"):
        ln.chakra.read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"nodes": []}', '{"metadata": {"nothing": 1}, "nodes": []}',
        '{"metadata": {}, "nodes": [{"id": -1}]}',
        '{"metadata": {}, "nodes": [{"id": "x"}]}', '{"metadata": {}, "nodes": [{"id": 1, "attr": [{"foo": 1}]}]}',
        '{"metadata": {}, "nodes": [{"id": 1, "unknown_fields": "?"}]}', '{"workload_graph": [{"Id": 1, "what": 2}]}',
        '{"workload_graph": [{"Id": "one"}]}', '{"workload_graph": [{"Name": "x"}]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_json_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ChakraError, match=re.escape(str(path))):
        ln.chakra.read_file(path)


def test_wrong_tables_and_paths_are_refused(tmp_path):
    for table, said in (
        ({"id": [1], "size": [2]}, "no column 'size'"),
        ({"id": [-1]}, "wrong type or out of range"),
        ({"name": ["a"]}, "no id"),
    ):
        with pytest.raises(ChakraError, match=said):
            ln.chakra.Nodes.of(pl.DataFrame(table))
    wrong = ln.chakra.Nodes.of(pl.DataFrame({"id": [1], "type": ["KERNEL"]}))
    with pytest.raises(ChakraError, match="type 'KERNEL'"):
        ln.chakra.write_file(wrong, tmp_path / "a.et")
    with pytest.raises(ChakraError, match="is no file"):
        ln.chakra.read_file(tmp_path / "none.et")
    with pytest.raises(ChakraError, match="cannot be written"):
        ln.chakra.write_file(ln.chakra.Nodes.of(pl.DataFrame({"id": [1]})), tmp_path / "none" / "a.et")
    with pytest.raises(ChakraError, match="not a DataFrame"):
        ln.chakra.write_file(NODES.empty(), tmp_path / "a.et")


def test_ranks_and_groups_of_a_folder(tmp_path):
    nodes = ln.chakra.Nodes.of(pl.DataFrame({"id": [1]}), version="0.0.4", world=2)
    assert nodes.about == {"version": "0.0.4", "world": 2}
    written = ln.chakra.write_ranks([(10, nodes), (2, nodes)], tmp_path / "job", "gpt", {"0": range(2)})
    assert [path.name for path in written] == ["gpt.10.et", "gpt.2.et", "gpt.groups.json"]
    assert list(ln.chakra.rank_files(tmp_path / "job")) == [2, 10]
    assert ln.chakra.read_groups(tmp_path / "job") == {"0": [0, 1]}
    (tmp_path / "job" / "x.2.et").write_bytes(b"")
    with pytest.raises(ChakraError, match="two files of rank 2"):
        ln.chakra.rank_files(tmp_path / "job")
    with pytest.raises(ChakraError, match="no Chakra file"):
        ln.chakra.rank_files(tmp_path)
    (tmp_path / "job" / "gpt.groups.json").write_text("[1]")
    with pytest.raises(ChakraError, match="write groups as"):
        ln.chakra.read_groups(tmp_path / "job")


def test_a_misspelt_name_is_told_what_there_is():
    with pytest.raises(AttributeError, match=r"^ln\.chakra has no 'reed_file'; it has .*read_file"):
        _ = ln.chakra.reed_file


def test_a_list_with_a_null_is_not_written(tmp_path: Path) -> None:
    nodes = ln.chakra.Nodes.of(pl.DataFrame({"id": [0, 1], "data_deps": [[], [0]]}))
    holed = nodes.table.with_columns(data_deps=pl.Series([[], [None]], dtype=pl.List(pl.UInt64())))
    with pytest.raises(SchemaError, match="a null in it, in data_deps"):
        ln.chakra.write_file(ln.chakra.Nodes(holed), tmp_path / "a.0.et")
    assert not list(tmp_path.iterdir())

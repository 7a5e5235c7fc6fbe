"""What is wrong with a job's Chakra files, said before a simulator takes them and answers something else.

ASTRA-sim ends with exit code 0 on most mistakes: it drops nodes of a cycle, leaves ranks unfinished, or takes one node
for another of the same id. Its profile also refuses what is sound Chakra but no workload for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from lumos_nb.errors import ChakraError, InputError, is_word, shown
from lumos_nb.exchange.chakra.files import rank_files
from lumos_nb.exchange.chakra.json_files import fields
from lumos_nb.exchange.chakra.messages import COLLECTIVES, NODE_TYPES
from lumos_nb.exchange.chakra.ranks import MESSAGE_TYPES, Int64s, Job, sorted_rows
from lumos_nb.exchange.chakra.tables import ATTRIBUTES, parsed

FINDINGS = {"file": pl.String(), "node": pl.UInt64(), "rule": pl.String(), "message": pl.String()}
TARGETS = ("astra-sim",)
ASTRA_COLLECTIVES = ("ALL_REDUCE", "ALL_GATHER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER")
"""Those that its system layer carries out; a broadcast takes its node's duration."""
LONGEST_US = 86_400_000_000
"""A day: no node of a step takes so long."""
_SHOWN = 8

Rule = Callable[[Job], Iterator[pl.DataFrame]]


def validate(path: str | Path, target: str | None = None) -> pl.DataFrame:
    """Check the files of a job, or one file.

    Parameters
    ----------
    path
        A folder of `<prefix>.<rank>.et` with the groups' JSON file, or one file, of which nothing is compared.
    target
        None for what holds of any Chakra file; "astra-sim" also for what its feeder and system layer need.

    Returns
    -------
    DataFrame
        One row a finding: `file`, `node` (its id; null for the whole file), `rule`, `message`. Empty if all is well.
        Rules are framing, id, type, dependency, cycle, root, attribute, collective, message, group, deadlock and
        duration; of a target `astra-sim`.

    Raises
    ------
    ChakraError
        There is no file to check.
    InputError
        The target is unknown.

    Examples
    --------
    >>> ln.chakra.write(graph, "out/", target="astra-sim")
    >>> validate("out/", target="astra-sim").is_empty()
    True
    """
    require_target(target)
    job = Job.read(path, strict=False)
    framing = [(file, None, "framing", why) for file, why in job.faults.items()]
    if target == "astra-sim":
        framing += [(file.name, None, "astra-sim", "the feeder reads no gzip; write it without .gz")
                    for file in rank_files(path).values() if file.read_bytes()[:2] == b"\x1f\x8b"]  # fmt: skip
    return pl.concat([pl.DataFrame(framing, schema=FINDINGS, orient="row"), check(job, target)])


def require_target(target: object) -> None:
    """Raise InputError for what is no simulator that files are checked for."""
    if target is not None and not is_word(target, TARGETS):
        raise InputError(f"target is {shown(target)}; it may be None or {', '.join(map(repr, TARGETS))}.")


def check(job: Job, target: str | None = None) -> pl.DataFrame:
    """The findings of a job at hand; see `validate`."""
    require_target(target)
    rules: list[Rule] = [_ids, _types, _dependencies, _roots, _attributes, _durations, _groups, _collectives, _messages]
    rules += [_deadlocks] + ([_astra_sim] if target else [])
    found = [part for rule in rules for part in rule(job)]
    return pl.concat([pl.DataFrame(schema=FINDINGS), *found]).sort("file", "node", "rule", maintain_order=True)


def _found(nodes: pl.DataFrame, rule: str, message: pl.Expr | str) -> pl.DataFrame:
    """A finding for each of some nodes."""
    text = pl.lit(message) if isinstance(message, str) else message
    return nodes.select("file", node="id", rule=pl.lit(rule), message=text.cast(pl.String))


def _places(job: Job) -> pl.DataFrame:
    """Where nodes stand, to be joined: all else of a node may be large, and a join has it once a match."""
    return job.nodes.select("row", "file", "id")


def _of_file(job: Job, rank: int, rule: str, message: str) -> pl.DataFrame:
    return pl.DataFrame([(job.files[rank], None, rule, message)], schema=FINDINGS, orient="row")


def _ids(job: Job) -> Iterator[pl.DataFrame]:
    first = pl.int_range(pl.len()).over("rank", "id")
    yield _found(job.nodes.filter(first > 0), "id", "another node of this file has the same id")


def _types(job: Job) -> Iterator[pl.DataFrame]:
    odd = ~pl.col("type").is_in(NODE_TYPES) | (pl.col("type") == "INVALID_NODE")
    yield _found(job.nodes.filter(odd), "type", pl.format("type {} is none that a node can have", "type"))


def _dependencies(job: Job) -> Iterator[pl.DataFrame]:
    dangling = job.edges.filter(pl.col("src").is_null()).join(_places(job), left_on="dst", right_on="row")
    yield _found(dangling, "dependency", pl.format("it depends on node {}, which is not in the file", "needs"))
    for rows in cycles(len(job.nodes), *job.known_edges):
        nodes = job.nodes[np.sort(rows)]
        ids = ", ".join(map(str, nodes["id"].head(_SHOWN))) + (", ..." if len(nodes) > _SHOWN else "")
        text = f"nodes depend on each other in a cycle: {ids}" if len(nodes) > 1 else "it depends on itself"
        yield _found(nodes.head(1), "cycle", text)


def cycles(n: int, src: Int64s, dst: Int64s) -> Iterator[Int64s]:
    """Rows of each set that depend on one another, in no particular order."""
    if len(sorted_rows(n, src, dst)) == n:
        return
    graph = csr_array((np.ones(len(src), np.int8), (src, dst)), shape=(n, n))
    count, part = connected_components(graph, directed=True, connection="strong")
    members = np.bincount(part, minlength=count)
    members[part[src[src == dst]]] = 2  # one that waits for itself is a cycle too
    order = np.argsort(part, kind="stable")
    ends = np.cumsum(np.bincount(part, minlength=count))
    for k in np.flatnonzero(members > 1):
        yield order[ends[k - 1] if k else 0 : ends[k]]


def _roots(job: Job) -> Iterator[pl.DataFrame]:
    waits = job.nodes.with_columns(waits=pl.col("row").is_in(job.edges["dst"].implode()))
    roots = dict(waits.group_by("rank").agg((~pl.col("waits")).any()).iter_rows())
    for rank in job.files:
        if not roots.get(rank, False):
            why = "every node waits for another: none can be the first" if rank in roots else "it has no node"
            yield _of_file(job, rank, "root", why)


def _attributes(job: Job) -> Iterator[pl.DataFrame]:
    odd = job.nodes.filter(pl.col("rest").bin.size() > 0).select("row", "rest")
    rows = [
        (row, name)
        for row, rest in odd.iter_rows()
        for field, body in fields(rest)
        if field[:1] == b"R" and (name := _name(body)) in ATTRIBUTES
    ]
    broken = [
        row for row, rest in odd.iter_rows() if any(f[:1] == b"R" and not _name(body) for f, body in fields(rest))
    ]
    yield _found(
        job.nodes.filter(pl.col("row").is_in(broken)), "attribute", "an attribute has no name, or cannot be read"
    )
    named = pl.DataFrame(rows, schema={"row": job.nodes.schema["row"], "attribute": pl.String}, orient="row")
    kinds = named.with_columns(kind=pl.col("attribute").replace(ATTRIBUTES)).join(_places(job), on="row")
    text = pl.format("attribute {} is there twice, out of range, or not of type {}", "attribute", "kind")
    yield _found(kinds, "attribute", text)
    comm = job.nodes.filter(pl.col("type").is_in(["COMM_COLL_NODE", *MESSAGE_TYPES]))
    needed = {"comm_size": None, "comm_type": "COMM_COLL_NODE"}
    needed |= {"comm_dst": "COMM_SEND_NODE", "comm_src": "COMM_RECV_NODE"}
    for name, of in needed.items():
        lacking = comm.filter(pl.col(name).is_null() & (pl.lit(value=True) if of is None else pl.col("type") == of))
        yield _found(lacking, "attribute", f"it has no {name}, so that nobody knows what to send")
    yield _found(comm.filter(pl.col("comm_size") < 0), "attribute", "its comm_size is negative")
    no_type = ~pl.col("comm_type").is_between(0, len(COLLECTIVES) - 1) & (pl.col("type") == "COMM_COLL_NODE")
    yield _found(comm.filter(no_type), "attribute", pl.format("comm_type {} is no collective", "comm_type"))


def _name(attribute: bytes) -> str:
    """What an attribute is called; nothing where it cannot be read."""
    try:
        return str(parsed("AttributeProto", attribute, 0).name)
    except ChakraError:
        return ""


def _durations(job: Job) -> Iterator[pl.DataFrame]:
    long = job.nodes.filter(pl.col("dur_us") > LONGEST_US)
    yield _found(long, "duration", pl.format("it takes {} us, more than a day", "dur_us"))
    work = job.nodes.filter(pl.col("type") == "COMP_NODE")
    for rank, count, *cost in work.group_by("rank").agg(pl.len(), pl.sum("dur_us", "num_ops")).iter_rows():
        if not any(cost):
            yield _of_file(job, rank, "duration", f"none of its {count} COMP nodes has a duration or num_ops")


def _groups(job: Job) -> Iterator[pl.DataFrame]:
    named = job.nodes.filter(pl.col("pg_name").is_not_null() & pl.col("type").str.starts_with("COMM"))
    if job.groups or job.several:
        unknown = named.filter(~pl.col("pg_name").is_in(list(job.groups)))
        yield _found(unknown, "group", pl.format("no file lists the ranks of group {}", "pg_name"))
    pairs = [(name, rank) for name, ranks in job.groups.items() for rank in ranks]
    listed = pl.DataFrame(pairs, schema={"pg_name": pl.String, "rank": pl.Int64}, orient="row")
    outside = named.filter(pl.col("pg_name").is_in(list(job.groups))).join(listed, on=["pg_name", "rank"], how="anti")
    yield _found(outside, "group", pl.format("rank {} is not in group {}", "rank", "pg_name"))


def _collectives(job: Job) -> Iterator[pl.DataFrame]:
    if not job.several:
        return
    group = ["pg_name", "nth"]
    comm = job.collectives.with_columns(kind=pl.col("comm_type"), size=pl.col("comm_size"))
    # Ranks may send unequal parts in an all-to-all.
    comm = comm.with_columns(size=pl.when(pl.col("kind") == COLLECTIVES.index("ALL_TO_ALL")).then(0).otherwise("size"))
    model = comm.sort("rank", maintain_order=True).group_by(*group, maintain_order=True).first()
    other = comm.join(model.select(*group, "kind", "size", of="rank", was="comm_size"), on=group, nulls_equal=True)
    unlike = other.filter(
        pl.col("kind").ne_missing(pl.col("kind_right")) | pl.col("size").ne_missing(pl.col("size_right"))
    )
    text = "collective {} of group {} is of type {} and {} bytes here, of type {} and {} bytes on rank {}"
    what = (pl.col("nth"), pl.col("pg_name").fill_null("all"), "kind", "comm_size", "kind_right", "was", "of")
    known = [pl.col(one).cast(pl.String).fill_null("?") if isinstance(one, str) else one for one in what]
    yield _found(unlike, "collective", pl.format(text, *known))
    counts = {(name, rank): n for name, rank, n in comm.group_by("pg_name", "rank").len().iter_rows()}
    for name in dict.fromkeys(name for name, _ in counts):
        ranks = [rank for rank in job.members(name) if rank in job.files]
        most = max(ranks, key=lambda rank: counts.get((name, rank), 0), default=0)
        for rank in ranks:
            here, there = counts.get((name, rank), 0), counts.get((name, most), 0)
            if here < there:
                text = f"it has {here} collectives of group {name or 'all'}, rank {most} has {there}"
                yield _of_file(job, rank, "collective", text)


def _messages(job: Job) -> Iterator[pl.DataFrame]:
    if not job.several:
        return
    pair = ["source", "target", "comm_tag", "nth"]
    sends, receives = (job.messages.filter(type=kind) for kind in MESSAGE_TYPES)
    lost = sends.join(receives, on=pair, how="anti", nulls_equal=True)
    text = "rank {} receives nothing with tag {} from here that is not taken by an earlier message"
    tag = pl.col("comm_tag").cast(pl.String).fill_null("none")
    yield _found(lost, "message", pl.format(text, pl.col("target").fill_null(-1), tag))
    awaited = receives.join(sends, on=pair, how="anti", nulls_equal=True)
    yield _found(
        awaited, "message", pl.format("rank {} sends no such message, of tag {}", pl.col("source").fill_null(-1), tag)
    )
    unlike = receives.join(sends, on=pair, nulls_equal=True).filter(pl.col("comm_size") != pl.col("comm_size_right"))
    text = "it receives {} bytes, of which rank {} sends {}"
    yield _found(unlike, "message", pl.format(text, "comm_size", "source", "comm_size_right"))


def _deadlocks(job: Job) -> Iterator[pl.DataFrame]:
    n, edges = len(job.nodes), job.known_edges
    if not job.several or len(sorted_rows(n, *edges)) < n:
        return
    src, dst = met(job, *edges)
    for rows in cycles(n, src, dst):
        nodes = job.nodes[np.sort(rows)]
        of = ", ".join(f"{id} of {file}" for id, file in nodes.select("id", "file").head(_SHOWN).iter_rows())
        yield _found(nodes.head(1), "deadlock", f"ranks wait for each other in a circle: {of}")


def met(job: Job, src: Int64s, dst: Int64s) -> tuple[Int64s, Int64s]:
    """Edges with the rows of a collective as one, its first, and with one from every send to its receive."""
    row = np.arange(len(job.nodes))
    met = job.collectives.with_columns(first=pl.min("row").over("pg_name", "nth"))
    row[met["row"].to_numpy()] = met["first"].to_numpy()
    pair = ["source", "target", "comm_tag", "nth"]
    sends, receives = (job.messages.filter(type=kind) for kind in MESSAGE_TYPES)
    sent = sends.join(receives, on=pair, nulls_equal=True)
    return np.append(row[src], sent["row"].to_numpy()), np.append(row[dst], sent["row_right"].to_numpy())


def _unordered(job: Job) -> Iterator[pl.DataFrame]:
    """Unlike collectives of a group without turns, which it matches as they get ready.

    One has its turn if it waits for the one before it, or for all that this one waits for.
    """
    group = ["rank", "pg_name"]
    comm = job.collectives.with_columns(
        place=pl.col("pg_name").rank("dense").over("rank").fill_null(0),
        alike=pl.struct("comm_type", "comm_size").n_unique().over(group) == 1,
        needs=pl.concat_list("ctrl_deps", "data_deps"),
    )
    for own in comm.partition_by("place") if job.several else ():
        rows, nth = (own[name].cast(pl.Int64).to_numpy() for name in ("row", "nth"))
        before = pl.col("needs").shift(1).over(group)
        ready = pl.col("needs").list.set_intersection(before).list.len() == before.list.n_unique()
        late = own.filter(
            ~pl.col("alike")
            & (pl.col("nth") > 0)
            & (pl.Series(job.latest_behind(rows, nth)) < pl.col("nth") - 1)
            & ~ready
        )
        text = "nothing makes it wait for the collective before it of group {}: other ranks may have them the other way"
        yield _found(late, "astra-sim", pl.format(text, pl.col("pg_name").fill_null("all")))


def _astra_sim(job: Job) -> Iterator[pl.DataFrame]:
    nodes, rule = job.nodes, "astra-sim"
    comm = nodes.filter(pl.col("type").is_in(["COMM_COLL_NODE", *MESSAGE_TYPES]))
    yield _found(nodes.filter(type="METADATA_NODE"), rule, "it stops at METADATA nodes")
    memory = nodes.filter(pl.col("type").is_in(["MEM_LOAD_NODE", "MEM_STORE_NODE"]))
    yield _found(memory, rule, "it stops at memory nodes unless a remote memory is configured")
    yield _found(comm.filter("is_cpu_op"), rule, "it never runs communication whose is_cpu_op is true")
    able = [COLLECTIVES.index(name) for name in ASTRA_COLLECTIVES]
    unable = comm.filter((pl.col("type") == "COMM_COLL_NODE") & ~pl.col("comm_type").is_in(able))
    yield _found(unable, rule, pl.format("it never finishes a collective of comm_type {}", "comm_type"))
    yield _found(comm.filter(~pl.col("pg_name").str.contains(r"^[0-9]+$")), rule, "it takes numbers alone as pg_name")
    yield from _unordered(job)
    unlisted = comm.filter(pl.col("pg_name").is_not_null() & ~pl.col("pg_name").is_in(list(job.groups)))
    yield _found(unlisted, rule, "it stops at a group that no file lists")
    messages = comm.filter(pl.col("type").is_in(MESSAGE_TYPES) & pl.col("comm_tag").is_null())
    yield _found(messages, rule, "it never matches a message without comm_tag")
    for name, ranks in job.groups.items():
        if absent := sorted(set(ranks) - set(job.files)):
            yield _of_file(job, min(job.files), rule, f"group {name} has rank {absent[0]}, which has no file")
    if sorted(job.files) != list(range(len(job.files))):
        yield _of_file(
            job, min(job.files), rule, f"it wants a file for each rank from 0 on, not {sorted(job.files)[:_SHOWN]}"
        )
    prefixes = {file.removesuffix(".gz").rsplit(".", 2)[0] for file in job.files.values()}
    if len(prefixes) > 1:
        yield _of_file(job, min(job.files), rule, f"it wants files of one prefix, not {', '.join(sorted(prefixes))}")

"""What we write runs to its end under ASTRA-sim's rules, and what does not is found by the check beforehand."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import polars as pl
import pytest

import lumos_nb as ln
from tests.astra_feeder import Feeder
from tests.test_chakra_conversion import LAYOUTS, MODEL, TRAIN, cluster

SMALL = msgspec.structs.replace(MODEL, layers=4)


def fed(folder: Path) -> int:
    """When the last node ends; all have."""
    feeder = Feeder(folder)
    assert ({*feeder.nodes} - {*feeder.finished}, feeder.unlike) == (set(), [])
    return max(feeder.finished.values())


@pytest.mark.parametrize("name", ["gpt-single", "gpt-ddp", "gpt-tp", "gpt-pp"])
def test_bundled_runs_finish_on_all_ranks(tmp_path, name):
    run = ln.build_graph(ln.load_run(ln.datasets.path(name)))
    ln.chakra.write(run, tmp_path, target="astra-sim")
    assert fed(tmp_path) == pytest.approx(ln.replay(run).makespan_ns, rel=0.1)  # messages of gpt-pp wait for both there


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_estimates_finish_on_all_ranks(tmp_path, ranks):
    found = ln.estimate(MODEL, LAYOUTS[ranks], TRAIN, cluster(ranks))
    ln.chakra.write(found, tmp_path, target="astra-sim")
    assert fed(tmp_path) == pytest.approx(found.result.makespan_ns, rel=0.02)


COLUMNS = ("type", "is_cpu_op", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name", "data_deps")


def changed(table: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    """A node left out or twice there, one with a field of another, or one that waits for another."""
    rows = table.drop("frame").to_dicts()
    one, other = rng.choices(range(len(rows)), k=2)
    comm = [k for k, row in enumerate(rows) if row["type"] != "COMP_NODE"]
    if comm and rng.random() < 0.7:
        one, other = rng.choices(comm, k=2)
    how = rng.choice(["out", "twice", "field", "waits", "free", "exchanged"])
    if how == "out":
        del rows[one]
    elif how == "twice":
        rows.append(rows[one])
    elif how == "field":
        name = rng.choice(COLUMNS)
        rows[one][name] = rows[other][name]
    elif how == "waits":
        rows[one]["data_deps"] = [*rows[one]["data_deps"], rows[other]["id"]]
    elif how == "free":
        rows[one]["data_deps"] = rows[one]["data_deps"][1:]
    else:
        rows[one], rows[other] = (
            {**rows[b], **{k: rows[a][k] for k in ("id", "data_deps")}} for a, b in ((one, other), (other, one))
        )
    return pl.DataFrame(rows, schema=table.drop("frame").schema)


def finishes(folder: Path) -> bool:
    try:
        feeder = Feeder(folder)
    except KeyError:  # an attribute that it needs
        return False
    return len(feeder.finished) == len(feeder.nodes) and not feeder.unlike


def test_what_does_not_finish_is_found_by_the_check(tmp_path):
    rng = random.Random(7)
    bases = {
        "all": ln.chakra.pattern(3, 3, compute_us=10, collective="all_reduce", size_bytes=64, transfer_us=5),
        "pp": ln.estimate(SMALL, ln.Parallelism(pp=2, dp=2, zero=1), TRAIN, cluster(4)),
    }
    counts = dict.fromkeys(["finishes, sound", "finishes, found", "does not, found"], 0)
    for name, base in bases.items():
        folder = tmp_path / name
        ln.chakra.write(base, folder, target="astra-sim")
        for _ in range(30):
            path = rng.choice([*ln.chakra.rank_files(folder).values()])
            was = path.read_bytes()
            ln.chakra.write_file(ln.chakra.Nodes.of(changed(ln.chakra.read_file(path).table, rng)), path)
            found = "sound" if ln.chakra.validate(folder, "astra-sim").is_empty() else "found"
            counts[f"{'finishes' if finishes(folder) else 'does not'}, {found}"] += 1  # no key: not found
            path.write_bytes(was)
    assert min(counts.values()) > 5

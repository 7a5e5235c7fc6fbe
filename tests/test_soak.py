"""Some of `tests.soak` in every run of the tests: 2,000 damaged files a reader, and those made by hand."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.errors import LumosError
from lumos_nb.schema import panics_told
from lumos_nb.traces.run import load_run
from tests import soak_rows, soak_seeds
from tests.mutations import tar_of
from tests.soak import BY_HAND, MOST_WALL_S, ROOT, SEED, Process, damaged
from tests.soak_extremes import extremes
from tests.soak_readers import FAULTY, READERS
from tests.soak_rows import modules

INPUTS = 2_000
NEVER_REFUSING = {"cached parse", "Chakra, checked", "job of a folder"}
"""They parse again, list findings, and are too few to be refused."""


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_end_in_a_result_or_our_error(process: Process, name: str) -> None:
    counts = process.counts(name, SEED, 0, INPUTS // READERS[name].every)
    assert counts["which"] == []
    assert counts["inputs"] == INPUTS // READERS[name].every
    assert counts.get("refused", 0) < counts["inputs"]
    if name not in NEVER_REFUSING:
        assert counts["refused"] > 0, "a reader that refuses nothing may not have read the file"


@pytest.mark.parametrize("name", READERS)
def test_extreme_files_end_in_a_result_or_our_error(process: Process, name: str) -> None:
    assert process.counts(name, BY_HAND, 0, len(extremes(name)))["which"] == []


def _with(**changed: Any) -> Callable[[bytes], bytes]:
    """A JSON object with other values."""
    return lambda sound: json.dumps(json.loads(sound) | changed).encode()


def _deep(sound: bytes) -> bytes:
    return sound.replace(b"{", b'{"another": ' + b"[" * 30_000, 1)


def _arrays(**changed: Any) -> Callable[[bytes], bytes]:
    """A file of arrays with others; bytes are no array."""

    def made(sound: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(sound)) as found, zipfile.ZipFile(out, "w") as file:
            for name in found.namelist():
                file.writestr(name, changed.get(name.removesuffix(".npy"), found.read(name)))
        return out.getvalue()

    return made


def _npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00v\x00" + header.ljust(117).encode() + b"\n"


FOUND: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("data sheet of a GPU", _with(clock_hz=-1.0), "clock_hz is -1"),
    ("data sheet of a fabric", _deep, "recursion depth|unknown field"),
    ("saved prediction", _deep, "recursion depth|unknown field"),
    ("ledger", _deep, "line 1.*recursion depth"),
    ("specification", _with(bias=[]), "Expected `bool`"),
    ("specification", _deep, "recursion depth|unknown field"),
    ("specification of a cluster", _with(nodes=2), "between is None"),
    ("capture.json", _with(threads="two"), "Expected `int`"),
    ("capture.json", lambda _: b"{}", "missing required field `threads`"),
    ("network of lookups", _arrays(mean=b"no array"), "no network of lookups"),
    ("network of lookups", _arrays(mean=_npy("{'descr': '<f8', (")), "no network of lookups"),
    ("network of lookups", _arrays(mean=_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1L,), }")), "lookups"),
    ("network of lookups", _arrays(base=_npy("{'descr': '<U1', 'fortran_order': False, 'shape': (), }") + b"\xff" * 4),
     "no network of lookups"),
    ("timeline, JSON", lambda sound: sound.replace(b'"step": ', b'"step": 1' + b"0" * 40, 1), "of changing types"),
    ("Chakra JSON", lambda sound: sound.replace(b"COMP_NODE", b"NO_NODE"), "is of type 'NO_NODE'"),
    ("Chakra JSON", lambda _: b'{"workload_graph": [{"Id": 1, "NodeType": 4, "data_deps": [null]}]}', "null in it"),
    ("tar of a run", lambda _: tar_of([("rank-0.json", b"{}"), ("a", b"")], tarfile.LNKTYPE), "linkname 'x' not found"),
    ("benchmark program", _with(calls=3), "damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "says"), FOUND)
def test_what_was_found_once_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], says: str
) -> None:
    reader = READERS[name]
    path = tmp_path / reader.file
    path.write_bytes(damage(next(iter(reader.seeds().values()))))
    with pytest.raises(LumosError, match=says) as caught:
        reader.read(path)
    assert path.name in str(caught.value)


def test_a_file_cannot_claim_ranks_as_readers_of_several_do(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(soak_seeds.made_kineto().replace(b'{"', b'{"ranks": ["m", 7, 8], "ranks_counted": 1, "', 1))
    assert load_run(path, cache=False).ranks["rank"].to_list() == [0]


def test_a_panic_over_parquet_is_an_error_of_polars() -> None:
    with pytest.raises(pl.exceptions.ComputeError, match="gave up on it: it is odd"), panics_told():
        raise pl.exceptions.PanicException("it is odd")


@pytest.mark.parametrize("name", READERS)
def test_a_reader_runs_the_modules_on_which_its_counts_depend(tmp_path: Path, name: str) -> None:
    reader, ran = READERS[name], set[str]()
    for file, data in reader.seeds().items():
        path = tmp_path / (reader.file or file)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
    try:
        reader.read(path)
    finally:
        sys.setprofile(None)
    own = {Path(file) for file in ran if file.startswith(str(ROOT / "lumos_nb"))}
    assert own
    assert own <= modules(name)


def test_what_is_recorded_of_the_same_sources_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_rows, "RESULTS", tmp_path / "results.json")
    came = {"accepted": 3, "escapes": 0, "inputs": 3, "slowest_s": 0.1, "peak_mib": 2.0}
    soak_rows.record_counts({"ledger": came, "calibration": came}, ("accepted",))
    soak_rows.record_counts({"calibration": came | {"inputs": 4}}, ("accepted",))
    assert soak_rows.recorded({"ledger": 3, "calibration": 4, "capture.json": 1}) == {"ledger", "calibration"}
    assert soak_rows.recorded({"ledger": 4, "calibration": 3}) == {"calibration"}
    monkeypatch.setattr(soak_rows, "sources", lambda name: f"of {name}, changed")
    assert soak_rows.recorded({"ledger": 1, "calibration": 1}) == set()


@pytest.fixture(scope="module")
def strict() -> Iterator[Process]:
    made = Process(most_s=1.0)
    yield made
    made.close()


@pytest.mark.parametrize("name", FAULTY)
def test_what_a_faulty_reader_does_is_found_and_the_others_are_read(strict: Process, name: str) -> None:
    faulty = [b"" < damaged(name, SEED, i)[1] < b"@" for i in range(40)]
    at = faulty.index(True, 1)
    strict.most_wall_s = 20 if name == "waits" else MOST_WALL_S
    counts = strict.counts(name, SEED, at - 1, at + 2)
    expected = [i for i in range(at - 1, at + 2) if faulty[i]]
    assert [which for which, _ in counts["which"]] == expected
    assert all(FAULTY[name][1] in why for _, why in counts["which"])
    assert counts["inputs"] == counts["accepted"] + len(expected) == 3

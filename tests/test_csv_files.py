"""CSV files of others: a table, or an error that names the file."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest

from lumos_nb.csv_files import read_csv
from lumos_nb.errors import InputError


def test_a_table_with_a_header_is_read(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    assert read_csv(tmp_path / "a.csv", InputError).rows() == [(1, 2)]


@pytest.mark.parametrize(
    "data", [gzip.compress(b"x\n1\n", mtime=0), zlib.compress(b"x\n1\n"), b"\x1f\x8b\x08,a\n1,2\n", b"\x28\xb5\x2f\xfd"]
)
def test_what_polars_would_unpack_is_refused_and_so_is_what_only_looks_like_it(data: bytes, tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.csv is compressed"):
        read_csv(tmp_path / "a.csv", InputError)


@pytest.mark.parametrize("data", [b"", b"x,y\n1\xff\xfe\xfa,2\n1,2,3,4\n", None])
def test_what_is_no_table_is_named(data: bytes | None, tmp_path: Path):
    if data is not None:
        (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.csv is no table: .* Give CSV"):
        read_csv(tmp_path / "a.csv", InputError)


@pytest.mark.parametrize("name", ["~", "file:a.csv", "a[1]*.csv"])
def test_a_table_is_read_from_just_the_path_that_was_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("a,b\n1,2\n")
    assert read_csv(Path(name), InputError).rows() == [(1, 2)]

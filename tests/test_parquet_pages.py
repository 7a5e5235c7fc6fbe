"""Heads of Parquet pages, of which some would end the process if polars read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lumos_nb.errors import TraceError
from lumos_nb.traces.export import read_table, write_table
from lumos_nb.traces.parquet_pages import check_pages

HEAD_OF_3 = b"\x2c\x15\x06"
"""A struct two fields on whose first field, a number, is 3."""

MADE = pl.DataFrame(
    {
        "number": [1, None, 3] * 50,
        "text": ["x", None, "yy"] * 50,
        "list": [[1, 2], None, []] * 50,
        "truth": [True, None, False] * 50,
        "struct": [{"q": 1, "r": "s"}] * 150,
        "none": pl.Series([None] * 150, dtype=pl.Int64),
    }
)


def _of_three(path: Path) -> bytes:
    pl.DataFrame({"first": [1, None, 3], "second": [0.5, 0.25, None]}).write_parquet(path, compression="uncompressed")
    return path.read_bytes()


@pytest.mark.parametrize("claimed", [b"\x07", b"\x08", b"\x5b", b"\xff\xff\xff\xff\x0f"], ids=[-4, 4, -46, -(2**31)])
@pytest.mark.parametrize("column", [0, 1])
def test_a_page_of_fewer_values_than_none_or_more_than_its_column_is_refused(
    tmp_path: Path, claimed: bytes, column: int
) -> None:
    """Polars 2.1 ends the process where the number is negative."""
    path = tmp_path / "table.parquet"
    before, *after = _of_three(path).split(HEAD_OF_3)
    assert len(after) == 2
    after[column] = after[column][len(claimed) - 1 :]  # nothing moves
    heads = [HEAD_OF_3, HEAD_OF_3]
    heads[column] = HEAD_OF_3[:2] + claimed
    path.write_bytes(before + heads[0] + after[0] + heads[1] + after[1])
    name = ["first", "second"][column]
    with pytest.raises(TraceError, match=rf"table\.parquet is no whole Parquet file .*page of '{name}' at byte \d+ cl"):
        read_table(path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_page_version": "2.0"},
        {"use_dictionary": False, "compression": "none"},
        {"write_page_index": True, "row_group_size": 40},
        {"data_page_size": 16, "compression": "zstd"},
    ],
    ids=str,
)
def test_what_others_write_is_read(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(MADE.to_arrow(), path, **options)
    assert read_table(path).equals(MADE)


@pytest.mark.parametrize(
    "frame", [MADE, MADE[:0], MADE[:1], pl.DataFrame(), MADE.select("none")], ids=lambda f: str(f.shape)
)
def test_what_polars_writes_is_read(tmp_path: Path, frame: pl.DataFrame) -> None:
    write_table(frame, path := tmp_path / "table.parquet")
    assert read_table(path).equals(frame)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    whole = _of_three(path)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match=r"no (whole )?Parquet file"), path.open("rb") as file:
            check_pages(path, file)


def _with_footer(footer: bytes) -> bytes:
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("footer", "why"),
    [
        (b"\x1c" * 100_000, "nested too deep"),
        (b"\x19" + b"\x19" * 100_000, "nested too deep"),
        (b"\x15" + b"\xff" * 100_000, "more than 64 bits"),
        (b"\x19\xf3" + b"\xff" * 8 + b"\x7f", "is cut"),
        (b"\x1e\x00", "type 14 .* is none of Parquet's"),
        (b"\x15\x02\x00", "is cut"),
        (b"\x48\x01x\x00", "is cut"),
    ],
)
def test_footers_that_are_none_are_refused(tmp_path: Path, footer: bytes, why: str) -> None:
    (path := tmp_path / "table.parquet").write_bytes(_with_footer(footer))
    with pytest.raises(TraceError, match=why):
        read_table(path)


def test_a_footer_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "table.parquet").write_bytes(b"PAR1\x00\xff\xff\xff\xffPAR1")
    with pytest.raises(TraceError, match="footer of its own"):
        read_table(path)


def test_columns_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """A footer of a few kB that names one column a thousand times would be looked at a thousand times."""
    column = b"\x3c" + b"\x76\x64" + b"\x00\x00"  # its third field: a struct, whose seventh says 50 bytes
    footer = b"\x49\x1c" + b"\x19\x2c" + 2 * column + b"\x00\x00"
    (path := tmp_path / "table.parquet").write_bytes(_with_footer(footer))
    with pytest.raises(TraceError, match="its columns have more bytes than it"):
        read_table(path)


def test_pages_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(pl.DataFrame({"x": ["y" * 2**20]}), path := tmp_path / "table.parquet")
    monkeypatch.setenv("LUMOS_NB_MAX_BYTES", "100000")
    with pytest.raises(TraceError, match="LUMOS_NB_MAX_BYTES"):
        read_table(path)


@pytest.mark.parametrize("kind", range(1, 13))
def test_a_list_that_claims_more_than_the_file_holds_is_refused_at_once(tmp_path: Path, kind: int) -> None:
    footer = bytes([0x19, 0xF0 | kind]) + b"\x80\x80\x80\x80\x80\x20\x00"  # field 1: a list of 2^40
    path = tmp_path / "rank-0.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(TraceError, match="no whole Parquet file"):
        read_table(path)


def test_a_footer_of_too_many_bytes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"k": "v" * (16 << 20)}), path)
    with pytest.raises(TraceError, match=r"its footer, .* has more than 16 MiB"):
        read_table(path)

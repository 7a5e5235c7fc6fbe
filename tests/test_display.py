"""Tables and numbers as a person sees them."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import polars as pl
import pytest

from lumos_nb.display import format_bytes, format_ns, format_share, html_table, text_table


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        pytest.param(0, "0 ns", id="nothing"),
        pytest.param(7, "7 ns", id="whole nanoseconds"),
        pytest.param(1_234, "1.23 µs", id="three digits"),
        pytest.param(56_789, "56.8 µs", id="three digits with one decimal"),
        pytest.param(999_499, "999 µs", id="just below a millisecond"),
        pytest.param(999_999, "1.00 ms", id="rounds up into the next unit"),
        pytest.param(-2_500_000, "-2.50 ms", id="negative"),
        pytest.param(4_321_000_000_000, "4320 s", id="longer than the largest unit"),
        pytest.param(math.nan, "nan", id="not a number"),
    ],
)
def test_a_time_is_read_in_its_natural_unit(time_ns, text):
    assert format_ns(time_ns) == text


def test_sizes_have_decimal_prefixes_and_shares_are_percentages():
    assert [format_bytes(size) for size in (512, 4_096, 2_500_000, 3e9)] == ["512 B", "4.10 kB", "2.50 MB", "3.00 GB"]
    assert [format_share(share) for share in (0.1234, -0.0004, math.nan)] == ["12.3 %", "0.0 %", "nan %"]


FRAME = pl.DataFrame(
    {
        "name": ["<script>alert('x')</script>", 'a & "b"', None],
        "dur_ns": [1_500, 2_000_000, None],
        "comm_bytes": [10, 2_000, 3],
        "share": [0.5, 0.25, 0.125],
        "ratio": [1.23456, 2.0, 1e9],
    }
)


def cells(table: str, tag: str) -> list[str]:
    return [cell.text or "" for cell in ET.fromstring(table).iter(tag)]


def test_html_shows_what_the_frame_says_and_nothing_of_it_is_markup():
    table = html_table(FRAME, caption="5 < 6 & more")
    assert cells(table, "caption") == ["5 < 6 & more"]
    assert cells(table, "th") == ["name", "dur", "comm", "share", "ratio"]
    assert cells(table, "td")[:5] == ["<script>alert('x')</script>", "1.50 µs", "10 B", "50.0 %", "1.235"]
    assert cells(table, "td")[10:12] == ["", ""]
    assert not re.search("<script|<b", table.replace("<tbody", ""))


def test_column_names_are_escaped_too():
    assert cells(html_table(pl.DataFrame({"<i>": [1]})), "th") == ["<i>"]


def test_rows_beyond_the_limit_are_counted():
    frame = pl.DataFrame({"rank": range(25)})
    assert cells(html_table(frame, max_rows=3), "td") == ["0", "1", "2", "… 22 more rows"]
    assert text_table(frame, max_rows=3).splitlines()[-1] == "… 22 more rows"


def test_text_is_aligned_with_numbers_to_the_right():
    frame = pl.DataFrame({"op": ["mm", "all_reduce"], "dur_ns": [999, 12_345]})
    assert text_table(frame, caption="ops").splitlines() == [
        "ops",
        "op              dur",
        "----------  -------",
        "mm           999 ns",
        "all_reduce  12.3 µs",
    ]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        pytest.param(pl.DataFrame(), "\n", id="no columns"),
        pytest.param(pl.DataFrame({"rank": []}), "rank\n----", id="no rows"),
    ],
)
def test_an_empty_frame_is_an_empty_table(frame, text):
    assert cells(html_table(frame), "td") == []
    assert text_table(frame) == text


def test_readings_of_a_clock_are_shown_as_ms_after_the_earliest_and_other_times_as_they_are():
    zero_ns = 1_796_002_192_806_098_578
    frame = pl.DataFrame(
        {
            "start_ns": [zero_ns + 2_345_678, zero_ns, None],
            "measured_start_ns": [zero_ns + 1, zero_ns + 2_000_000, None],
            "dur_ns": [5_000, 6_000, 7_000],
        }
    )
    assert text_table(frame).splitlines()[2:] == [
        "+2.346 ms       +0.000 ms  5.00 µs",
        "+0.000 ms       +2.000 ms  6.00 µs",
        "                           7.00 µs",
    ]
    already = pl.DataFrame({"start_ns": [0, 2_345_678]})
    assert "2.35 ms" in text_table(already)
    assert "+" not in text_table(already)


@pytest.mark.parametrize("draw", [text_table, html_table], ids=["text", "HTML"])
def test_a_name_cannot_steer_a_terminal_or_break_a_row(draw):
    drawn = draw(pl.DataFrame({"name": ["\x1b[2J\nα\u202e\x9b"]}))
    assert r"\x1b[2J\nα\u202e\x9b" in drawn
    assert not set(drawn) & set("\x1b\x9b\u202e")


def test_columns_that_differ_by_their_unit_alone_have_headings_of_their_own():
    frame = pl.DataFrame({"step": [3, 4], "step_ns": [1_000_000, 2_000_000]})
    assert text_table(frame, max_rows=1).splitlines()[0].split("  ") == ["step", "step time"]
    assert text_table(frame, max_rows=1).endswith("1 more row")

"""Which layer an operator belongs to."""

from __future__ import annotations

import polars as pl
import pytest

from lumos_nb.schema import EVENTS
from lumos_nb.scopes import layers_of

ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"


def events(*rows: tuple[str, str, int, int, int, int | None]) -> pl.DataFrame:
    """Events of rank 0 from (category, name, thread, start, duration, sequence) rows."""
    named = [
        {"rank": 0, "event_id": i, "category": c, "name": n, "thread": t, "start_ns": s, "dur_ns": d, "sequence": q}
        for i, (c, n, t, s, d, q) in enumerate(rows)
    ]
    return pl.DataFrame(named, schema_overrides=dict(EVENTS.columns)).with_columns(
        *(pl.lit(None, dtype).alias(c) for c, dtype in EVENTS.columns.items() if c not in named[0])
    )


def layers(*rows: tuple[str, str, int, int, int, int | None]) -> dict[int, str]:
    return dict(layers_of(events(*rows)).select("event_id", "layer").iter_rows())


def test_a_range_names_the_layer_of_what_it_encloses() -> None:
    found = layers(
        ("user_annotation", "layer=3", 1, 0, 100, None),
        ("cpu_op", "aten::linear", 1, 10, 20, None),
        ("cpu_op", "aten::relu", 1, 100, 20, None),
    )
    assert found == {1: "3"}


def test_module_calls_make_a_path_and_a_range_inside_them_wins() -> None:
    found = layers(
        ("python_function", "nn.Module: GPT_0", 1, 0, 100, None),
        ("python_function", "nn.Module: Linear_2", 1, 10, 50, None),
        ("cpu_op", "aten::linear", 1, 12, 20, None),
        ("user_annotation", "layer=7", 1, 70, 20, None),
        ("cpu_op", "aten::relu", 1, 72, 5, None),
        ("cpu_op", "aten::add", 1, 95, 2, None),
    )
    assert found == {2: "GPT_0/Linear_2", 4: "7", 5: "GPT_0"}


def test_backward_on_the_engine_has_the_layer_of_its_forward() -> None:
    found = layers(
        ("user_annotation", "layer=0", 1, 0, 50, None),
        ("cpu_op", "aten::t", 1, 5, 5, 41),
        ("cpu_op", "aten::addmm", 1, 20, 9, 41),
        ("user_annotation", "layer=1", 1, 50, 50, None),
        ("cpu_op", "aten::addmm", 1, 60, 9, 42),
        ("cpu_op", ENGINE, 2, 200, 30, 42),
        ("cpu_op", ENGINE, 2, 240, 30, 41),
        ("cpu_op", ENGINE, 2, 280, 30, 7),
    )
    assert {i: found.get(i) for i in (5, 6, 7)} == {5: "1", 6: "0", 7: None}


@pytest.mark.parametrize("name", ["layers=3", "my layer=3", "nn.Modules"])
def test_other_names_name_no_layer(name: str) -> None:
    assert layers(("user_annotation", name, 1, 0, 100, None), ("cpu_op", "aten::linear", 1, 10, 20, None)) == {}

"""The bundled data: what is listed is there, unchanged, and as described; and the script that makes it works."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from gloo_ranks import make_datasets

from lumos_nb import datasets
from lumos_nb.errors import LumosError

FOLDER = Path(__file__).parents[1] / "datasets"
MAX_TOTAL_BYTES = 30 * 2**20
LISTED = re.compile(r"^\| (\S+) \| (\d+) \| ([0-9a-f]{64}) \|$", re.MULTILINE)

bundled = pytest.mark.skipif(not datasets.names(), reason="the data sets have not been recorded (make datasets)")


def listed(folder: Path) -> dict[str, tuple[int, str]]:
    return {file: (int(size), sha) for file, size, sha in LISTED.findall((folder / "README.md").read_text())}


def present(folder: Path) -> dict[str, tuple[int, str]]:
    skipped = {".py", ".pyc", ".md"}
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in skipped and "/." not in str(path)
    ]
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    }


def test_the_readme_lists_every_file_with_its_hash() -> None:
    assert listed(FOLDER) == present(FOLDER)


def test_the_data_is_small_enough_to_commit() -> None:
    assert sum(size for size, _ in present(FOLDER).values()) <= MAX_TOTAL_BYTES


def test_no_file_is_of_an_unknown_data_set() -> None:
    known = {Path(dataset.file).parts[0] for dataset in datasets.DATASETS.values()}
    tops = {Path(file).parts[0] for file in present(FOLDER)}
    others = {"hardware", "calibrations", "calibration-samples", "surcharges.json"}  # read by config.py, costs, llm
    assert {top for top in tops - known - others if not top.endswith("variants.json")} == set()


@bundled
@pytest.mark.parametrize("name", datasets.names())
def test_a_data_set_is_as_described(name: str) -> None:
    loaded = datasets.load(name)
    if isinstance(loaded, pl.DataFrame):
        assert tuple(loaded.columns) == datasets.DATASETS[name].columns
        assert not loaded.is_empty()
    else:
        about = json.loads((loaded / "capture.json").read_text())
        for rank in range(about["world_size"]):
            assert (loaded / f"rank-{rank}.json.gz").exists()
        steps = pl.read_csv(loaded / "steps.csv")
        assert steps.height == about["world_size"] * about["phases"]["timed"]


@bundled
def test_every_delay_of_the_delayed_run_is_logged() -> None:
    folder = datasets.path("gpt-ddp-delay")
    phases = json.loads((folder / "capture.json").read_text())["phases"]
    delays = pl.read_csv(folder / "delays.csv")
    assert dict(delays["phase"].value_counts().rows()) == phases
    assert delays.filter(pl.col("phase") == "traced")["delay_ms"].n_unique() >= 4


@bundled
def test_truth_has_launches_pairs_and_an_again() -> None:
    table = datasets.load("variants")
    assert isinstance(table, pl.DataFrame)
    assert table["n"].min() >= 20
    assert table.group_by("kind", "variant").len()["len"].min() >= 5
    again = table.filter(pl.col("variant") == "again")
    assert set(again["kind"]) == set(table["kind"])
    assert (table["ratio_lo"] <= table["ratio"]).all()
    assert (table["ratio"] <= table["ratio_hi"]).all()


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(LumosError, match="'gpt-3' is no data set; there are: ") as caught:
        datasets.path("gpt-3")
    assert isinstance(caught.value, KeyError)
    for name in datasets.names():
        assert name in str(caught.value)


def test_a_known_name_that_is_absent_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "root", lambda: tmp_path)
    with pytest.raises(datasets.DatasetError, match="'gpt-ddp' is not in this installation; there are: none"):
        datasets.load("gpt-ddp")
    assert datasets.describe().is_empty()


def test_a_wheels_own_folder_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "lumos_nb" / "datasets.py"))
    assert datasets.root() == tmp_path / "datasets"
    (tmp_path / "lumos_nb" / "_datasets").mkdir(parents=True)
    (tmp_path / "lumos_nb" / "_datasets" / "variants.csv").write_text("kind,ratio\npp,2.5\n")
    loaded = datasets.load("variants")
    assert isinstance(loaded, pl.DataFrame)
    assert loaded.rows() == [("pp", 2.5)]
    assert datasets.describe().select("name", "kind", "size_bytes").rows() == [("variants", "table", 18)]


def test_the_script_records_measures_and_lists(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "make_datasets.py"), "--quick", "--only", "single", "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert listed(tmp_path) == present(tmp_path)
    assert (tmp_path / "gpt-single" / "rank-0.et.json.gz").exists()
    table = pl.read_csv(tmp_path / "variants.csv")
    assert tuple(table.columns) == datasets.DATASETS["variants"].columns
    assert set(table["variant"]) == {"again", *make_datasets.CHANGES["single"]}
    steps = pl.read_csv(tmp_path / "variant-steps.csv")
    assert tuple(steps.columns) == datasets.DATASETS["variant-steps"].columns
    per_round = steps.group_by("round").agg(pl.col("variant").sort())
    assert per_round["variant"].n_unique() == 1  # every round has every variant once
    base, layers = (steps.filter(pl.col("variant") == name).sort("round")["step_ns"] for name in ("base", "layers_4"))
    ratio = table.filter(pl.col("variant") == "layers_4")["ratio"].item()
    assert ratio == pytest.approx((layers / base).median(), rel=1e-3)  # the median of the rounds' own ratios


def test_a_step_on_two_ranks_lasts_from_latest_end_to_latest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {0: (100, 210, 300), 1: (90, 190, 330)}  # of the start, the base and the variant, by rank

    def launch(*args: object) -> None:
        for rank, (start, base, layers) in ends.items():
            turns = [(-1, -1, "start", start, 5, 1), (0, 0, "base", base, 70, 2), (0, 1, "layers_4", layers, 80, 3)]
            Path(str(args[-1]), f"{rank}.json").write_text(json.dumps(turns))

    monkeypatch.setattr(make_datasets, "launch", launch)
    rows = make_datasets.measured_rows("ddp", 4, make_datasets.Plan())
    step = make_datasets.STEP_COLUMNS.index("step_ns")
    assert [(row[1], row[4], row[5], row[step]) for row in rows] == [
        (4, "base", 0, 110),
        (4, "base", 1, 110),
        (4, "layers_4", 0, 120),
        (4, "layers_4", 1, 120),
    ]


def test_every_five_delays_are_all_five() -> None:
    delays = make_datasets.shuffled_delays(23)
    assert len(delays) == 23
    for k in range(0, 20, 5):
        assert sorted(delays[k : k + 5]) == list(make_datasets.DELAYS_MS)
    assert delays[:5] != delays[5:10]
    assert delays == make_datasets.shuffled_delays(23)

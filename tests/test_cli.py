"""The command line as a Unix user meets it: output, exit codes, messages, interruptions."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import cli, terminal
from tests.trace_builder import repeated, write_kineto

ROOT = Path(__file__).parents[1]
GPT = str(ln.datasets.path("gpt-ddp"))
SINGLE = str(ln.datasets.path("gpt-single"))
COMMAND = [sys.executable, "-W", "error", "-m", "lumos_nb"]


def lumos(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    return lumos("replay", GPT, "--step", "5", "--scale", "cpu=0.5", "--out", out), out


def test_the_demo_is_the_replay_of_a_run_that_comes_with_the_package(capsys):
    assert cli.main(["demo", "gpt-single", "--predict", "0"]) == 0
    demo = capsys.readouterr().out
    assert cli.main(["replay", SINGLE, "--predict", "0"]) == 0
    assert demo == capsys.readouterr().out
    assert cli.main(["demo", "gpt-3"]) == 1
    assert "'gpt-3' is no data set; there are: gpt-single" in capsys.readouterr().err


def test_replay_prints_a_report_and_writes_its_files(replayed):
    done, out = replayed
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Step 5 of gpt-ddp, 2 ranks\n")
    for heading in (
        "PREDICTED FROM OTHER STEPS",
        "WHERE THE TIME GOES",
        "WHAT WAITS FOR WHOM",
        "WHAT IF HALF AS LONG?",
    ):
        assert heading in done.stdout
    files = ["edges.parquet", "ops.parquet", "prediction.json", "report.html", "step.perfetto.json.gz"]
    assert sorted(path.name for path in out.iterdir()) == files
    graph = ln.build_graph(ln.load_run(GPT), 5)
    assert pl.read_parquet(out / "ops.parquet")["op_id"].equals(graph.ops["op_id"])
    assert pl.read_parquet(out / "edges.parquet").equals(graph.edges)


def printed(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a verb prints, run in this process."""
    assert cli.main(list(map(str, arguments))) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


def test_a_prediction_is_checked_against_another_run_and_kept(replayed, tmp_path, capfd):
    saved, ledger = replayed[1] / "prediction.json", tmp_path / "ledger.jsonl"
    sentence = printed(capfd, "check", saved, SINGLE, "--ledger", ledger)
    assert re.match(r"cpu × 0\.5: predicted .* ms, measured .* ms, an error of .* % \(null .* %\)\.", sentence)
    outcome = json.loads(printed(capfd, "check", saved, SINGLE, "--json", "--ledger", ledger))
    assert ln.read_ledger(ledger)["error"].to_list() == [outcome["error"]] * 2
    swept = ln.sweep(ln.repeat(ln.build_graph(ln.load_run(GPT), 5)), [{"cpu": 0.5}])
    assert outcome["predicted_ns"] == pytest.approx(outcome["null_ns"] * (1 + swept["change"][0]), rel=1e-6)


def test_a_prediction_cannot_be_checked_against_its_own_base(replayed, capfd):
    assert cli.main(["check", str(replayed[1] / "prediction.json"), GPT]) == 1
    assert "is the run that the prediction was made from" in capfd.readouterr().err


def test_json_is_for_other_programs_and_the_same_of_several_jobs(capfd):
    done = lumos("replay", GPT, "--json", "--predict", "0", "--jobs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    for row in report["breakdown"]:
        assert sum(time_ns for part, time_ns in row.items() if part not in ("rank", "step_ns")) == row["step_ns"]
    assert report["prediction"] == []
    assert json.loads(printed(capfd, "replay", GPT, "--json", "--predict", "0")) == report


def test_compare_adds_up_in_text_and_in_json(capfd):
    text = printed(capfd, "compare", GPT, GPT, "--steps", "3", "4")
    assert text.startswith(f"Step 3 of {GPT} (a) against step 4 of {GPT} (b)")
    report = json.loads(printed(capfd, "compare", GPT, SINGLE, "--json"))
    totals = {key: sum(row["mean_diff_ns"] for row in report[key]) for key in ("step", "rank", "part", "op", "layer")}
    assert len(set(map(round, totals.values()))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["replay", "absent"], "absent does not exist", id="no such run"),
        pytest.param(["replay", GPT, "--step", "99"], "step 99 is not in the recording", id="no such step"),
        pytest.param(["replay", GPT, "--predict", "0", "--scale", "gpu=2"], "of class 'gpu'", id="no such kind"),
        pytest.param(["compare", GPT, "absent"], "absent does not exist", id="no run to compare with"),
        pytest.param(["check", "absent.json", GPT], "absent.json is no saved prediction", id="no prediction"),
        pytest.param(
            ["replay", GPT, "--out", __file__], "is a file, no folder", id="a file where the folder should be"
        ),
        pytest.param(["replay", __file__], "is no JSON object", id="no trace"),
    ],
)
def test_an_error_is_one_line_and_the_exit_code_1(arguments, message, capfd):
    assert cli.main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("lumos-nb: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no verb"),
        pytest.param(["explain", GPT], id="an unknown verb"),
        pytest.param(["replay"], id="no run"),
        pytest.param(["replay", GPT, "--step", "five"], id="a step that is no number"),
        pytest.param(["replay", GPT, "--scale", "comm"], id="a scale without a factor"),
        pytest.param(["replay", GPT, "--jobs", "0"], id="no job"),
    ],
)
def test_wrong_usage_is_2_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lumos-nb")


CHAKRA = [f"chakra {verb}" for verb in ("link", "convert", "validate", "obfuscate", "json", "view")]
CHAKRA += [f"chakra generate {what}" for what in ("llm", "dlrm", "pattern")]


BENCHMARK = [f"benchmark {verb}" for verb in ("generate", "run", "compare", "select")]


@pytest.mark.parametrize("verb", ["replay", "compare", "check", *CHAKRA, *BENCHMARK])
def test_help_has_examples_that_parse(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*verb.split(), "--help"])
    assert stopped.value.code == 0
    shown = re.sub(r" *\\\n *", " ", capsys.readouterr().out)
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  lumos-nb ")]
    examples = [re.split(r" {2,}| \| ", line)[0] for line in lines]
    assert len(examples) >= 2
    for example in examples:
        assert cli._parser().parse_args(example.split()[1:]).verb


def test_a_trace_is_linked_with_its_profile(traces, tmp_path, capfd):
    et, kineto = (traces / f"hta/execution_trace/benchmark_simple_add_{kind}.json.gz" for kind in ("et", "trace"))
    text = printed(capfd, "chakra", "link", et, kineto, "--out", tmp_path / "out")
    assert "100.0 % of the nodes" in text
    assert "Nothing is left out." in text
    assert pl.read_parquet(tmp_path / "out/nodes.parquet").height == 38
    found = json.loads(printed(capfd, "chakra", "link", et, kineto, "--json"))
    assert found["report"][0] == {"what": "nodes", "rule": "external id", "amount": 36, "share": 1.0}


def test_a_run_becomes_chakra_files_that_are_checked_obfuscated_printed_and_viewed(tmp_path, capfd):
    out, public = tmp_path / "out", tmp_path / "public"
    text = printed(capfd, "chakra", "convert", ln.datasets.path("gpt-ddp"), out, "--target", "astra-sim")
    assert text.strip().endswith("chakra.0.et, chakra.1.et, chakra.groups.json")
    assert "nothing found" in printed(capfd, "chakra", "validate", out, "--target", "astra-sim")
    assert "4 ALL_REDUCE of" in printed(
        capfd, "chakra", "obfuscate", out, public, "--scale", "secret", "--jitter", "0.1"
    )
    assert (
        json.loads(printed(capfd, "chakra", "json", public / "chakra.0.et", tmp_path / "a.jsonl", "--json"))["nodes"]
        > 900
    )
    printed(capfd, "chakra", "json", tmp_path / "a.jsonl", tmp_path / "a.0.et")
    assert (tmp_path / "a.0.et").read_bytes() == (public / "chakra.0.et").read_bytes()
    printed(capfd, "chakra", "view", out, tmp_path / "view.json")
    names = {one["name"] for one in json.loads((tmp_path / "view.json").read_text())["traceEvents"]}
    assert {"gloo:all_reduce", "thread_name"} <= names


def test_an_execution_trace_is_converted_with_its_profile(tmp_path, capfd):
    folder = ln.datasets.path("gpt-single-paired")
    printed(capfd, "chakra", "convert", folder, tmp_path / "out", "--execution-trace", folder)
    nodes = ln.chakra.read_file(tmp_path / "out/chakra.0.et").table
    assert nodes["ctrl_deps"].list.len().sum() > 5000
    assert nodes.filter(name="gap").height > 0
    folder = ln.datasets.path("gpt-ddp-paired")
    printed(capfd, "chakra", "convert", folder, tmp_path / "two", "--execution-trace", folder)
    assert ln.chakra.validate(tmp_path / "two").is_empty()
    assert list(ln.chakra.rank_files(tmp_path / "two")) == [0, 1]
    assert ln.chakra.read_groups(tmp_path / "two") == {"0": [0, 1]}
    arguments = ["chakra", "convert", str(folder), str(tmp_path / "no"), "--execution-trace", str(folder)]
    assert cli.main([*arguments, "--target", "astra-sim"]) == 1
    assert "leave out the other" in capfd.readouterr().err


H100 = ["--cluster", "gpu=H100-SXM-80GB", "inside=NVLink4-NVSwitch"]
STEP = ["--train", "micro_batch=1", "global_batch=8", "seq=2048"]


def test_workloads_are_generated_from_configuration(tmp_path, capfd):
    generate = ("chakra", "generate")
    text = printed(capfd, *generate, "llm", "gpt3-1.3b", tmp_path / "a", "--layout", "tp=2", "dp=4", *STEP, *H100)
    assert "A step of gpt3-1.3b on 8 x H100-SXM-80GB" in text
    assert list(ln.chakra.rank_files(tmp_path / "a")) == [*range(8)]
    model = tmp_path / "model.json"
    model.write_text(ln.Transformer.named("gpt3-1.3b").to_json())
    layout = ["--layout", "dp=8", "--only", "5", "2"]
    said = json.loads(printed(capfd, *generate, "llm", model, tmp_path / "b", *layout, *STEP, *H100, "--json"))
    assert [Path(path).name for path in said["written"]] == ["chakra.5.et", "chakra.2.et", "chakra.groups.json"]
    assert ln.chakra.read_groups(tmp_path / "b") == {"0": [*range(8)]}
    model.write_text('{"dense": 13, "bottom": [512, 64], "top": [512, 1]}')
    (tmp_path / "tables.csv").write_text("table,rows,dim,pooling\na,1000000,64,20\nb,500000,64,1\n")
    args = [model, tmp_path / "tables.csv", tmp_path / "c", "--train", "global_batch=8192", *H100, "gpus_per_node=2"]
    assert "A step of a DLRM on 2 x" in printed(capfd, *generate, "dlrm", *args, "--target", "astra-sim")
    pattern = ["pattern", tmp_path / "d", "--ranks", "4", "--rounds", "3", "--collective", "all_gather"]
    printed(capfd, *generate, *pattern, "--compute-us", "100", "--transfer-us", "30", "--in-turn")
    assert ln.replay(ln.chakra.to_graph(tmp_path / "d")).makespan_ns == 3 * 130_000
    for folder in "acd":
        assert "nothing found" in printed(capfd, "chakra", "validate", tmp_path / folder, "--target", "astra-sim")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["llm", "gpt9", "out", *STEP, *H100], "no model is called 'gpt9'", id="no such model"),
        pytest.param(["llm", "gpt2-xl", "out", *STEP, *H100, "--layout", "tp=x"], "got `str` - at `$.tp`", id="type"),
        pytest.param(["llm", "gpt2-xl", "out", *STEP, *H100, "--layout", "tp"], "'tp' is no FIELD=VALUE", id="words"),
        pytest.param(["dlrm", "m.json", "t.csv", "out", *STEP, *H100], "'m.json' is no FIELD=VALUE", id="no file"),
        pytest.param(["pattern", "out", "--ranks", "2"], "a pattern of nothing", id="nothing"),
        pytest.param(["pattern", "out", "--ranks", "2", "--compute-us", "1", "--only", "2"], "no rank 2", id="rank"),
    ],
)
def test_what_cannot_be_generated_is_an_error_in_a_line(arguments, message, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chakra", "generate", *arguments]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), message in err) == ("", 1, True)
    assert not (tmp_path / "out").exists()


def test_findings_of_a_check_are_exit_code_1(tmp_path, capfd):
    nodes = ln.chakra.Nodes.of(pl.DataFrame({"id": [1, 1], "dur_us": [5, 5]}))
    ln.chakra.write_file(nodes, tmp_path / "a.0.et")
    assert cli.main(["chakra", "validate", str(tmp_path)]) == 1
    assert "1 findings (1 id)" in capfd.readouterr().out
    assert cli.main(["chakra", "validate", str(tmp_path), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["findings"][0]["rule"] == "id"


def test_the_version_is_that_of_the_package():
    assert lumos("--version").stdout == f"lumos-nb {ln.__version__}\n"


def test_the_script_is_declared_and_is_the_same_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("lumos-nb", scripts["lumos-nb"], "console_scripts").load() is cli.main


@pytest.fixture
def small(tmp_path) -> Path:
    """A trace that is replayed at once."""
    trace = repeated(lambda t, _n, at: t.launch("matmul µ", (at + 1, at + 3), (at + 10, at + 900)) and None)
    return write_kineto(trace, tmp_path / "small.json")


def test_a_reader_that_has_enough_ends_it_quietly(small):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*COMMAND, "replay", small], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_an_error(small):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "replay", small], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"lumos-nb: .*No space left on device\n", done.stderr)


def test_an_encoding_without_micro_signs_is_no_obstacle(small):
    done = lumos("replay", small, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "900 ?s" not in done.stdout
    assert "matmul ?" in done.stdout


def test_control_c_stops_it_with_130_after_progress_on_the_terminal():
    terminal, end = pty.openpty()
    command = [*COMMAND, "replay", GPT, "--predict", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True) as process:
        os.close(end)
        shown, patience = "", time.monotonic() + 120
        while "predicting" not in shown and time.monotonic() < patience:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096).decode()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        shown += os.read(terminal, 4096).decode()
    os.close(terminal)
    assert "reading" in shown
    assert re.search(r"read (\d+) of \1 files", shown)
    assert process.returncode == 130
    assert out == ""
    assert "\r\x1b[Klumos-nb: interrupted\r\n" in shown


def test_a_real_run_is_replayed_end_to_end(traces, tmp_path):
    folder = traces / "torchrec" / "sst_long_a2a_optimizer_2"
    done = lumos("replay", folder, "--predict", "2", "--out", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all_to_all" in done.stdout
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    assert (tmp_path / "step.perfetto.json.gz").stat().st_size > 0


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_no_traceback(small, closed):
    command = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "replay", str(small), "--predict", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if closed == ">&-":
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "lumos-nb: standard output is closed; the report has no place to go\n"
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Step ")


def test_no_more_workers_start_than_there_are_files(monkeypatch):
    started = []
    monkeypatch.setattr(terminal, "_pool", lambda jobs: started.append(jobs) or nullcontext())
    assert list(terminal._Told(10**6, print).map(str, [1, 2])) == ["1", "2"]
    assert started == [2]


def test_a_kind_that_is_scaled_twice_is_refused(small, capfd):
    assert cli.main(["replay", str(small), "--scale", "cpu=0.5", "--scale", "cpu=2"]) == 1
    assert "--scale names a kind twice" in capfd.readouterr().err

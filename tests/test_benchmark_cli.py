"""`lumos-nb benchmark` as a Unix user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import lumos_nb as ln
from lumos_nb import cli
from tests.test_cli import printed
from tests.trace_builder import Trace, repeated, write_kineto

PAIRED = ln.datasets.path("gpt-single-paired")
PROGRAM = {"bench.py", "binding.py", "device_activity.py", "peers.py"}
QUICK = ("--device", "cpu", "--iterations", "2", "--warmup", "0")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "gpt"
    assert cli.main(["benchmark", "generate", str(PAIRED), str(folder), "--rank", "0"]) == 0
    return folder


def test_a_program_is_generated_run_and_compared(program, tmp_path, capfd):
    assert {path.name for path in program.iterdir()} == {*PROGRAM, "README.md", "workload.json"}
    assert cli.main(["benchmark", "run", str(program), "--options", *QUICK, "--profile", str(tmp_path / "out")]) == 0
    text = capfd.readouterr().out  # torch's profiler writes to standard error
    assert text.startswith("512 calls")
    assert text.count("\n") > 4  # and a table of the iterations
    code = cli.main(["benchmark", "compare", str(PAIRED), str(tmp_path / "out"), "--json"])
    found = json.loads(capfd.readouterr().out)
    assert code == int(found["alike"] is False)
    assert found["coverage_by_count"] > 0.9
    assert found["figures"][0]["figure"] == "step"
    assert cli.main(["benchmark", "compare", str(PAIRED), str(PAIRED)]) == 0
    assert capfd.readouterr().out.startswith("Alike: a step takes 1.000")


def test_what_is_generated_is_told_and_sizes_become_smaller(tmp_path, capfd):
    sizes = ("--shrink", "512=64", "--alpha", "1", "--hide")
    said = json.loads(printed(capfd, "benchmark", "generate", PAIRED, tmp_path, "--json", *sizes))
    assert said["coverage"] == said["time_coverage"] == 1
    assert said["stand_ins"] == []
    slots = json.loads((tmp_path / "workload.json").read_text())["slots"]
    shapes = [size for _, _, shape, *_ in slots for size in shape]
    assert 64 in shapes
    assert 512 not in shapes
    assert "layer=" not in (tmp_path / "workload.json").read_text()
    assert f"run it with: python {tmp_path}/bench.py" in printed(capfd, "benchmark", "generate", PAIRED, tmp_path)
    assert "layer=" in (tmp_path / "workload.json").read_text()


def test_the_program_says_which_tables_it_has(tmp_path, capfd):
    printed(capfd, "benchmark", "generate", ln.datasets.path("gpt-ddp-paired"), tmp_path)
    text = (tmp_path / "README.md").read_text()
    tables = {path.name for path in tmp_path.glob("workload*.json")}
    assert tables == {"workload-0.json", "workload-1.json"}
    assert set(re.findall(r"`(workload.*?)`", text)) == tables
    assert "The job has 2 ranks, of which 2 can be" in text
    assert "no stand-ins" in text


def test_a_trace_is_run_without_a_folder_and_the_times_are_json_alone(capfd):
    arguments = (PAIRED, "--json", "--options", *QUICK, "--only", "Optimizer.step")
    times = json.loads(printed(capfd, "benchmark", "run", *arguments))
    assert [row["iteration"] for row in times] == [0, 1]
    assert min(row["wall_ns"] for row in times) > 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = repeated(lambda t, n, at: t.op("aten::mm", at, at + (10 if n < 3 else 40)))
    return write_kineto(trace, tmp_path_factory.mktemp("run") / "rank-0.json")


def test_representatives_are_chosen_by_steps_and_of_runs(run, capfd):
    assert "2 of 3 stand for all: 100.0 %" in printed(capfd, "benchmark", "select", run, "-k", "2", "--by", "step")
    found = json.loads(printed(capfd, "benchmark", "select", run, run, "-k", "1", "--json"))
    assert (found["measure"], found["error"]) == ("ns", 0)
    assert found["chosen"][0]["weight"] == 2
    assert found["items"][1]["name"] == str(run)


def test_a_step_of_another_length_is_exit_code_1(run, tmp_path, capfd):
    slower = write_kineto(repeated(lambda t, _n, at: t.op("aten::mm", at, at + 10), 2000), tmp_path / "rank-0.json")
    assert cli.main(["benchmark", "compare", str(run), str(slower)]) == 1
    out, err = capfd.readouterr()
    assert out.startswith("Not alike: a step takes 2.000")
    assert err == ""


@pytest.fixture
def damaged(program, tmp_path) -> Path:
    (tmp_path / "workload.json").write_text((program / "workload.json").read_text()[:1000])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["generate", "absent", "out"], "absent does not exist", id="no trace"),
        pytest.param(["generate", PAIRED, __file__], "is a file, no folder: give a folder", id="a file for a folder"),
        pytest.param(["generate", PAIRED, "{tmp}", "--step", "99"], "step 99 is not in the trace", id="no such step"),
        pytest.param(["generate", PAIRED, "{tmp}", "--shrink", "4=0"], "shrink is {4: 0}", id="a size of 0"),
        pytest.param(["run", "{program}", "--options", "--only", "nothing"], "no call is chosen", id="nothing to run"),
        pytest.param(["run", PAIRED, "--options", "--only", "nothing"], "no call is chosen", id="nothing of a trace"),
        pytest.param(["run", "{damaged}", "--options", *QUICK], "workload.json is damaged", id="a damaged table"),
        pytest.param(["run", "{list}", "--options", *QUICK], "workload.json is damaged", id="a list for a table"),
        pytest.param(["compare", "absent", "absent"], "absent does not exist", id="no recording"),
        pytest.param(["compare", "{unmarked}", PAIRED], "no ProfilerStep mark", id="no step"),
        pytest.param(["select", PAIRED, "-k", "2"], "k is 2, of 1 items", id="too many"),
        pytest.param(["select", "{run}", "{et}", "-k", "1"], "give traces of one kind", id="mixed"),
    ],
)
def test_an_error_is_one_line_and_the_exit_code_1(arguments, message, run, program, damaged, tmp_path, capfd):
    unmarked = Trace()
    unmarked.op("aten::mm", 0, 10)
    names = {"run": run, "program": program, "damaged": damaged, "tmp": tmp_path / "new"}
    (tmp_path / "list").mkdir()
    (tmp_path / "list/workload.json").write_text("[]")
    names |= {
        "list": tmp_path / "list",
        "unmarked": write_kineto(unmarked, tmp_path / "unmarked.json"),
        "et": next(PAIRED.glob("*.et.json.gz")),
    }
    given = [str(one).format(**names) if "{" in str(one) else str(one) for one in arguments]
    assert cli.main(["benchmark", *given]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("lumos-nb: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no verb"),
        pytest.param(["generate", "runs/gpt"], id="no folder"),
        pytest.param(["generate", "runs/gpt", "out", "--shrink", "4096"], id="a size without a smaller one"),
        pytest.param(["run", str(PAIRED), "--options", "--iterations", "many"], id="an option that bench.py refuses"),
        pytest.param(["select", "runs/gpt"], id="no k"),
        pytest.param(["select", "runs/gpt", "-k", "2", "--by", "layer"], id="by what there is not"),
    ],
)
def test_wrong_usage_is_2_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["benchmark", *arguments])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: ")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"scopes": [["a", 0]]}, id="scopes without end"),
        pytest.param({"source": {"threads": -5}}, id="a negative number of threads"),
        pytest.param({"memory": [[-1, "cpu", "float32", ["constant", 0]]]}, id="less than no memory"),
    ],
)
def test_a_table_that_cannot_be_ends_in_a_line(wrong, program, tmp_path, capfd):
    table = json.loads((program / "workload.json").read_text())
    for call in table["calls"]:
        call["scope"] = 0
    changed = {name: table[name] | value if name == "source" else value * 10**4 for name, value in wrong.items()}
    (tmp_path / "workload.json").write_text(json.dumps(table | changed))
    assert cli.main(["benchmark", "run", str(tmp_path), "--options", *QUICK]) == 1
    err = capfd.readouterr().err
    assert "workload.json is damaged" in err
    assert err.count("\n") == 1

"""No network: the main jobs in a process that the kernel ends at the first internet socket, whoever opens it."""

from __future__ import annotations

import ctypes
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
AF_INET, AF_INET6 = 2, 10

JOBS = """
import importlib, pkgutil, sys
from pathlib import Path
import polars as pl
import lumos_nb as ln
from lumos_nb import charts, report, widgets
from lumos_nb.costs.calibration import calibrations
from lumos_nb.session import session_info

for found in pkgutil.walk_packages(ln.__path__, "lumos_nb."):
    importlib.import_module(found.name)
out = Path(sys.argv[1])
run = ln.load_run(ln.datasets.path("gpt-ddp"))
graph = ln.build_graph(run, step=3)
result = ln.replay(graph)
assert ln.breakdown(result).height and charts.to_png(charts.timeline(result)) and charts.to_svg(charts.timeline(result))
report.write_report(report.step_report(run, 3, predict=0), out, run=run)
for panel in (widgets.explore(run), widgets.what_if(graph), widgets.configure("llama-3-8b")):
    assert panel.result is not None, panel
assert session_info(ln.datasets.path("gpt-ddp")).height
for name in calibrations():
    ln.load_calibration(name)
for name in ln.datasets.names():
    ln.datasets.load(name)
cluster = ln.Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
train = ln.Training(micro_batch=1, global_batch=16, seq=2048)
model = ln.Transformer.named("llama-3-8b")
assert ln.estimate(model, ln.Parallelism(dp=8, zero=3), train, cluster).step_ns > 0
costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, batch=4096)
tables = pl.DataFrame({"rows": [10**5] * 9, "dim": [64] * 9, "pooling": [5.0] * 9})
assert ln.shard(tables, cluster, costs).total_us > 0
(trace,) = ln.datasets.path("gpt-single-paired").glob("*.et.json.gz")
assert ln.load_execution_trace(trace).nodes.height

import torch
layer = torch.nn.Linear(4, 4)
with ln.capture(out / "own", steps=3, warmup=1, timed=1, device="cpu") as recording:
    for batch in recording.wrap([torch.ones(2, 4)] * recording.total_steps):
        layer(batch).sum().backward()
print("done")
"""


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def forbid_internet() -> None:
    """Have the kernel end this process, and those that it starts, with SIGSYS when one opens an IPv4 or IPv6 socket."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    allow, end = 0x7FFF0000, 0x80000000
    filtered = (_Instruction * 7)(
        (load, 0, 0, 0),  # the number of the call
        (jump_if_equal, 0, 3, SOCKET_CALL[platform.machine()]),
        (load, 0, 0, 16),  # its first argument: the family
        (jump_if_equal, 2, 0, AF_INET),
        (jump_if_equal, 1, 0, AF_INET6),
        (answer, 0, 0, allow),
        (answer, 0, 0, end),
    )
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    prctl, program = ctypes.CDLL(None, use_errno=True).prctl, _Program(len(filtered), filtered)
    if prctl(pr_set_no_new_privs, 1, 0, 0, 0) or prctl(pr_set_seccomp, mode_filter, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def offline(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=forbid_internet)


needs_filter = pytest.mark.skipif(platform.machine() not in SOCKET_CALL, reason="the number of the call is not known")


@needs_filter
@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import socket; socket.socket(socket.AF_INET6)",
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', "
        "'import socket; socket.getaddrinfo(\"a.invalid\", 80)']).returncode)",
        "import polars; polars.read_parquet('http://127.0.0.1:1/x.parquet')",
    ],
    ids=["IPv4", "IPv6", "a name, in a child", "from Rust"],
)
def test_who_opens_an_internet_socket_is_ended(code: str) -> None:
    assert abs(offline(code).returncode) in (signal.SIGSYS, 256 - signal.SIGSYS)


@needs_filter
def test_the_main_jobs_open_no_internet_socket(tmp_path: Path) -> None:
    done = offline(JOBS, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"""(?i)<(?:script|link|img|iframe)\b[^>]*(?:src|href)\s*=\s*["']?(?!data:)[^"'>]+""", page) == []
    assert re.findall(r"""(?i)@import|url\(\s*["']?https?:""", page) == []

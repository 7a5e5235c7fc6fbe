"""Reading a made-up Kineto file of 1.3 million events, beside unpacking it, msgspec's objects and HTA.

Every figure is of a process of its own on one core: CPU time without imports, and peak memory with them, the median of
three. HTA (`pip install traceinsight`) wants an environment of its own, whose interpreter is given:
`python -m benchmarks.bench_load [PYTHON_OF_HTA]` prints the rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.make_large_trace import EVENTS, write_large_trace
from benchmarks.rows import Row, table

REPEATS = 3

_PROGRAM = """
import json, os, resource, sys, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
{imports}
began = time.process_time()
result = {call}
took_s = time.process_time() - began
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([took_s, peak, {size}]))
"""
_UNPACK = """from isal import igzip
def unpack(path):
    with igzip.open(path) as file:
        return sum(map(len, iter(lambda: file.read(1 << 20), b"")))"""
_HTA = """import logging, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis"""


class Cost(NamedTuple):
    """Median over processes of CPU time, its spread, peak memory and the memory of what was made."""

    cpu_s: float
    spread_s: float
    peak_bytes: float
    result_bytes: float


def cost(path: Path, call: str, imports: str, size: str = "0", python: str = sys.executable) -> Cost:
    """Run `call`, which may use `sys.argv[1]`, the path, in processes of their own."""
    program = _PROGRAM.format(imports=imports, call=call, size=size)
    one = {"POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    runs = []
    for _ in range(REPEATS):
        done = subprocess.run(
            [python, "-c", program, str(path)], check=True, capture_output=True, text=True, env={**os.environ, **one}
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    times, peaks, sizes = zip(*runs, strict=True)
    return Cost(statistics.median(times), max(times) - min(times), statistics.median(peaks), statistics.median(sizes))


def rows(hta_python: str | None = None) -> list[Row]:
    """All rows of group `load`, and of `peers` that beside HTA if `hta_python` is an interpreter that has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_large_trace(Path(folder) / "rank-0.json.gz")
        size = "result.events.estimated_size()"
        unpack = cost(path, "unpack(sys.argv[1])", _UNPACK, "result")
        ours = cost(path, "read_kineto(sys.argv[1])", "from lumos_nb.traces.kineto import read_kineto", size)
        reference = cost(
            path,
            "read_reference(Path(sys.argv[1]))",
            "from pathlib import Path\nfrom tests.reference_kineto import read_reference",
            size,
        )
        call = "TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)"
        hta = cost(path, call, _HTA, python=hta_python) if hta_python else None
        note = (
            f"{EVENTS:,} events, {unpack.result_bytes / 1e6:.0f} MB of JSON, {path.stat().st_size / 1e6:.1f} MB packed"
        )
    found = [
        Row("load/trace to events", ours.cpu_s, "s", "msgspec's objects", reference.cpu_s, ours.spread_s, note=note),
        Row("load/trace to events over unpacking alone", ours.cpu_s / unpack.cpu_s, "x", target="<= 7",
            note=f"unpacking takes {unpack.cpu_s:.3f} s"),
        Row("load/memory beyond the table", (ours.peak_bytes - ours.result_bytes) / 1e6, "MB", "msgspec's objects",
            (reference.peak_bytes - reference.result_bytes) / 1e6, target="<= 450",
            note=f"at the peak, with imports; the table has {ours.result_bytes / 1e6:.0f} MB"),
    ]  # fmt: skip
    if hta:
        found.append(
            Row("peers/loading over HTA", hta.cpu_s / ours.cpu_s, "x", target=">= 15",
                note=f"HTA: {EVENTS / hta.cpu_s:,.0f} events/s, {hta.peak_bytes / 1e6:,.0f} MB at the peak")
        )  # fmt: skip
    return found


if __name__ == "__main__":
    print(table(rows(*sys.argv[1:2])))

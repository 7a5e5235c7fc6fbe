"""Reading a made-up Kineto file of 1.3 million events, beside unpacking it and msgspec's objects.

Every figure is of processes of their own on one core: CPU time without imports, and peak memory with them, the median
of five, in turn. `python -m benchmarks.bench_load` prints the rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.make_large_trace import EVENTS, write_large_trace
from benchmarks.rows import Row, table
from benchmarks.timing import REPEATS, ratio

_READ, _REFERENCE = "read_kineto(sys.argv[1])", "read_reference(Path(sys.argv[1]))"
_SIZE = "result.events.estimated_size()"

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
UNPACK = """from isal import igzip
def unpack(path):
    with igzip.open(path) as file:
        return sum(map(len, iter(lambda: file.read(1 << 20), b"")))"""


def one_cost(path: Path, call: str, imports: str, size: str = "0") -> tuple[float, float, float]:
    """CPU time in s, peak memory and memory of what is made in bytes, of one process.

    `call` may use `sys.argv[1]`, the path, and `size` may use `result`.
    """
    program = _PROGRAM.format(imports=imports, call=call, size=size)
    one = {"POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **one},
    )
    cpu_s, peak, made = json.loads(done.stdout.splitlines()[-1])
    return cpu_s, peak, made


def rows() -> list[Row]:
    """All rows of group `load`."""
    calls = (
        (_READ, "from lumos_nb.traces.kineto import read_kineto", _SIZE),
        ("unpack(sys.argv[1])", UNPACK, "result"),
        (_REFERENCE, "from pathlib import Path\nfrom tests.reference_kineto import read_reference", _SIZE),
        ("len(gzip.decompress(open(sys.argv[1], 'rb').read()))", "import gzip", "result"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_large_trace(Path(folder) / "rank-0.json.gz")
        every = np.array([[one_cost(path, *call) for call in calls] for _ in range(REPEATS)])
        packed = path.stat().st_size
    (ours, unpack, reference, gunzip), peaks = every[..., 0].T, np.median(every[..., 1], axis=0)
    text, over, over_gzip = every[0, 1, 2], ratio(ours, unpack), ratio(ours, gunzip)
    made = every[0, 0, 2]
    note = f"{EVENTS:,} events, {text / 1e6:.0f} MB of JSON, {packed / 1e6:.1f} MB packed"
    return [
        Row("load/trace to events", np.median(ours), "s", "msgspec's objects", np.median(reference),
            ours.max() - ours.min(), note=note),
        Row("load/trace to events over unpacking alone", over.median, "x", noise=over.noise, target="<= 6",
            note=f"unpacking takes {np.median(unpack):.3f} s, by the library that reading uses"),
        Row("load/trace to events over unpacking by Python's gzip", over_gzip.median, "x", noise=over_gzip.noise,
            note=f"which takes {np.median(gunzip):.3f} s"),
        Row("load/memory beyond the table", (peaks[0] - made) / 1e6, "MB", "msgspec's objects",
            (peaks[2] - every[0, 2, 2]) / 1e6, target="<= 450",
            note=f"at the peak, with imports; the table has {made / 1e6:.0f} MB"),
    ]  # fmt: skip


if __name__ == "__main__":
    print(table(rows()))

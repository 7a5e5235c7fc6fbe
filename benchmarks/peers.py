"""Figures beside other programs: `make bench-peers` writes group `peers` of results.json and benchmarks/README.md.

Every peer runs in a process of its own, in build/peers-venv, which has the peers and sees the packages of .venv, so
that both sides of a ratio run in one process, in turn, with the same libraries. A peer that is not installed or
fails has a row that says why, and the others are measured all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.rows import RESULTS, Row, record_timed, table

PYTHON = Path("build/peers-venv/bin/python")
PROGRAMS = {
    "HTA": "benchmarks.peers_hta",
    "networkx": "benchmarks.peers_networkx",
    "llm-analysis": "benchmarks.peers_llm_analysis",
    "TorchRec": "benchmarks.peers_torchrec",
}
LIMIT_S = 600
_ONE_THREAD = dict.fromkeys(
    ("POLARS_MAX_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


def hand_over(rows: Iterable[Row]) -> None:
    """Print the rows of a peer's program for `rows_of` to read."""
    print(msgspec.json.encode(list(rows), enc_hook=float).decode())


def rows_of(peer: str, module: str, python: Path = PYTHON) -> list[Row]:
    """Rows that a program prints, or the one that says why there are none."""
    command, why = [str(python), "-W", "ignore", "-m", module], ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=os.environ | _ONE_THREAD
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])
    except FileNotFoundError:
        why = f"{python} is not there: make bench-peers makes it"
    except subprocess.TimeoutExpired:
        why = f"it took more than {LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[-1][:200]
    except (msgspec.MsgspecError, IndexError) as error:
        why = f"it printed no rows ({error})"
    return [Row(f"peers/{peer}", 0, "figures", note=f"left out: {why}")]


def main() -> None:
    """Measure the peers that are named, or all, and write all down."""
    rows = []
    for peer, module in PROGRAMS.items():
        print(f"{peer} ...", file=sys.stderr, flush=True)
        rows += rows_of(peer, module)
    record_timed(RESULTS, rows)
    print(table(rows))


if __name__ == "__main__":
    main()

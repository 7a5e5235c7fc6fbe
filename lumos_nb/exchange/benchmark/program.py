"""A benchmark as a program: a folder with bench.py, workload.json and README.md, or run in process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lumos_nb import device_activity
from lumos_nb.display import how_many, text_table
from lumos_nb.errors import BenchmarkError, InputError, folder_for, in_the_way, named, shown
from lumos_nb.exchange.benchmark.collectives import DEFAULT_GROUP
from lumos_nb.exchange.benchmark.tables import Workload, workload
from lumos_nb.traces.execution_trace import ExecutionTrace, is_execution_trace
from lumos_nb.traces.files import files_of
from lumos_nb.whole_files import whole

RUNNER = [Path(__file__).with_name(f"{name}.py") for name in ("bench", "binding", "peers")]
RUNNER += [Path(device_activity.__file__)]
"""Modules that make the program; they need each other and torch."""


def generate(
    trace: ExecutionTrace | str | Path, out: str | Path, *, rank: int | Sequence[int] | None = None, **how: Any
) -> Workload:
    """Write a benchmark of a trace into a folder: bench.py, which needs only torch, workload.json and README.md.

    Parameters
    ----------
    trace
        An execution trace, or the path of one; of a folder or archive with one a rank, all ranks' are taken, for as
        many processes.
    out
        The folder; made if it is not there. Files of an older benchmark in it are replaced.
    rank
        Takes that rank's alone, or those ranks'; torch's fake process group plays the others, whose collectives take
        as long as a model says if `cluster` is given.
    **how
        `step`, `profile`, `shrink`, `tables`, `alpha`, `policy`, `cluster`, `calibration`, as `workload` takes them.

    Returns
    -------
    Workload
        What was written (of the first rank); printed, it says what is covered.

    Raises
    ------
    TraceError
        There is no such step, or the file is no execution trace.
    InputError
        `out` is a file, or `shrink` makes no sense.

    Examples
    --------
    >>> generate("runs/gpt", "bench/gpt", rank=0).coverage
    1.0
    """
    folder = named(out)
    if blocked := in_the_way(folder):  # before the work, that it be not for nothing
        raise InputError(f"{blocked}: give a folder.")
    ranks = _ranks_of(trace, rank)
    made = [workload(trace, rank=one, **how) for one in ranks]
    folder_for(folder)
    try:
        for old in (*folder.glob("workload*.json"), *folder.glob("indices*.bin")):
            old.unlink()
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}. Give a folder of your own.") from error
    files = {part.name: _as_program(part) for part in RUNNER} | {"README.md": _readme(made).encode()}
    for one in made:
        one.table["source"]["ranks"] = sorted(other.table["source"]["rank"] for other in made)
        if len(one.indices):
            files[_file_of(one, "indices", "bin", len(made))] = one.indices.astype("<i8").tobytes()
        files[_file_of(one, "workload", "json", len(made))] = msgspec.json.encode(one.table)
    for name, content in files.items():  # the tables after what they need: each says which others belong to it
        with whole(folder / name, InputError) as written:
            written.write_bytes(content)
    return made[0]


def _file_of(one: Workload, what: str, ending: str, ranks: int) -> str:
    """The name of a file of a rank; of the only one without its number."""
    return f"{what}.{ending}" if ranks == 1 else f"{what}-{one.table['source']['rank']}.{ending}"


def _as_program(module: Path) -> bytes:
    """The source of a module as it runs beside the others of the program, without this package."""
    text = module.read_text(encoding="utf-8").replace(f"from {__package__}.", "from ")
    return text.replace("from lumos_nb.", "from ").encode()


def replay(
    trace: ExecutionTrace | str | Path, *, arguments: Sequence[str] = (), rank: int | None = None, **how: Any
) -> pl.DataFrame:
    """Run a trace's operators in this process, as its benchmark would.

    Parameters
    ----------
    trace, rank, how
        As `generate` takes them; of several ranks, one: the first if none is named.
    arguments
        What bench.py is told on its command line: `["--iterations", "20", "--only", "Optimizer.step"]`.

    Returns
    -------
    DataFrame
        One row a timed iteration: `iteration`, `wall_ns`, `cpu_ns`.

    Raises
    ------
    BenchmarkError
        It takes more memory than there is, or no call is chosen; the message says what to do.
    TraceError
        As `generate`.

    Examples
    --------
    >>> replay("runs/gpt", arguments=["--device", "cpu"])["wall_ns"].median()  # doctest: +SKIP
    """
    from lumos_nb.exchange.benchmark.bench import main
    from lumos_nb.exchange.benchmark.binding import Unusable

    if rank is None and not isinstance(trace, ExecutionTrace):
        rank = _ranks_at(trace)[0]
    with tempfile.TemporaryDirectory() as folder:
        generate(trace, folder, rank=rank, **how)
        try:
            times = main(list(arguments), Path(folder))
        except Unusable as error:
            raise BenchmarkError(str(error)) from error
    rows = [(at, *both) for at, both in enumerate(times)]
    columns = {"iteration": pl.Int64(), "wall_ns": pl.Int64(), "cpu_ns": pl.Int64()}
    return pl.DataFrame(rows, schema=columns, orient="row")


def _ranks_of(trace: ExecutionTrace | str | Path, rank: int | Sequence[int] | None) -> Sequence[int | None]:
    """Whose traces are read: the ranks that are named, or else all."""
    if isinstance(rank, Sequence):
        if not rank or len({*rank}) < len(rank):
            raise InputError(f"rank is {shown(rank)}: give ranks, each once.")
        return sorted(rank)
    return [rank] if rank is not None or isinstance(trace, ExecutionTrace) else _ranks_at(trace)


def _ranks_at(path: str | Path) -> Sequence[int | None]:
    """Ranks whose execution traces are there, by the last number in a file's name; None of a single one."""
    with files_of(path) as files:
        found = [file for file in files.traces if is_execution_trace(file)]
        numbers = [int(number) for file in found for number in re.findall(r"\d+", file.name)[-1:]]
    return sorted(set(numbers)) if len(found) > 1 else [None]


README = """# A benchmark made from an execution trace

    python bench.py --iterations 20{launch}

runs the operators of the trace on tensors of the same sizes, strides and lifetimes, and prints the time of an
iteration. It needs torch and nothing else. `python bench.py --help` lists what can be chosen: the device, a part by
name or number, computation or communication alone, host gaps as recorded, and `--profile OUT`, which writes what
lumos_nb's `benchmark.compare` holds against the original. The job has {ranks}, of which {launched} can be
launched; torch's fake process group plays those that are not, and their collectives take the time that the table of a
rank says for them, if any.

The tables are data: operators are looked up in torch's registry by name, and none of it is evaluated. Values are
drawn anew (indices are valid, variances positive); nothing of the original's data is in it. They are {tables}.

## What is covered

~~~
{covered}
~~~
"""


def _readme(made: Sequence[Workload]) -> str:
    ranks = len(made[0].table["groups"][DEFAULT_GROUP])
    launch = f"\n    torchrun --nproc-per-node {len(made)} bench.py" if len(made) > 1 else ""
    tables = ", ".join(f"`{_file_of(one, 'workload', 'json', len(made))}`" for one in made)
    parts = [*map(repr, made), *(text_table(one.notes) for one in made[:1] if len(one.notes))]
    return README.format(
        launch=launch,
        ranks=how_many(ranks, "rank"),
        launched=len(made),
        tables=tables,
        covered="\n\n".join(parts).replace("~~~", "---"),
    )

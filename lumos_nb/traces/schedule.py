"""Schedule files of Primus: when each micro-batch's forward and backward pass ran on one rank of a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.errors import TraceError, named
from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.trace import NOTES, Trace

PASSES = {"forward": ("fwd_start", "fwd_end"), "backward": ("bwd_start", "bwd_end")}
"""Pass -> the keys of its begins and ends, one a micro-batch, in ms since the step began."""

NAME = re.compile(r"(.*pp_rank_)(\d+)(\.json(?:\.gz)?)")
THREAD = 0
MICRO_BATCHES = 2**20
"""More than a step has: the numbers of the messages of two steps keep apart."""

MOST_STAGES = 2**16
LONGEST_MS = LATEST_NS // 10**6
"""Times are sums of the steps before, and have to stay what an int64 of ns holds."""

Iteration = dict[str, Any]


def read_schedule(path: str | Path) -> Trace:
    """Read one rank's schedule file (`pp_rank_<n>.json`), with the files of the other ranks beside it as its clock.

    Each iteration is a step. The file holds computation alone: what stage s sends to the next (forward) or the one
    before (backward) is implied, and noted as such. A send takes no time of its sender; a receive lasts from the op
    before it until its computation begins, so that waiting for the other stage is not taken for work. A step lasts as
    long as the slowest rank says (`total`); each rank's clock is set by the messages that it exchanges in the step.

    Raises
    ------
    TraceError
        The file is damaged, or no iteration in it is whole; the message names what it lacks.
    """
    path = named(path, TraceError)
    rank, files = _files(path)
    if max(files) >= MOST_STAGES:
        raise TraceError(f"{path}: rank {max(files)} is beyond {MOST_STAGES:,} stages; rename the file of that rank.")
    job = {number: _iterations(file) for number, file in files.items()}
    steps, stages = job[rank], max(job) + 1
    rows, begin_ms = [], 0.0
    for step in sorted({step for its in job.values() for step in its}):
        if step in steps:
            zero_ms = begin_ms + _late_ms(job, step, rank)
            if (far_ms := max(begin_ms, abs(zero_ms))) > LONGEST_MS:
                raise TraceError(f"{path}, iteration {step} begins {far_ms:.3g} ms after the first: are these ms?")
            rows += _step_rows(steps[step], step, begin_ms, zero_ms, rank, stages)
        begin_ms += max(its[step]["total"] for its in job.values() if step in its)
    beside = [file.name for file in files.values() if file != path]
    events = pl.DataFrame(rows, schema=["name", "category", "start_ns", "dur_ns", "args"], orient="row")
    events = events.with_row_index("event_id").with_columns(rank=pl.lit(rank), thread=pl.lit(THREAD))
    events = events.with_columns(pl.lit(None).alias(c) for c in EVENTS.columns if c not in events.columns)
    passes = sum(len(it[key]) for it in steps.values() for key, _ in PASSES.values())
    implied = events.filter(pl.col("category") == "collective").height
    notes = [
        ("implied", implied, "sends and receives between stages, which the file leaves to the pipeline's order"),
        ("clock", len(files) - 1, "other ranks' files beside this one, by which steps are timed and clocks set"),
    ]
    return Trace(
        EVENTS.check(events.select(pl.col(c).cast(dtype) for c, dtype in EVENTS.columns.items())),
        {"ranks": [rank], "event_count": passes, "layout": {"pipeline_parallel": stages}, "beside": beside},
        pl.DataFrame(notes, schema=NOTES, orient="row"),
    )


def _files(path: Path) -> tuple[int, dict[int, Path]]:
    """The rank in the file's name, 0 if there is none, and the files of all ranks beside it, by rank."""
    found = NAME.fullmatch(path.name)
    if not found:
        return 0, {0: path}
    beside = [(NAME.fullmatch(file.name), file) for file in sorted(path.parent.iterdir())]
    return int(found[2]), {int(m[2]): file for m, file in beside if m and m[1] == found[1]}


def _late_ms(job: Mapping[int, Mapping[int, Iteration]], step: int, rank: int) -> float:
    """How much later than the first stage's the clock of `rank` began in `step`.

    Each rank counts from its own begin of the step. Between two neighbours the quickest message takes as long one way
    as the other, as in Cristian's (1989) estimate of a remote clock.
    """
    late_ms = 0.0
    for stage in range(1, rank + 1):
        above, here = (job.get(s, {}).get(step) for s in (stage - 1, stage))
        if above and here and above["fwd_end"] and here["bwd_end"]:
            ahead = min(b - a for a, b in zip(above["fwd_end"], here["fwd_start"], strict=False))
            back = min(b - a for a, b in zip(here["bwd_end"], above["bwd_start"], strict=False))
            late_ms += (back - ahead) / 2
    return late_ms


def _iterations(path: Path) -> dict[int, Iteration]:
    """Step -> its times, each checked: as many ends as begins, none before its begin."""
    blocks = Blocks(path)
    try:
        content = json.loads(b"".join(blocks).decode("utf-8-sig"), object_pairs_hook=_once)
        steps = _once([(int(step), it) for step, it in content.items()])
    except (ValueError, RecursionError, AttributeError) as error:
        raise TraceError(f"{path} is no schedule file: {blocks.damage or error}. Record it again.") from error
    for step, it in steps.items():
        for begin, end in PASSES.values():
            try:
                sound = 0 <= it["total"] < 1e12 and len(it[begin]) == len(it[end])
                sound &= all(0 <= b <= e <= it["total"] for b, e in zip(it[begin], it[end], strict=False))
            except (KeyError, TypeError) as error:
                raise TraceError(
                    f"{path}, iteration {step}: {begin}, {end} or total is missing or no number."
                ) from error
            if not sound:
                raise TraceError(f"{path}, iteration {step}: {begin} and {end} are no intervals within its total.")
    if not any(it[begin] for it in steps.values() for begin, _ in PASSES.values()):
        raise TraceError(f"{path} is a schedule file without a pass: nothing can be read from it.")
    return steps


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs; ValueError if a key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise ValueError(f"the key {twice!r} stands in it twice")
    return found


def _step_rows(
    it: Iteration, step: int, begin_ms: float, zero_ms: float, stage: int, stages: int
) -> list[tuple[str, str, int, int, str]]:
    """Rows of one rank and step that began at `begin_ms`, when the rank's clock showed `begin_ms - zero_ms`."""

    def ns(ms: float) -> int:
        return round((zero_ms + ms) * 1e6)

    def message(direction: str, source: int, sink: int, micro_batch: int, way: str) -> str:
        words = {"Collective name": way, "Process Group Name": direction, "Group size": 2}
        words |= {"Seq": step * MICRO_BATCHES + micro_batch, "Src Rank": source, "Dst Rank": sink}
        # No bytes: a send that completes without its receiver.
        return json.dumps(words | {"In msg nelems": 0, "dtype": "Byte"})

    passes = sorted(
        (begin, end, direction, micro_batch)
        for direction, keys in PASSES.items()
        for micro_batch, (begin, end) in enumerate(zip(*(it[key] for key in keys), strict=True))
    )
    begin_ns = round(begin_ms * 1e6)
    rows = [(f"ProfilerStep#{step}", "user_annotation", begin_ns, ns(it["total"]) - begin_ns, "{}")]
    before = begin_ms - zero_ms
    for begin, end, direction, micro_batch in passes:
        ahead = 1 if direction == "forward" else -1
        if 0 <= stage - ahead < stages:
            words = message(direction, stage - ahead, stage, micro_batch, "recv")
            start = min(before, begin)
            rows.append((f"{direction}-recv", "collective", ns(start), ns(begin) - ns(start), words))
        rows.append((direction, "cpu_op", ns(begin), ns(end) - ns(begin), json.dumps({"micro_batch": micro_batch})))
        if 0 <= stage + ahead < stages:
            words = message(direction, stage, stage + ahead, micro_batch, "send")
            rows.append((f"{direction}-send", "collective", ns(end), 0, words))
        before = max(before, end)
    return rows

"""Microbenchmarks as graphs: collectives, chains of compute, and the two beside or behind each other."""

from __future__ import annotations

from lumos_nb.costs.collective_plans import PLANS
from lumos_nb.errors import InputError, is_word, require_flags, require_number, require_whole, shown
from lumos_nb.exchange.chakra.word_graphs import STEP, Build, communication, finished, join_ranks
from lumos_nb.exchange.chakra.words import Meeting
from lumos_nb.graph import Graph

COLLECTIVES = tuple(name for name in PLANS if name != "send_recv")
MOST = {"compute_us": 1e9, "transfer_us": 1e9, "flops": 1e18}
"""Far beyond what any kernel takes, so that sums of it stay within an int64 of ns."""
MOST_TURNS = 1_000_000
"""Ranks times rounds: about two GB of a graph."""


def pattern(
    ranks: int,
    rounds: int = 1,
    *,
    compute_us: float | None = None,
    flops: float | None = None,
    collective: str | None = None,
    size_bytes: int = 0,
    transfer_us: float = 0.0,
    overlapped: bool = True,
) -> Graph:
    """Rounds of one kernel and one collective on every rank.

    Parameters
    ----------
    ranks, rounds
        How many ranks there are, all in one group, and how often they go round.
    compute_us, flops
        Time and work of the kernel of a round; without `compute_us` there is none: the collective alone.
    collective, size_bytes, transfer_us
        The collective of a round, its size in nccl-tests' sense and how long it takes once all ranks have come, which a
        simulator of networks times itself; without `collective` there is none: a chain of compute.
    overlapped
        The next round's kernel does not wait for the collective (gradients), else it does (activations).

    Returns
    -------
    Graph
        Kernels on stream 0, collectives on stream 1 of every rank.

    Raises
    ------
    InputError
        A number or collective that cannot be, or neither a kernel nor a collective.

    Examples
    --------
    >>> from lumos_nb import replay
    >>> both = {"compute_us": 100, "collective": "all_reduce", "size_bytes": 2**20, "transfer_us": 30}
    >>> replay(pattern(8, 4, **both)).makespan_ns, replay(pattern(8, 4, **both, overlapped=False)).makespan_ns
    (430000, 520000)
    """
    require_whole(1, ranks=ranks, rounds=rounds)
    require_whole(0, size_bytes=size_bytes)
    require_flags(overlapped=overlapped)
    _check(ranks * rounds, collective, {"compute_us": compute_us, "flops": flops, "transfer_us": transfer_us})
    build, meeting = Build(), Meeting(collective or "", tuple(range(ranks)), size_bytes)
    last: dict[tuple[int, str], int] = {}
    for turn in range(rounds):
        arrivals, transfers = [], []
        for rank in range(ranks):
            if compute_us is not None:
                about = {"name": "compute", "dur_ns": round(float(compute_us) * 1000), "flops": flops}
                behind = [last.get((rank, "gpu0:1"))] if not overlapped else []
                _follow(build, last, rank, "gpu0:0", "kernel", about, behind)
            if collective is not None:
                comm = communication(meeting, rank, {meeting.ranks: "0"}) | {"comm_seq": turn}
                ready = [last.get((rank, "gpu0:0"))]
                arrive = {"name": "arrival", "dur_ns": 0, **comm}
                arrivals.append(_follow(build, last, rank, "gpu0:1", "event", arrive, ready))
                move = {"name": collective, "dur_ns": round(float(transfer_us) * 1000), **comm}
                transfers.append(_follow(build, last, rank, "gpu0:1", "comm", move, []))
        if collective is not None and ranks > 1:
            join_ranks(build, meeting, {meeting.ranks: "0"}, arrivals, transfers)
    return finished(build)


def _follow(
    build: Build,
    last: dict[tuple[int, str], int],
    rank: int,
    lane: str,
    kind: str,
    about: dict[str, object],
    behind: list[int | None],
) -> int:
    """Add an op behind the last one on its lane and others that it waits for."""
    row = build.add(rank=rank, step=STEP, lane=lane, device=0, kind=kind, phase="other", **about)
    before = last.get((rank, lane))
    build.edges += [(before, row, 0, False, "stream", "exact", True)] if before is not None else []
    build.edges += [(src, row, 0, False, "event", "exact", True) for src in behind if src is not None]
    last[rank, lane] = row
    return row


def _check(turns: int, collective: object, numbers: dict[str, object]) -> None:
    """Raise InputError for what no pattern has, or no memory has room for."""
    if turns > MOST_TURNS:
        raise InputError(f"ranks times rounds is {turns:,}: give fewer, at most {MOST_TURNS:,} in all.")
    for name, value in numbers.items():
        if name == "transfer_us" or value is not None:
            require_number(0, MOST[name], **{name: value})
    if collective is not None and not is_word(collective, COLLECTIVES):
        raise InputError(f"collective={shown(collective)}: give one of {', '.join(COLLECTIVES)}.")
    if numbers["compute_us"] is None and collective is None:
        raise InputError("a pattern of nothing: give compute_us, a collective or both.")

"""A generator learned from graphs: its steps are valid, like those seen and none of them, and follow what is asked."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import GraphError, InputError
from lumos_nb.exchange.chakra import TraceModel, fidelity, validate, write
from lumos_nb.exchange.chakra.ngrams import END, NGrams
from lumos_nb.exchange.chakra.sequence_net import SequenceNet
from lumos_nb.exchange.chakra.word_draws import SEEN, Durations
from lumos_nb.exchange.chakra.words import Step
from lumos_nb.schema import EDGES, OPS

STEPS = (3, 4, 5, 6)


@pytest.fixture(scope="module")
def corpus():
    runs = {}
    for name in ("gpt-ddp", "gpt-pp"):
        recording = ln.Recording.of(ln.load_run(ln.datasets.path(name)))
        runs[name] = [ln.build_graph(recording, step) for step in STEPS]
    return runs


@pytest.fixture(scope="module")
def model(corpus):
    return TraceModel.fit(corpus, epochs=0)


def test_a_sequence_seen_is_certain_and_chances_sum_to_one():
    ngrams = NGrams.fit([["a", "b", "a", "b"]] * 3, order=2)
    # After a: b 6 of 6 times, one kind; before it a, b and the end over 15 tokens in 3 kinds, and a 4th for all others.
    unigram = (6 + 3 * 1 / 4) / 18
    bigram = (6 + unigram) / 7
    assert ngrams.probability(["b", "a"], "b") == pytest.approx((3 + bigram) / 4)
    assert sum(ngrams.probability(["b", "a"], t) for t in ("a", "b", END, "never")) == pytest.approx(1)
    assert ngrams.draw(["a"], np.random.default_rng(0), lambda token: token != "b") in ("a", END)


def test_a_net_learns_to_count():
    """Five times round a loop, then out: a chain of order 3 cannot know when, the net is told how often."""
    sentence = np.array([0, 1, 2] * 5 + [3], np.int64)
    net = SequenceNet.fit([sentence], [0], [4], 4, seed=1, epochs=60)
    bits = -np.log2(net.chances(sentence, 0)).mean()
    chain = NGrams.fit([sentence.tolist()] * 4)
    assert bits < 0.1
    assert bits < -np.log2(chain.chances(sentence.tolist())).mean()
    again = SequenceNet.fit([sentence], [0], [4], 4, seed=1, epochs=60)
    assert np.array_equal(net.chances(sentence, 0), again.chances(sentence, 0))


def test_durations_keep_their_distribution_and_what_ranks_share():
    rng = np.random.default_rng(0)
    steps, places = 200, 20
    shared = rng.standard_normal((steps, 1, places)) + 0 * rng.standard_normal((steps, 2, places))
    log_ns = 9 + 0.5 * (0.8**0.5 * shared + 0.2**0.5 * rng.standard_normal((steps, 2, places)))
    step, rank, nth = np.indices(log_ns.shape).reshape(3, -1)
    seen = {"run": "r", "step": step, "rank": rank.astype(np.int32), "word": 0, "nth": nth, "size_bytes": 0}
    table = pl.DataFrame({**seen, "dur_ns": np.exp(log_ns).ravel().astype(np.int64)}, schema=SEEN)
    durations = Durations.fit(table)
    assert durations.of_place == pytest.approx(0.8, abs=0.05)
    assert durations.of_rank == pytest.approx(0, abs=0.02)
    first, second = durations.draw("r", [([0] * 5000, [0] * 5000)] * 2, rng)
    assert np.corrcoef(np.log(first), np.log(second))[0, 1] == pytest.approx(0.8, abs=0.05)
    assert np.quantile(first, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(table["dur_ns"], [0.1, 0.5, 0.9]), rel=0.05)


def test_equal_seeds_give_equal_graphs_and_others_others(model):
    first, again, other = (model.sample(seed=seed, like="gpt-ddp") for seed in (7, 7, 8))
    assert first.ops.equals(again.ops)
    assert first.edges.equals(again.edges)
    assert first.ops["dur_ns"].to_list() != other.ops["dur_ns"].to_list()


@pytest.mark.parametrize("run", ["gpt-ddp", "gpt-pp"])
def test_a_sample_is_a_step_like_those_seen(model, corpus, run):
    graph = model.sample(seed=3, like=run)
    OPS.check(graph.ops)
    EDGES.check(graph.edges)
    assert (graph.edges["src"] < graph.edges["dst"]).all()  # rows are in a topological order: no cycle
    real = corpus[run][0]
    for kind in ("comm", "join", "launch"):
        assert (graph.ops["kind"] == kind).sum() == (real.ops["kind"] == kind).sum()
    assert len(graph.edges.filter(rule="sync")) == len(real.edges.filter(rule="sync"))
    times = [ln.replay(g).step_ns for g in corpus[run]]
    assert min(times) / 1.5 < ln.replay(graph).step_ns < max(times) * 1.5


def test_ranks_agree_on_what_they_communicate(model):
    comm = model.sample(seed=5, like="gpt-ddp").ops.filter(kind="comm").sort("rank", "comm_seq")
    of_rank = [rows.select("collective", "group", "comm_bytes", "comm_seq") for _, rows in comm.group_by("rank")]
    assert len(of_rank) == 2
    assert of_rank[0].equals(of_rank[1])
    messages = model.sample(seed=5, like="gpt-pp").ops.filter(kind="comm")
    sent = messages.filter(collective="send").select("rank", "peer", "comm_seq", "comm_bytes").rows()
    received = messages.filter(collective="recv").select("peer", "rank", "comm_seq", "comm_bytes").rows()
    assert sorted(sent) == sorted(received)
    assert sent


def test_no_rank_copies_a_step_that_was_seen(model, corpus):
    graph = model.sample(seed=2, like="gpt-ddp")
    drawn = graph.ops.filter(pl.col("dur_ns") > 1000)["dur_ns"]
    for step in corpus["gpt-ddp"]:
        assert drawn.is_in(step.ops["dur_ns"].implode()).mean() < 0.25  # equal to some of that step's 1,896, by chance


def test_twice_the_layers_are_twice_the_ops_of_layers_and_no_more_messages(model):
    once, twice = (model.sample(seed=1, like="gpt-pp", layers=layers).ops for layers in (1.0, 2.0))
    of_layers = [ops.filter(pl.col("layer").is_not_null()) for ops in (once, twice)]
    assert len(of_layers[1]) == 2 * len(of_layers[0])
    assert of_layers[1].group_by("rank").agg(pl.col("layer").n_unique())["layer"].to_list() == [
        2 * n for n in of_layers[0].group_by("rank").agg(pl.col("layer").n_unique())["layer"].to_list()
    ]
    assert (once["kind"] == "comm").sum() == (twice["kind"] == "comm").sum()


def test_larger_messages_take_longer_in_proportion(model):
    once, larger = (model.sample(seed=1, like="gpt-ddp", message_size=m).ops.filter(kind="comm") for m in (1.0, 4.0))
    assert larger["comm_bytes"].sort().to_list() == [4 * size for size in once["comm_bytes"].sort().to_list()]
    assert larger["dur_ns"].sort().to_numpy() == pytest.approx(4 * once["dur_ns"].sort().to_numpy(), rel=1e-6)


def test_more_ranks_join_the_groups_of_data_parallelism(model):
    graph = model.sample(seed=1, like="gpt-ddp", ranks=8)
    assert graph.ops["rank"].n_unique() == 8
    assert set(graph.ops.filter(kind="comm")["group_size"]) == {8}
    joins = graph.ops.filter(kind="join")
    assert joins["name"].unique().to_list() == ["all_reduce of 8 ranks"]
    with pytest.raises(GraphError, match="nothing in common"):
        model.sample(seed=1, like="gpt-pp", ranks=4)


def test_samples_leave_as_chakra_files_that_are_valid(model, tmp_path):
    write(model.sample(seed=1, like="gpt-ddp"), tmp_path / "out")
    assert validate(tmp_path / "out").is_empty()


def test_a_step_read_keeps_every_op_but_joins(corpus):
    step = Step.of(corpus["gpt-pp"][0])
    assert sum(len(s.words) for s in step.sentences.values()) == len(
        corpus["gpt-pp"][0].ops.filter(pl.col("kind") != "join")
    )
    assert len(step.meetings) == 8
    assert {m.collective for m in step.meetings} == {"message"}


def test_bits_are_those_of_steps_not_learned_from(model, corpus):
    recording = ln.Recording.of(ln.load_run(ln.datasets.path("gpt-ddp")))
    held_out = [ln.build_graph(recording, 8)]
    bits = model.bits(held_out, like="gpt-ddp")
    assert len(bits) == 2
    assert (bits["counts_bits"] < bits["markov_bits"]).all()
    assert (bits["markov_bits"] < bits["uniform_bits"]).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        pytest.param({"like": "gpt-tp"}, InputError, "no such run", id="a run not seen"),
        pytest.param({"layers": 0}, InputError, "layers=0", id="no layers"),
        pytest.param({"message_size": float("nan")}, InputError, "message_size=nan", id="no size"),
        pytest.param({"ranks": 3, "like": "gpt-ddp"}, InputError, "multiple", id="a rank and a half"),
        pytest.param({"seed": -1}, InputError, "seed=-1", id="a negative seed"),
        pytest.param({"by": "net"}, InputError, "epochs=0", id="a net that was not fitted"),
    ],
)
def test_impossible_questions_are_refused(model, options, error, words):
    with pytest.raises(error, match=words):
        model.sample(**{"seed": 0, **options})


def test_nothing_is_learned_from_nothing(corpus):
    with pytest.raises(InputError, match="no graphs"):
        TraceModel.fit({}, epochs=0)
    with pytest.raises(InputError, match="given a int"):
        TraceModel.fit([3], epochs=0)  # type: ignore[list-item]
    with pytest.raises(InputError, match="no sequence"):
        TraceModel.fit({"a": []}, epochs=0)


def test_fidelity_tells_a_copy_a_half_and_a_twice_as_slow_step(corpus):
    steps = corpus["gpt-pp"]
    copies = dict(fidelity(steps, steps).select("measure", "value").iter_rows())
    assert copies["nearest step"] == 0
    assert copies["makespan"] == 1
    assert all(copies[f"{n}-grams"] == pytest.approx(0, abs=1e-12) for n in (1, 2, 3))
    assert copies["duration of compute"] == 0
    slow = [ln.whatif.scale(step, pl.lit(True), 2.0) for step in steps]
    twice = dict(fidelity(steps, slow).select("measure", "value").iter_rows())
    assert twice["nearest step"] > 0.3  # log 2 apart from itself, less from a slower step
    assert 1.5 < twice["makespan"] < 2.5
    assert twice["duration of compute"] > 0.2
    assert twice["size of messages"] == 0
    assert twice["3-grams"] == pytest.approx(0, abs=1e-3)


def test_generated_steps_are_as_far_from_real_ones_as_these_from_each_other(model, corpus):
    table = fidelity(corpus["gpt-ddp"], [model.sample(seed=seed, like="gpt-ddp") for seed in (1, 2)])
    value, among = table.filter(measure="nearest step").select("value", "among_real").row(0)
    assert 0.7 * among < value < 3 * among
    with pytest.raises(InputError, match="1 real and 0 generated"):
        fidelity(corpus["gpt-ddp"][:1], [])

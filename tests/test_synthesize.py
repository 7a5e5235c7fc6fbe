"""A generator learned from graphs: its steps are valid, like those seen and none of them, and follow what is asked."""

from __future__ import annotations

import pickle

import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import GraphError, InputError
from lumos_nb.exchange.chakra import TraceModel, fidelity, pattern, validate, write
from lumos_nb.exchange.chakra.ngrams import START, NGrams
from lumos_nb.exchange.chakra.sequence_net import SequenceNet
from lumos_nb.exchange.chakra.speaking import Speaker
from lumos_nb.exchange.chakra.word_draws import Line
from lumos_nb.exchange.chakra.words import Meeting, Step
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


def score(ngrams, sentence, net=None):
    return Speaker(4, 0, ngrams, net).score(sentence)


def test_chances_are_witten_and_bells_and_sum_to_one():
    ngrams = NGrams.fit([[0, 1, 0, 1]] * 3, 3, counting=False, order=2)
    chances = np.full(4, 1 / 4)
    ngrams.smooth(chances, [START, (1, 0), (0, 0)])
    # After 1, 0: 1 always, 3 times. After 0: 1 always, 6 times. Before it 0, 1 and the end over 15 words, in 3 kinds.
    unigram = (6 + 3 * 1 / 4) / 18
    bigram = (6 + unigram) / 7
    assert chances[1] == pytest.approx((3 + bigram) / 4)
    assert chances.sum() == pytest.approx(1)


def test_counting_tells_when_a_loop_ends_and_a_net_learns_it():
    """Five times round a loop, then out: a chain of order 3 cannot know when."""
    sentence = [0, 1, 2] * 5 + [3]
    chain, counting = (NGrams.fit([sentence] * 4, 4, counting=counting) for counting in (False, True))
    net = SequenceNet.fit({(0, tuple(sentence)): 4}, 4, seed=1, epochs=60)
    of_chain, counted, of_net = (
        -np.log2(score(*way)).mean()
        for way in (([chain], sentence), ([chain, counting], sentence), ([], sentence, net))
    )
    assert 2 * counted < of_chain
    assert of_net < 0.1
    again = [SequenceNet.fit({(0, tuple(sentence)): 4}, 4, seed=1, epochs=2) for _ in range(2)]
    assert np.array_equal(*(score([], sentence, net) for net in again))


def test_a_word_that_comes_and_goes_does_not_shift_what_follows():
    with_two = [0, 3, 1, 3, 2]
    counting = NGrams.fit([with_two, [0, 1, 3, 2]], 4, counting=True)
    assert counting.counted == {0, 1, 2}
    assert counting.token(3, 7) == (3, 0)
    assert counting.token(1, 7) == (1, 7)


def test_a_loop_goes_round_no_more_often_than_it_was_seen_to():
    chain = NGrams.fit([[0, 1] * 3, [0, 1] * 2], 2, counting=False)
    for seed in range(20):
        speaker, rng, said = Speaker(2, 0, [chain], None), np.random.default_rng(seed), []
        while (word := speaker.draw(rng)) not in (2, None):
            speaker.say(word)
            said.append(word)
        assert said.count(0) <= 3


def test_the_net_sampled_is_the_net_trained():
    import torch

    net = SequenceNet.fit({(0, (0, 1, 2, 1)): 1}, 4, seed=3, epochs=2)
    gru = torch.nn.GRUCell(24, 64)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    gru.load_state_dict({name: torch.tensor(net.weights[f"memory.{name}_l0"]).float() for name in names})
    w = {name: torch.tensor(weight).float() for name, weight in net.weights.items()}
    given = w["word.weight"][2] + w["count.weight"][1] + w["role.weight"][1]
    state = gru(given, torch.zeros(64))
    chances, _ = net.read(net.begin(), 0, 2, 1)
    expected = torch.softmax(w["out.weight"] @ state + w["out.bias"], -1)
    assert chances == pytest.approx(expected.detach().numpy(), rel=1e-4)


def test_equal_seeds_give_equal_graphs_and_others_others(model):
    first, again, other = (model.sample(seed=seed, like="gpt-ddp") for seed in (7, 7, 8))
    assert first.ops.equals(again.ops)
    assert first.edges.equals(again.edges)
    assert first.ops["dur_ns"].to_list() != other.ops["dur_ns"].to_list()
    kept = pickle.loads(pickle.dumps(model)).sample(seed=7, like="gpt-ddp")
    assert first.ops.equals(kept.ops)


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
    assert graph.report["count"].to_list() == [0]


def test_steps_take_as_long_as_those_seen_on_average(corpus):
    run = corpus["gpt-pp"]
    model = TraceModel.fit(run, epochs=0)
    work = [
        np.mean([g.ops["dur_ns"].sum() for g in graphs]) for graphs in (run, [model.sample(seed=s) for s in range(8)])
    ]
    assert work[1] == pytest.approx(work[0], rel=0.1)  # steps seen scatter by 8 %


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
        assert drawn.is_in(step.ops["dur_ns"].implode()).mean() < 0.5  # ends of a place's range, and chance


def test_twice_the_layers_are_twice_the_ops_of_layers_and_no_more_messages(model):
    once, twice = (model.sample(seed=1, like="gpt-pp", layers=layers).ops for layers in (1.0, 2.0))
    of_layers = [ops.filter(pl.col("layer").is_not_null()) for ops in (once, twice)]
    assert len(of_layers[1]) == 2 * len(of_layers[0])
    assert of_layers[1].group_by("rank").agg(pl.col("layer").n_unique())["layer"].to_list() == [
        2 * n for n in of_layers[0].group_by("rank").agg(pl.col("layer").n_unique())["layer"].to_list()
    ]
    assert (once["kind"] == "comm").sum() == (twice["kind"] == "comm").sum()


def test_larger_messages_take_longer_in_proportion_where_one_size_was_seen(model):
    once, larger = (model.sample(seed=1, like="gpt-pp", message_size=m).ops.filter(kind="comm") for m in (1.0, 4.0))
    assert larger["comm_bytes"].sort().to_list() == [4 * size for size in once["comm_bytes"].sort().to_list()]
    assert larger["dur_ns"].sort().to_numpy() == pytest.approx(4 * once["dur_ns"].sort().to_numpy(), rel=1e-4)


def test_larger_messages_and_more_ranks_keep_the_latency_that_sizes_tell():
    """10 us for each rank but the first, and 2 ns a byte on the wire: an all-reduce of 2 ranks has its size there."""
    sizes = (1_000, 10_000, 100_000)
    steps = [
        pattern(2, 3, collective="all_reduce", size_bytes=size, transfer_us=10 + size * 2 / 1000) for size in sizes
    ]
    model = TraceModel.fit(steps, epochs=0)
    for seed in range(3):
        comm = model.sample(seed=seed, message_size=4).ops.filter(kind="comm")
        expected = 10_000 + 2 * comm["comm_bytes"].to_numpy()
        assert comm["dur_ns"].to_numpy() == pytest.approx(expected, rel=1e-3)
    assert Line(10_000, 2).time_ns(Meeting("all_reduce", (0, 1, 2, 3), 1000)) == 30_000 + 2 * 1500


def test_transfers_of_a_meeting_take_alike_long_on_all_ranks():
    steps = [pattern(2, 3, collective="all_reduce", size_bytes=1000, transfer_us=us) for us in (10, 20, 40, 80)]
    comm = TraceModel.fit(steps, epochs=0).sample(seed=0).ops.filter(kind="comm").sort("comm_seq", "rank")
    times = comm["dur_ns"].to_numpy().reshape(3, 2)
    assert (times[:, 0] == times[:, 1]).all()
    assert len({*times[:, 0]}) == 3


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
    assert sum(len(s.words) for s in step.sentences) == len(corpus["gpt-pp"][0].ops.filter(pl.col("kind") != "join"))
    assert len(step.meetings) == 8
    assert {m.collective for m in step.meetings} == {"message"}


def test_bits_are_those_of_steps_not_learned_from(model):
    recording = ln.Recording.of(ln.load_run(ln.datasets.path("gpt-ddp")))
    held_out = [ln.build_graph(recording, 8)]
    bits = model.bits(held_out, like="gpt-ddp")
    assert len(bits) == 2
    assert (bits["counts_bits"] < bits["markov_bits"]).all()
    assert (bits["markov_bits"] < bits["uniform_bits"]).all()
    unseen = model.bits(held_out)
    other = model.bits([*held_out[:1], pattern(4, compute_us=5)])  # of another job, with other ranks
    assert other.group_by("step").len().sort("step")["len"].to_list() == [len(held_out[0].ops["rank"].unique()), 4]
    assert (unseen["markov_bits"] > bits["markov_bits"]).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        pytest.param({"like": "gpt-tp"}, InputError, "no such run", id="a run not seen"),
        pytest.param({"layers": 0}, InputError, "layers=0", id="no layers"),
        pytest.param({"message_size": float("nan")}, InputError, "message_size=nan", id="no size"),
        pytest.param({"ranks": 3, "like": "gpt-ddp"}, InputError, "multiple", id="a rank and a half"),
        pytest.param({"seed": -1}, InputError, "seed=-1", id="a negative seed"),
        pytest.param({"like": ["gpt-ddp"]}, InputError, "no such run", id="a list of runs"),
        pytest.param({"message_size": 1e30}, InputError, r"message_size=1e\+30", id="no int64 of bytes"),
        pytest.param({"by": "net"}, InputError, "epochs=0", id="a net that was not fitted"),
        pytest.param({"by": "chance"}, InputError, "by='chance'", id="a way that is none"),
    ],
)
def test_impossible_questions_are_refused(model, options, error, words):
    with pytest.raises(error, match=words):
        model.sample(**{"seed": 0, **options})


def test_layers_of_a_step_that_names_none_are_refused():
    model = TraceModel.fit([pattern(2, 3, compute_us=5, collective="all_reduce", size_bytes=1000)], epochs=0)
    with pytest.raises(GraphError, match="layers=2: no op of '' says which layer"):
        model.sample(seed=0, layers=2)


@pytest.mark.parametrize("given", [{"epochs": -1}, {"epochs": 1.5}, {"epochs": 10**30}, {"seed": -1}])
def test_a_fit_in_no_whole_numbers_is_refused(given):
    with pytest.raises(InputError, match=next(iter(given))):
        TraceModel.fit([pattern(2, compute_us=5)], **given)


def test_bits_of_what_is_no_step_and_of_other_ranks_are_refused(model):
    with pytest.raises(InputError, match="no sequence of graphs"):
        model.bits(None)
    with pytest.raises(InputError, match="step 0 has 5 ranks"):
        model.bits([pattern(5, compute_us=5)], like="gpt-ddp")


def test_nothing_is_learned_from_nothing():
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
    assert 0.6 * among < value < 1.5 * among
    with pytest.raises(InputError, match="1 real and 0 generated"):
        fidelity(corpus["gpt-ddp"][:1], [])

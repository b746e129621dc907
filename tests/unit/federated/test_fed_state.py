"""The store of client states: budget, rounds that are whole or not there, damage."""

import multiprocessing
import os
import signal

import numpy as np
import problems as p
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinwire.systems import federated as fl
from thinwire.systems.federated.history import Checkpoint
from thinwire.systems.federated.state import PAGE, ClientStateStore, Pages, StateUnavailable


def vector(value, size=4):
    return {"c": torch.full((size,), float(value))}


def value_of(store, client):
    state = store.get(client)
    return None if state is None else float(state["c"][0])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 99)),
        st.tuples(st.sampled_from(["commit", "durable", "restart"])),
        st.tuples(st.just("prefetch"), st.integers(0, 5)),
        st.tuples(st.just("withdraw"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(ACTIONS, st.sampled_from([0, 40, 10_000]), st.booleans())
@example([("put", 0, 0), ("commit",), ("put", 0, 0), ("durable",), ("restart",)], 10_000, False)
@settings(max_examples=60, deadline=None)
def test_it_is_a_dictionary_with_commits(tmp_path_factory, actions, budget, through):
    """Against a plain dict, whatever the budget; a restart goes back to the last durable versions."""
    folder = tmp_path_factory.mktemp("states")
    store = ClientStateStore(6, folder, budget, write_through=through)
    committed, pending, durable, round = {}, {}, {}, 0
    saved = store.versions.copy()
    store.begin(None, durable=True, clean=True)
    for action, *rest in actions:
        if action == "put":
            pending[rest[0]] = rest[1]
            store.put(rest[0], vector(rest[1]), round)
        elif action == "commit":
            store.prepare()
            store.commit(round)
            committed, pending, round = {**committed, **pending}, {}, round + 1
        elif action == "withdraw":
            store.withdraw(rest)
            pending.pop(rest[0], None)
        elif action == "durable":
            store.flush()
            saved, durable = store.versions.copy(), dict(committed)
            store.durable()
        elif action == "prefetch":
            store.prefetch(rest[0])
        else:
            store.close()
            store = ClientStateStore(6, folder, budget, write_through=through)
            store.begin(torch.from_numpy(saved), durable=True, clean=True)
            committed, pending = dict(durable), {}
        assert {c: value_of(store, c) for c in range(6)} == {c: committed.get(c) for c in range(6)}
        assert store.memory_used <= max(budget, 0)
    store.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE)), max_size=60), st.integers(0, 12_000))
def test_pages_are_a_dictionary_of_bytes_within_a_budget(steps, budget):
    pages, held = Pages(budget), []
    for number, (free, length) in enumerate(steps):
        if free and held:
            stored, expected = held.pop(length % len(held))
            assert pages.get(stored) == expected
            pages.free(stored)
        else:
            data = bytes((number + i) % 256 for i in range(length))
            if pages.room_for(length):
                held.append((pages.put(data), data))
        assert pages.used == sum(stored.cost for stored, _ in held) <= budget
        assert all(pages.get(stored) == expected for stored, expected in held)


def test_without_a_folder_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    store = ClientStateStore(10, memory_bytes=0)
    store.put(3, vector(1), 0)
    store.commit(0)
    assert value_of(store, 3) == 1.0
    assert list(tmp_path.iterdir())
    del store
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_an_error_with_the_clients_name(tmp_path):
    store = ClientStateStore(10, tmp_path, memory_bytes=0)
    store.put(3, vector(1), 0)
    store.commit(0)
    store.path(3, 0).write_bytes(b"not a state")
    with pytest.raises(StateUnavailable, match=r"client 3 has a state of round 0, and .* cannot be read"):
        store.get(3)
    for words, call in (
        ("has a state of round 0, later than 0", lambda: store.put(3, vector(2), 0)),
        ("memory_bytes=-1 must be a whole number of at least 0", lambda: ClientStateStore(1, memory_bytes=-1)),
        ("population=-1 must be a whole number of at least 1", lambda: ClientStateStore(-1)),
        ("client -1 is not one of the 10 clients, 0 to 9", lambda: store.get(-1)),
        ("client 10 is not one of the 10 clients, 0 to 9", lambda: store.get(10)),
        ("client -1 is not one of the 10 clients", lambda: store.put(-1, vector(1), 0)),
        ("client 10 is not one of the 10 clients", lambda: store.put(10, vector(1), 0)),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_other_peoples_files_are_left_alone(tmp_path):
    (tmp_path / "0a").mkdir()
    theirs = [tmp_path / "0a" / "notes.txt", tmp_path / "thesis.tex"]
    for path in theirs:
        path.write_text("mine")
    store = ClientStateStore(20, tmp_path)
    old = store.path(10, 4)
    old.write_bytes(b"of a round that was not committed")
    store.begin(None, durable=False, clean=True)
    assert all(path.exists() for path in theirs)
    assert not old.exists()


DATA = p.population()
OPTIONS = {"rounds": 6, "clients_per_round": 4, "reduction": "exact"}


class Dies(fl.Scaffold):
    """Kills its process after so many clients."""

    left = 0

    def train(self, context, payload, state):
        result = super().train(context, payload, state)
        Dies.left -= 1
        if not Dies.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def killed(folder, after, at_commit, every, budget):
    Dies.__name__, Dies.left = "Scaffold", after
    if at_commit:
        whole, calls = Checkpoint.save, []

        def save(*arguments):
            calls.append(0)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            whole(*arguments)

        Checkpoint.save = save
    store = ClientStateStore(len(DATA), folder / "states", memory_bytes=budget)
    p.train(Dies(lr=0.1, batch_size=4), DATA, **OPTIONS, checkpoint_dir=folder, checkpoint_every=every, state=store)


@pytest.mark.parametrize(
    "after, at_commit, every, budget",
    [(10, False, 1, 0), (19, False, 2, 1 << 20), (10**9, True, 1, 0)],
    ids=["in a round, all on disk", "in a round, every other saved", "before a rename"],
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, after, at_commit, every, budget):
    """B10: kill -9 in the middle of a round; nothing of it is visible afterwards."""
    wanted, straight = p.train(fl.Scaffold(lr=0.1, batch_size=4), DATA, **OPTIONS)
    process = multiprocessing.get_context("fork").Process(
        target=killed, args=(tmp_path, after, at_commit, every, budget)
    )
    process.start()
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
    store = ClientStateStore(len(DATA), tmp_path / "states", memory_bytes=0)
    found, history = p.train(fl.Scaffold(lr=0.1, batch_size=4), DATA, **OPTIONS, checkpoint_dir=tmp_path, state=store)
    assert np.array_equal(found, wanted)
    assert [row.round for row in history.rounds] == list(range(6))
    assert [row.metrics for row in history.rounds] == [row.metrics for row in straight.rounds]
    states = list((tmp_path / "states").glob("*/*"))
    assert len(states) == int((store.versions >= 0).sum())  # one file a client, none of an aborted round


def test_a_finished_run_is_only_read(tmp_path):
    first, _ = p.train(fl.FedDyn(lr=0.1), DATA, rounds=3, clients_per_round=4, checkpoint_dir=tmp_path)
    again, history = p.train(fl.FedDyn(lr=0.1), DATA, rounds=3, clients_per_round=4, checkpoint_dir=tmp_path)
    assert np.array_equal(first, again)
    assert len(history.rounds) == 3
    assert len(list(tmp_path.glob("round-*"))) == 1


def test_a_store_that_was_used_begins_anew():
    store = ClientStateStore(len(DATA), memory_bytes=0)
    first, _ = p.train(fl.Scaffold(lr=0.1), DATA, rounds=3, clients_per_round=4, state=store)
    again, history = p.train(fl.Scaffold(lr=0.1), DATA, rounds=3, clients_per_round=4, state=store)
    assert np.array_equal(first, again)
    assert not any(row.failed for row in history.rounds)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    p.train(fl.Scaffold(lr=0.1), DATA, rounds=1, clients_per_round=4, checkpoint_dir=tmp_path)
    for change, words in [
        ({"algorithm": fl.Scaffold(lr=0.2)}, "lr = 0.1, but this one has 0.2"),
        ({"algorithm": fl.FedAvg(lr=0.1)}, "algorithm = Scaffold, but this one has FedAvg"),
        ({"seed": 5}, "seed = 0"),
        ({"clients_per_round": 3}, "clients_per_round = 4"),
    ]:
        options = {"algorithm": fl.Scaffold(lr=0.1), "clients_per_round": 4, **change}
        with pytest.raises(ValueError, match=words):
            p.train(options.pop("algorithm"), DATA, rounds=2, checkpoint_dir=tmp_path, **options)


def test_history_survives_json():
    trace = fl.ClientTrace((fl.Speed(0.1, up_bits_per_second=1e3), fl.Speed(0.2)))
    evaluated = {"evaluate": lambda net, round: {"norm": net.weight.norm()}, "evaluate_every": 2}
    _, history = p.train(fl.FedAvg(), DATA, rounds=3, clients_per_round=4, devices=2, trace=trace, **evaluated)
    assert fl.History.from_json(history.to_json()) == history
    assert [row.round for row in history.rounds if row.evaluation] == [1, 2]
    assert all(row.client_seconds > 0 for row in history.rounds)
    with pytest.raises(ValueError, match="not a history"):
        fl.History.from_json("{}")


def test_the_clock_of_the_clients_own_devices():
    trace = fl.ClientTrace((fl.Speed(1.0, 0.5, up_bits_per_second=80, down_bits_per_second=160), fl.Speed(2.0)))
    assert trace.round_seconds([(0, 10, 100)], 40) == pytest.approx(10.5 + 8 * 100 / 80 + 8 * 40 / 160)
    assert trace.round_seconds([(0, 10, 100), (3, 30, 100)], 40) == pytest.approx(60.0)  # the slowest client


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"speed": 1}]', '[{"seconds_per_sample": -1}]'])
def test_traces_that_are_none(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json"):
        fl.ClientTrace.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        fl.ClientTrace.read(tmp_path / "none.json")

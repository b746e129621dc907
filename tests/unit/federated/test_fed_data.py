"""Populations: partitions, readers, batches."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems import federated as fl
from thinwire.systems.federated import partition
from thinwire.systems.federated.data import ClientData, batches

LABELS = np.random.default_rng(0).integers(0, 10, size=2000)


def check_partition(parts, samples):
    assert sorted(i for part in parts for i in part.tolist()) == list(range(samples))
    assert all(len(part) for part in parts)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5))
def test_iid(samples, clients, seed):
    if samples < clients:
        with pytest.raises(ValueError, match="too few"):
            partition.iid(samples, clients, seed)
        return
    parts = partition.iid(samples, clients, seed)
    check_partition(parts, samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.floats(0.01, 100), st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_dirichlet_is_a_partition(alpha, clients, least):
    parts = partition.dirichlet(LABELS, clients, alpha, least=least)
    check_partition(parts, len(LABELS))
    assert min(map(len, parts)) >= least


def distance(parts):
    """Mean total variation between a client's classes and the population's."""
    whole = np.bincount(LABELS, minlength=10) / len(LABELS)
    return np.mean([np.abs(np.bincount(LABELS[p], minlength=10) / len(p) - whole).sum() / 2 for p in parts])


def test_alpha_says_how_unlike_clients_are():
    by_alpha = [distance(partition.dirichlet(LABELS, 20, alpha)) for alpha in (0.05, 0.5, 5, 500)]
    assert by_alpha == sorted(by_alpha, reverse=True)
    assert by_alpha[0] > 0.6
    assert by_alpha[-1] < 0.1
    assert distance(partition.iid(len(LABELS), 20)) < 0.2


def test_shards_give_few_classes():
    parts = partition.shards(LABELS, 50, per_client=2)
    check_partition(parts, len(LABELS))
    assert max(len(np.unique(LABELS[part])) for part in parts) <= 4
    assert {len(part) for part in parts} <= {40}


def test_by_key():
    parts, keys = partition.by_key(["ann", "bob", "ann", "cy", "bob"])
    assert keys == ["ann", "bob", "cy"]
    assert [part.tolist() for part in parts] == [[0, 2], [1, 4], [3]]


def test_array_clients():
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    clients = fl.ArrayClients((x, y), [[0, 1, 2], [5, 9]])
    assert isinstance(clients, ClientData)
    assert (len(clients), clients.samples(1)) == (2, 2)
    assert clients.load(1)[1].tolist() == [5, 9]
    for words, make in (
        ("client 0 has no samples", lambda: fl.ArrayClients((x, y), [[]])),
        ("outside 0..9", lambda: fl.ArrayClients((x, y), [[10]])),
        ("same first dimension", lambda: fl.ArrayClients((x, y[:5]), [[0]])),
        ("count=0", lambda: fl.FunctionClients(0, lambda i: None, 1)),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@given(st.integers(1, 30), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 40)), st.integers(0, 3))
def test_batches_are_epochs_in_a_seeded_order(size, epochs, batch, seed):
    data = (torch.arange(size), torch.arange(size) * 2)
    found = list(batches(data, epochs, batch, None, seed))
    assert all(torch.equal(y, 2 * x) for x, y in found)
    order = torch.cat([x for x, _ in found]).view(epochs, size)
    assert all(sorted(row.tolist()) == list(range(size)) for row in order)
    again = list(batches(data, epochs, batch, None, seed))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, again))
    rows = [(data[0][i], data[1][i]) for i in range(size)]  # a map-style data set gives the same batches
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, batches(rows, epochs, batch, None, seed)))
    assert len(list(batches(data, epochs, batch, 2, seed))) == min(2, len(found))


def test_text_by_file(tmp_path):
    for name, size in (("a.py", 100), ("b.py", 9), ("c.py", 21)):
        (tmp_path / name).write_bytes(bytes(i % 251 for i in range(size)))
    clients = fl.TextClients(sorted(tmp_path.glob("*.py")), length=10, most=4)
    assert [path.name for path in clients.paths] == ["a.py", "c.py"]
    assert [clients.samples(i) for i in range(2)] == [4, 2]
    x, y = clients.load(1)
    assert x.shape == y.shape == (2, 10)
    assert x.flatten()[1:].tolist() == y.flatten()[:-1].tolist()
    with pytest.raises(ValueError, match="holds more than 500 bytes"):
        fl.TextClients(sorted(tmp_path.glob("*.py")), length=500)
    with pytest.raises(ValueError, match="cannot be read"):
        fl.TextClients([tmp_path / "none"])


def leaf(folder, users):
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()]}
    content["user_data"] = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    (folder / "all_data_0.json").write_text(json.dumps(content))


def test_leaf(tmp_path):
    leaf(tmp_path, {"f01": ([[0.0, 1.0], [0.5, 0.5]], [3, 4]), "empty": ([], []), "f02": ([[1.0, 1.0]], [61])})
    clients, users = fl.read_leaf(tmp_path)
    assert users == ["f01", "f02"]
    x, y = clients.load(0)
    assert x.dtype == torch.float32
    assert x.tolist() == [[0.0, 1.0], [0.5, 0.5]]
    assert y.tolist() == [3, 4]
    assert clients.samples(1) == 1


@pytest.mark.parametrize(
    "text", ["{", '{"users": ["a"]}', '{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1, 2]}}}']
)
def test_leaf_of_another_form(tmp_path, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(ValueError, match=r"data\.json is not in LEAF's format"):
        fl.read_leaf(tmp_path)
    with pytest.raises(ValueError, match="in LEAF's format"):
        fl.read_leaf(tmp_path / "nothing")


class Table:
    """The two ways in which a data set of Hugging Face is read."""

    column_names = ("writer", "pixels", "label")

    def __init__(self):
        self.rows = [{"writer": w, "pixels": [i, i], "label": i} for i, w in enumerate(["b", "a", "b"])]

    def __getitem__(self, key):
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


def test_hugging_face_by_column():
    def convert(row):
        return torch.tensor(row["pixels"]), torch.tensor(row["label"])

    clients, writers = fl.read_hugging_face(Table(), "writer", convert)
    assert writers == ["b", "a"]
    assert [clients.samples(i) for i in range(2)] == [2, 1]
    assert clients.load(0)[0].tolist() == [[0, 0], [2, 2]]
    with pytest.raises(ValueError, match="no column 'speaker'; it has writer"):
        fl.read_hugging_face(Table(), "speaker", convert)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": torch.ones(2, 3)}, "returned a dict: it must be a tuple of tensors"),
        ((torch.ones(2, 3), np.zeros(2)), "returned a tuple: it must be"),
        (iter([1]), "returned a list_iterator: it must be"),
        ((torch.ones(2, 3), torch.zeros(3).long()), "their first dimensions differ"),
        ((torch.ones(0, 3), torch.zeros(0).long()), "returned no samples"),
        ([], "returned no samples"),
    ],
)
def test_samples_that_give_no_batches_are_one_sentence(given, says):
    clients = fl.FunctionClients(1, lambda i: given, 2)
    with pytest.raises(RuntimeError, match=says):
        fl.simulate(fl.FedAvg(), torch.nn.Linear(3, 2), clients, rounds=1, clients_per_round=1)


def test_models_that_cannot_be_trained_so():
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    clients = fl.FunctionClients(1, lambda i: (torch.ones(1, 2), torch.zeros(1, dtype=torch.long)), 1)
    with pytest.raises(ValueError, match="convert them to one floating dtype"):
        fl.simulate(fl.FedAvg(), mixed, clients, rounds=1, clients_per_round=1)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fl.simulate(fl.FedAvg(), frozen, clients, rounds=1, clients_per_round=1)


def test_shared_and_frozen_parameters_and_samples_of_zero():
    shared = torch.nn.Linear(3, 3)
    net = torch.nn.Sequential(shared, torch.nn.ReLU(), shared, torch.nn.Linear(3, 2).requires_grad_(False))
    frozen = net[3].weight.clone()
    before = shared.weight.clone()
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 0, 1])
    clients = fl.FunctionClients(3, lambda i: (x, y), lambda i: 6 if i else 0)
    history = fl.simulate(fl.FedAvg(), net, clients, rounds=1, clients_per_round=3)
    assert "at least one" in history.rounds[0].failed[0]
    assert torch.equal(net[3].weight, frozen)
    assert not torch.equal(shared.weight, before)
    assert net[0].weight is net[2].weight

"""A server and its nodes without a wire: equal to simulation, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import problems as p
import pytest
import torch

from thinwire.systems import federated as fl
from thinwire.systems.federated.remote import NodeMessage, RemoteNode, RemoteServer

DATA = p.population(count=8)
MAKE = {
    "fedavg": lambda: fl.FedAvg(lr=0.1, batch_size=4),
    "mime": lambda: fl.Mime(lr=0.1, batch_size=4),
    "scaffold": lambda: fl.Scaffold(lr=0.1, batch_size=4),
    "compressed": lambda: fl.Compressed(fl.FedAvg(lr=0.1, batch_size=4), "topk", density=0.5),
}


def federation(make, **changes):
    options = {"rounds": 4, "clients_per_round": 5, "loss": p.loss, "reduction": "exact", **changes}
    return fl.Federation(make(), p.model(), p.as_clients(DATA), **options)


def carried(message):
    """As a wire would: other memory, and plain JSON."""
    return NodeMessage({k: x.clone() for k, x in message.tensors.items()}, json.loads(json.dumps(dict(message.facts))))


def deploy(make, folder, parts, spoil=lambda server, node, answer: answer, **changes):
    """All rounds, each answer by a new node object, as if its process had ended meanwhile."""
    made = federation(make, **changes)
    build = lambda node: RemoteNode(federation(make, **changes), parts[node], folder / str(node))  # noqa: E731
    hosts = {node: dict(build(node).describe().facts["clients"]) for node in parts}
    server = RemoteServer(made, hosts)
    while not server.done:
        answers = {}
        for node, message in server.outgoing().items():
            answer = spoil(server, node, build(node).answer(carried(message)))
            if answer is not None:
                answers[node] = answer if isinstance(answer, str) else carried(answer)
        server.incoming(answers)
    server.finish()
    return made.model.weight.detach().numpy().reshape(-1).copy(), server.history


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("parts", [{7: range(8)}, {1: [0, 3, 5], 9: [1, 2], 4: [4, 6, 7]}], ids=["one", "three"])
def test_a_deployment_is_the_simulation_bit_for_bit(make, parts, tmp_path):
    wanted, straight = p.train(make(), DATA, rounds=4, clients_per_round=5, reduction="exact")
    found, history = deploy(make, tmp_path, parts)
    assert np.array_equal(found, wanted)
    for ours, theirs in zip(history.rounds, straight.rounds, strict=True):
        assert (ours.clients, ours.samples, ours.client_bytes) == (theirs.clients, theirs.samples, theirs.client_bytes)
        assert ours.metrics == pytest.approx(theirs.metrics)


def replaced(answer, **tensors):
    return dataclasses.replace(answer, tensors={**answer.tensors, **tensors})


def with_facts(answer, **facts):
    return dataclasses.replace(answer, facts={**answer.facts, **facts})


SPOILED = {
    "nan": (lambda a: replaced(a, delta=a.tensors["delta"] * float("nan")), "not finite"),
    "shape": (lambda a: replaced(a, delta=a.tensors["delta"][:2]), r"the shape \(2,\), but \(4,\) was expected"),
    "dtype": (lambda a: replaced(a, delta=a.tensors["delta"].float()), "float32"),
    "another name": (lambda a: replaced(a, gamma=a.tensors["delta"]), "'gamma', which nobody asked for"),
    "unknown client": (
        lambda a: with_facts(a, seconds=[[99, 3, 0.1], *a.facts["seconds"]]),
        "client 99, which it was not asked for",
    ),
    "unknown failure": (lambda a: with_facts(a, failed={"77": "x"}), "client 77"),
    "fewer clients": (lambda a: with_facts(a, seconds=a.facts["seconds"][1:]), "reports"),
    "no facts": (lambda a: NodeMessage(a.tensors, {}), "not in thinwire's format"),
    "facts of another kind": (lambda a: with_facts(a, failed=[1]), "not in thinwire's format"),
    "a collected value": (lambda a: replaced(a, **{"collected/0/x": torch.ones(1)}), "nobody asked for"),
    "an error": (lambda a: NodeMessage(facts={"error": "disk full"}), "disk full"),
    "a broken message": (lambda a: "error 4: no such app", "no such app"),
    "silence": (lambda a: None, "no answer in time"),
}


@pytest.mark.parametrize("case", SPOILED.values(), ids=SPOILED)
def test_what_is_refused_is_reported_and_the_mean_is_over_the_rest(case, tmp_path):
    spoil, words = case
    parts = {1: [0, 1, 2], 2: [3, 4, 5, 6, 7]}
    found, history = deploy(
        MAKE["fedavg"],
        tmp_path,
        parts,
        lambda server, node, answer: spoil(answer) if node == 1 else answer,
        clients_per_round=8,
        rounds=1,
        reduction="fp64",
    )
    (row,) = history.rounds
    assert sorted(row.failed) == [0, 1, 2]
    assert all(why.startswith("node 1: ") for why in row.failed.values())
    assert re.search(words, row.failed[0])

    class Only(fl.FedAvg):
        def train(self, context, payload, state):
            if context.client < 3:
                raise ValueError("gone")
            return super().train(context, payload, state)

    wanted, _ = p.train(Only(lr=0.1, batch_size=4), DATA, rounds=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_the_state_of_a_refused_answer_does_not_count(tmp_path):
    """The server did not use it, so the client must not have moved either."""

    def spoil(server, node, answer):
        return "lost on the way" if node == 1 and server.round == 1 else answer

    class Skips(fl.Scaffold):
        def train(self, context, payload, state):
            if context.client < 3 and context.round == 1:
                raise ValueError("lost on the way")
            return super().train(context, payload, state)

    parts = {1: [0, 1, 2], 2: [3, 4, 5, 6, 7]}
    found, _ = deploy(MAKE["scaffold"], tmp_path, parts, spoil, clients_per_round=8)
    wanted, _ = p.train(Skips(lr=0.1, batch_size=4), DATA, rounds=4, clients_per_round=8, reduction="exact")
    assert np.array_equal(found, wanted)


def test_a_node_with_other_code_says_so(tmp_path):
    server = RemoteServer(federation(MAKE["fedavg"]), {1: dict.fromkeys(range(8), 3)})
    other = RemoteNode(federation(lambda: fl.FedAvg(lr=0.2, batch_size=4)), range(8), tmp_path)
    (message,) = server.outgoing().values()
    assert "has lr = 0.2, the server's 0.1" in other.answer(message).facts["error"]
    few = RemoteNode(federation(MAKE["fedavg"]), [0], tmp_path)
    assert "is not hosted here" in few.answer(message).facts["error"]


@pytest.mark.parametrize(
    "hosts, words",
    [
        ({1: {0: 3}, 2: {0: 3}}, "nodes 1 and 2 both host client 0"),
        ({1: {8: 3}}, "node 1 hosts client 8, but there are only 0..7"),
        ({1: {0: 0}}, "0 samples"),
        ({}, "start more nodes"),
    ],
)
def test_hosts_that_do_not_fit(hosts, words):
    with pytest.raises(ValueError, match=words):
        RemoteServer(federation(MAKE["fedavg"]), hosts)
    with pytest.raises(ValueError, match="to host client 8"):
        RemoteNode(federation(MAKE["fedavg"]), [8], "nowhere")


def test_clients_that_nobody_hosts_are_named(tmp_path):
    _, history = deploy(MAKE["fedavg"], tmp_path, {1: [0, 1, 2, 3]}, clients_per_round=8, rounds=1)
    assert history.rounds[0].failed == dict.fromkeys([4, 5, 6, 7], "no node hosts it")

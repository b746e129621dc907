"""Federated runs on real ranks: the same bits as in one process, states that follow their clients, ranks that die."""

import os
import re
import resource
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from spawned import run
from thinwire.systems import federated as fl
from thinwire.systems.federated.backends import AllReduceBackend, Planner
from thinwire.systems.federated.device import RoundTask
from thinwire.systems.federated.schedule import Assignment

pytestmark = pytest.mark.dist
ALGORITHMS = {
    "fedavg": lambda: fl.FedAvg(lr=0.1, batch_size=4),
    "fednova": lambda: fl.FedNova(lr=0.1, batch_size=4, epochs=2),
    "mime": lambda: fl.Mime(lr=0.1, batch_size=4),
    "scaffold": lambda: fl.Scaffold(lr=0.1, batch_size=4),
    "feddyn": lambda: fl.FedDyn(lr=0.1, batch_size=4),
    "compressed": lambda: fl.Compressed(fl.FedOpt(lr=0.1, batch_size=4, server_lr=0.1), "topk", density=0.3),
}
COUNT = 11


class Collecting(fl.FedAvg):
    """Sends every client's change, and fails for one client."""

    operators = {"delta": fl.COLLECT}  # noqa: RUF012

    def program(self, round):
        rows = (yield fl.RoundRequest({"theta": self.theta})).collected
        self.theta = self.theta + torch.stack([row["delta"] for row in rows.values()]).median(0).values

    def train(self, context, payload, state):
        if context.client == 3:
            raise ValueError("no")
        return fl.ClientResult({}, collect=super().train(context, payload, state).reduce)


ALGORITHMS["collect"] = lambda: Collecting(lr=0.1, batch_size=4)


def clients():
    def load(i):
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(4 + i, 5, generator=draw)
        return x, (x.sum(1) > 0.1 * i).long()

    return fl.FunctionClients(COUNT, load, lambda i: 4 + i)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))


def train(name, **options):
    model = net()
    options = {"rounds": 4, "clients_per_round": 7, "reduction": "exact", **options}
    algorithm = fl.FedAvg(lr=0.2, batch_size=4) if name == "faster" else ALGORITHMS[name]()
    history = fl.simulate(algorithm, model, clients(), **options)
    weights = torch.cat([x.detach().double().reshape(-1) for x in model.state_dict().values()]).numpy()
    return weights, history


def _all(rank, size, names, folder, options):
    torch.manual_seed(rank)
    return {name: train(name, state=f"{folder}/{name}", **options) for name in names}


@pytest.mark.parametrize(
    "size, options",
    [(2, {"schedule": "pull"}), (3, {"schedule": "lpt", "warmup_rounds": 1})],
)
def test_ranks_give_the_bits_of_one_process(size, options, tmp_path):
    """B5, B12, B16: every algorithm; which rank trains a client differs from round to round."""
    results = run(_all, size, list(ALGORITHMS), str(tmp_path), options)
    for name in ALGORITHMS:
        wanted, alone = train(name)
        for rank in range(size):
            found, history = results[rank][name]
            assert np.array_equal(found, wanted), name
            for ours, theirs in zip(history.rounds, alone.rounds, strict=True):
                assert (ours.clients, ours.samples, ours.failed) == (theirs.clients, theirs.samples, theirs.failed)
                assert ours.metrics == pytest.approx(theirs.metrics)
                assert ours.client_bytes == theirs.client_bytes


def _bytes(rank, size, cohort):
    history = train("fedavg", clients_per_round=cohort, schedule="equal")[1]
    return [(row.bytes_up, row.control_bytes) for row in history.rounds]


def test_the_large_exchange_does_not_grow_with_the_cohort():
    few, many = (run(_bytes, 2, cohort)[0] for cohort in (3, 11))
    elements = sum(x.numel() for x in net().state_dict().values()) - 1  # but the counter of batches
    elements += 2  # whether mean and variance are finite
    assert {up for up, _ in few} == {up for up, _ in many} == {8 * elements}  # a ring of 2: once the buffer
    assert few[0][1] < many[0][1]


def _killed(rank, size, folder):
    class Dies(fl.Scaffold):
        seen = 0

        def train(self, context, payload, state):
            Dies.seen += 1
            if rank == 1 and context.round == 2:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train(context, payload, state)

    Dies.__name__ = "Scaffold"
    try:
        fl.simulate(
            Dies(lr=0.1, batch_size=4), net(), clients(), rounds=4, clients_per_round=7, reduction="exact",
            checkpoint_dir=folder, schedule="equal", timeout=3,
        )  # fmt: skip
    except fl.DeviceLost as error:
        return str(error)
    return None


def _resumed(rank, size, folder, name="scaffold"):
    return train(name, checkpoint_dir=folder)


def test_a_rank_that_dies_is_an_error_and_the_run_goes_on(tmp_path):
    words, _ = run(_killed, 2, str(tmp_path), expect_exit={1: -signal.SIGKILL})
    assert "another rank was lost in round 2" in words
    assert "checkpoint_dir=" in words
    wanted, _ = train("scaffold")
    for found, history in run(_resumed, 2, str(tmp_path)):
        assert np.array_equal(found, wanted)
        assert [row.round for row in history.rounds] == [0, 1, 2, 3]
    alone, _ = train("scaffold", checkpoint_dir=str(tmp_path))  # what ranks wrote, one process reads
    assert np.array_equal(alone, wanted)


def test_a_store_whose_host_is_frozen_is_an_error_where_ranks_pull(monkeypatch):
    """A store's own limit is none for ``add``: its host's kernel has taken the question, and nobody answers."""
    frozen = SimpleNamespace(add=lambda key, number: threading.Event().wait(20.0))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: SimpleNamespace(clone=lambda: frozen))
    limit = timedelta(seconds=0.2)
    plan = Assignment((), tuple(range(7)))
    answers = iter([b"1", plan.to_json().encode()])  # rank 0's: the number of the run, and who trains what
    ranks = SimpleNamespace(rank=1, gather=lambda message: [next(answers)], timeout=limit)
    device = SimpleNamespace(empty=dict, clients=SimpleNamespace(samples=lambda client: 1))
    back = AllReduceBackend(device, Planner("pull", 2, 0), ranks)
    task = RoundTask(3, fl.RoundRequest({}), 7, 7)
    with pytest.raises(fl.DeviceLost, match="another rank was lost in round 3"):
        back.visit(task, range(7))


def _full(rank, size, folder, who):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_round(record):
        if rank == who and record.round == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, limit[1]))

    try:
        train("fedavg", checkpoint_dir=folder, on_round=on_round)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return None


def test_a_checkpoint_that_one_rank_cannot_write_is_an_error_on_all_and_the_run_goes_on(tmp_path):
    for said in run(_full, 2, str(tmp_path), 0):
        assert re.fullmatch(rf"no checkpoint of round 2 was written in {tmp_path}: rank 0: .*File too large: .*", said)
    assert not list(tmp_path.glob(".partial*"))
    wanted, _ = train("fedavg")
    for found, _ in run(_resumed, 2, str(tmp_path), "fedavg"):
        assert np.array_equal(found, wanted)


REFUSED = [  # name and options, those of each rank where they differ
    ("fedavg", {"seed": (0, 1)}, "seed: 0 against 1"),
    ("fedavg", {"clients_per_round": (3, 4)}, "clients_per_round: 3 against 4"),
    ("fedavg", {"reduction": ("fp64", "exact")}, "reduction"),
    (("fedavg", "faster"), {}, "lr: 0.1 against 0.2"),
    ("fedavg", {"devices": 3}, "each rank is a device"),
    ("fedavg", {"speeds": [fl.Speed(1.0)] * 2}, "emulated devices"),
    ("fedavg", {"faults": {(0, 0): 1.0}}, "emulated devices"),
    ("scaffold", {}, "a shared folder"),
]


def _refused(rank, size):
    def mine(value):
        return value[rank] if isinstance(value, tuple) else value

    for name, options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            train(mine(name), **{key: mine(value) for key, value in options.items()})


def test_refusals_on_ranks_also_of_ranks_that_differ():
    run(_refused, 2)

"""Ranks of the bench on GPUs, as far as a machine without one can tell; ``make gpu`` and docs/gpu.md have the rest."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.tools.bench.device import check_device, place_of, prepare_rank
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.race import RaceSpec
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.lab.cluster import Cluster
from thinwire.tools.lab.ranks import rank_environment


@pytest.fixture
def cards(monkeypatch):
    """A machine with that many GPUs; returns the numbers of those that ranks have taken."""

    def made(number, rank, ranks):
        taken = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "a card")
        monkeypatch.setattr(os, "environ", {"RANK": str(rank), "WORLD_SIZE": str(ranks)})
        return taken

    return made


def test_ranks_that_share_a_card_are_hosts_of_their_own_to_nccl(cards):
    hosts = []
    for rank in range(4):
        taken = cards(1, rank, 4)
        assert prepare_rank("cuda") == "cpu:gloo,cuda:nccl"
        assert taken == [0]
        assert os.environ["NCCL_NET"] == "Socket"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
        hosts.append(os.environ["NCCL_HOSTID"])
    assert len(set(hosts)) == 4
    assert place_of("cuda", 4) == ", 4 ranks on 1 a card"
    os.environ["NCCL_SOCKET_IFNAME"] = "=eth0"  # the lab's stays
    prepare_rank("cuda")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_with_a_card_for_each_rank_only_the_lab_decides_about_nccl(cards):
    taken = cards(4, 3, 4)
    os.environ |= rank_environment({}, Cluster(4, 2), 3, master_address="10.0.0.1", master_port=29500, interface="eth0")
    before = dict(os.environ)
    prepare_rank("cuda")
    assert taken == [3]
    assert os.environ == before
    assert before["NCCL_HOSTID"] == "thinwire node 1"  # that of rank 2 too
    assert place_of("cuda", 4) == ", a card"


def test_times_of_other_cards_are_not_taken_for_this_ones(cards, monkeypatch):
    keys = set()
    for number, name in ((1, "a card"), (2, "a card"), (1, "another card")):
        cards(number, 0, 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0, name=name: name)
        keys.add(RaceSpec("mlp", parse_rows("ssgd"), device="cuda").key)
    assert len(keys) == 3
    assert RaceSpec("mlp", parse_rows("ssgd")).key not in keys


@pytest.mark.parametrize(
    "name,there,nccl,sentence",
    [
        ("gpu", True, True, "--device gpu must be cpu or cuda"),
        ("cuda", False, True, "torch finds no GPU here"),
        ("cuda", True, False, "built without NCCL"),
    ],
)
def test_refused(name, there, nccl, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(ValueError, match=sentence):
        check_device(name)


@pytest.mark.parametrize("model", ["chargpt:layers=1:width=16:heads=1", "mlp:width=16:layers=1", "digits", "teacher"])
def test_a_batch_is_put_beside_the_model(model):
    """On the meta device, as this machine may have no other: a batch left on the CPU would raise."""
    workload = build_model(model, device=torch.device("meta"))
    assert workload.loss(workload.model, 0, 0).device.type == "meta"
    if workload.evaluate is not None:
        assert workload.evaluate(workload.model, 0, 0).device.type == "meta"


def on_another_device():
    net = nn.Linear(2, 2, device="meta")
    return net, lambda model, step, rank: model(torch.zeros(1, 2)).sum()


def test_a_model_of_the_users_stays_on_the_cpu_until_it_is_moved(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    with pytest.raises(ValueError, match="is on meta: leave it on the CPU, and say --device"):
        build_model("test_device:on_another_device", device=torch.device("cpu"))

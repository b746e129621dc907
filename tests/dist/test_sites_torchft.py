"""Sites of two shards under torchft: one is killed and comes back, or loses a rank and ends; the other goes on."""

import importlib.util
import itertools
import math
import random
import time

import cases
import pytest
import torch
from site_cases import SHARDS, Sites

import thinwire as tw
from spawned import run

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft"
    ),
]
OPTIONS = {
    "diloco": {"method": "diloco", "sync_every": 4, "outer": tw.Nesterov(momentum=0.5), "codec": "int8"},
    "local": {"method": "local", "sync_every": 3, "codec": tw.TopK(density=0.2), "start_compression_step": 0},
}


def furthest(sites):
    return max(sites.round_of(site) for site, rank in sites.running if not rank)


def shared(sites):
    """Return the rounds that both sites have made with one another."""
    each = itertools.product(range(2), range(SHARDS))
    return set.intersection(*({e["round"] for e in sites.events(*one, of_all=True) if e["size"] == 2} for one in each))


def together(sites, count=3):
    """Wait for rounds that both make with one another; who has come back may skip some of the other's."""
    wanted = len(shared(sites)) + count
    sites.wait(lambda: len(shared(sites)) >= wanted)


def check(sites):
    """Weights are equal at both sites after each round of both, shard by shard, and at the end. Return those rounds."""
    for rank in range(SHARDS):
        ours, theirs = (
            {e["round"]: e for e in sites.events(site, rank, of_all=True) if e["size"] == 2} for site in range(2)
        )
        both = ours.keys() & theirs.keys()
        assert all(ours[k]["weights"] == theirs[k]["weights"] for k in both), (ours, theirs)
        assert all(ours[k]["adam"] == theirs[k]["adam"] for k in both)  # the optimizer's state came, too
        first, second = (torch.load(sites.folder / f"{site}{rank}.pt") for site in range(2))
        assert max(float((a - b).abs().max()) for a, b in zip(first, second) if a.numel()) <= 1e-6
        assert all(math.isfinite(e["loss"] or 0.0) for e in ours.values())
    return sorted(shared(sites))


def check_outer(sites, momentum=0.0, lr=1.0):
    """What the sites brought to each round, and what they had kept back before, is in the outer weights after it.

    One site's own weights are its outer ones. A round that somebody who is gone has not written down is left out.
    Return how many of two sites were checked.
    """
    checked = 0
    for rank in range(SHARDS):
        both = [{e["round"]: e for e in sites.events(site, rank, of_all=True)} for site in range(2)]
        phi, velocity, before = None, 0.0, 1
        for number in sorted(both[0].keys() | both[1].keys()):
            rows = [events[number] for events in both if number in events]
            size, outer = rows[0]["size"], rows[0]["outer"]
            if before == 1:
                phi = rows[0]["brought"]
            if size == 2 and len(rows) == 2:
                change = sum(phi - e["brought"] + e["owed"] - e["owes"] for e in rows) / 2
                velocity = momentum * velocity + change
                wanted = phi - lr * (change + momentum * velocity)
                assert abs(outer - wanted) <= 1e-4, f"rank {rank}, round {number}: {outer}, not {wanted}: {rows}"
                checked += 1
            elif size == 2:  # what the other one brought follows from what came of it
                change = ((phi - outer) / lr - momentum**2 * velocity) / (1 + momentum)
                velocity = momentum * velocity + change
            else:
                assert outer == rows[0]["brought"]
            phi, before = outer, size
    return checked


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name != "local")) for name in OPTIONS]
)
def test_a_site_that_is_killed_comes_back_with_its_shards(tmp_path, method):
    with Sites(tmp_path, 2, OPTIONS[method]) as sites:
        together(sites)
        died = furthest(sites)
        sites.kill(1)
        sites.wait(lambda: sites.round_of(0) >= died + 3)
        alone = furthest(sites)
        sites.start(1)
        together(sites)
        sites.finish(furthest(sites) + 4)
        rounds = check(sites)
        if method == "local":
            assert check_outer(sites) >= 8
        losses = [e["loss"] for e in sites.events(0, 0) if e["loss"] is not None]
        assert {e["size"] for e in sites.events(0, 0)} == {1, 2}
    assert [k for k in rounds if k <= died]
    assert len([k for k in rounds if k > alone]) >= 4
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "quorum", "vote"])
def test_a_site_that_loses_a_rank_ends_with_a_sentence_and_starts_again(tmp_path, where):
    """In a quorum that lacks a rank its site, and the other with it, wait until the quorum is late."""
    outer = {"momentum": 0.5, "lr": 0.7}
    plain = {"method": "diloco", "sync_every": 4, "outer": tw.Nesterov(**outer), "codec": None}
    with Sites(tmp_path, 1, plain, patience=8) as sites:
        sites.start(1, dies=(where, 4))
        sites.wait(lambda: sites.running[1, 0].exitcode is not None)
        assert sites.running[1, 0].exitcode == 1
        assert "another rank of this site has stopped" in sites.said(1, 0)
        lost = furthest(sites)
        sites.wait(lambda: sites.round_of(0) >= lost + 2)
        sites.start(1)
        together(sites)
        sites.finish(furthest(sites) + 3)
        assert [k for k in check(sites) if k > lost]
        assert check_outer(sites, **outer) >= 8  # momentum too has come through all quorums


@pytest.mark.slow
def test_a_site_of_another_number_of_ranks_is_refused(tmp_path):
    with Sites(tmp_path, 1, OPTIONS["local"]) as sites:
        sites.wait(lambda: sites.round_of(0) >= 2)
        sites.start(1, shards=1)
        sites.wait(lambda: sites.running[1, 0].exitcode is not None)
        assert "sharded differently, this one whole, that which it is to go on from 0of2" in sites.said(1, 0)
        alone = furthest(sites)
        sites.wait(lambda: sites.round_of(0) >= alone + 2)


def _refused(rank, size):
    from datetime import timedelta

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=None, state_dict=None, min_replica_size=1,
        use_async_quorum=False, rank=0, world_size=2, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse.address(), replica_id="site0", hostname="127.0.0.1",
    )  # fmt: skip
    attach = tw.adapters.torchft.attach
    said = [
        cases.said(lambda: attach(model, optimizer, "ssgd", manager=manager)),
        cases.said(lambda: attach(model, optimizer, "local", sync_every=4, manager=manager)),
        cases.said(lambda: attach(model, optimizer, "local", sync_every=4, inside="ssgd", manager=manager)),
    ]
    manager.shutdown(wait=False)
    lighthouse.shutdown()
    return said


def test_what_does_not_work_with_shards_says_so():
    ((gradients, group, inside),) = run(_refused, 1, fresh=True)
    assert 'average its weights between sites, by "local" or "diloco"' in gradients
    assert "sharded over 1 ranks, but the replica group has 2" in group
    assert "leave out inside=" in inside


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", [*OPTIONS])
def test_random_deaths_of_ranks(tmp_path, method):
    """Eight times, at any time, a site loses one of its ranks or both; the rest of it ends by itself."""
    draw = random.Random(method)
    with Sites(tmp_path, 2, OPTIONS[method]) as sites:
        together(sites)
        for _ in range(8):
            time.sleep(draw.random())
            site = draw.randrange(2)
            for rank in draw.sample(range(SHARDS), draw.randint(1, SHARDS)):
                sites.running[site, rank].kill()
            sites.wait(lambda site=site: all(sites.running[site, rank].exitcode for rank in range(SHARDS)))
            alone = furthest(sites)
            sites.wait(lambda site=site, alone=alone: sites.round_of(1 - site) >= alone + 2)
            sites.start(site)
            together(sites, 2)
        sites.finish(furthest(sites) + 4)
        assert len(check(sites)) >= 3 + 8 * 2

"""FSDP2 as two replicas of two shards on real ranks: plain HSDP bit for bit, and every method against LocalWorld."""

import copy
import warnings
from unittest.mock import patch

import cases
import fsdp2_cases as two_by_two
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_cases import GROUPS, WIDTH, Net, Oracle, place, rows, sharded, step_of, train, whole
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

METHODS = [
    ("cast", {"dtype": "int8"}),
    ("acp", {"rank": 2, "compress": "matrices"}),
]
MORE = [
    ("ssgd", {"deterministic": True}),
    ("cast", {}),
    ("topk", {"density": 0.1}),
    ("powersgd", {"rank": 2, "compress": "matrices"}),
    ("gtopk", {"density": 0.1}),
    ("oktopk", {"density": 0.1}),
    ("signsgd", {}),
    ("onebit", {}),
    ("qsgd", {}),
    ("terngrad", {}),
]


def _label(case):
    return case[0] + "".join(f" {key}={value}" for key, value in case[1].items())


ACP = {"rank": 2, "compress": "matrices"}


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- on four ranks --------------------------------------------------------------------------------------------------


def _exact(rank, mesh):
    """Plain HSDP, ssgd on its mesh, ssgd with the replicas given: the same weights; other copies start differently."""
    plain = sharded(mesh)
    wanted, found = train(plain, rank, 5), {}
    weights = whole(plain)
    for label, on, options in (
        ("native", mesh, {}),
        ("given", mesh["shard"], {"replicas": mesh["replicate"]}),
    ):
        net = sharded(on, Net(seed=1 + 7 * place()[0]))  # the second replica must be brought to the first
        sync = tw.adapters.fsdp2.attach(net, "ssgd", **options)
        losses = train(net, rank, 5)
        stats = sync.stats()
        found[label] = (
            _same(weights, whole(net)),
            all(map(torch.equal, wanted, losses)),
            bool(net.shift.eq(1.0).all()),
            stats.bytes_sent == stats.dense_bytes > 0,
            stats.steps,
            stats.world_size,
        )
        sync.close()
        if label == "native":  # FSDP2 averages over the replicas itself again
            found["detached"] = _same(_one_more(plain, rank), _one_more(net, rank))
    return found


def _one_more(net, rank):
    net.zero_grad()
    train(net, rank, 1, start=50)
    return whole(net)


def _methods(rank, mesh, methods):
    """Every gradient of four steps against the oracle's, and the residuals after them."""
    found = []
    for name, options in methods:
        net = sharded(mesh)
        sync = tw.adapters.fsdp2.attach(net, name, start_compression_step=0, **options)
        oracle = Oracle(tw.method(name, **options))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        worst = 0.0
        for step in range(4):
            expected = oracle.gradients(whole(net), step)
            cases.loss_of(net, rank, step, WIDTH).backward()
            got = {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}
            assert got.keys() == expected.keys()
            worst = max(worst, *(float((got[n] - expected[n]).abs().max()) for n in got))
            optimizer.step()
            optimizer.zero_grad()
        owed = oracle.residuals(*place())
        held = {n: r for n, r in sync.state.residuals.items() if n in owed}
        gap = max((float((owed[n] - held[n]).abs().max()) for n in owed), default=0.0)
        size = max((float(r.abs().max()) for r in owed.values()), default=0.0)
        stats = sync.stats()
        found.append((worst, gap, size, stats.bytes_sent, stats.dense_bytes, stats.steps))
        sync.close()
    return found


def _accumulation(rank, mesh):
    """Both of FSDP2's switches, against plain HSDP; then a bf16 wire of FSDP2's."""
    found = {}
    for switch in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        nets = [sharded(mesh), sharded(mesh)]
        group = mesh["replicate"].get_group()
        nets[1] = nets[1] if switch.endswith("reduce") else sharded(mesh["shard"])
        given = {} if switch.endswith("reduce") else {"replicas": group}
        sync = tw.adapters.fsdp2.attach(nets[1], "ssgd", **given)
        for net in nets:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            for step in range(2):
                getattr(net, switch)(False)
                cases.loss_of(net, rank, 10 + step, WIDTH).backward()
                getattr(net, switch)(True)
                step_of(net, optimizer, rank, step)
        found[switch] = (_same(whole(nets[0]), whole(nets[1])), sync.stats().steps)
        sync.close()
    nets = [sharded(mesh, dtype=torch.bfloat16) for _ in range(2)]
    sync = tw.adapters.fsdp2.attach(nets[1], "ssgd")
    for net in nets:
        train(net, rank, 3)
    found["bf16"] = max(float((a - b).abs().max()) for a, b in zip(whole(nets[0]).values(), whole(nets[1]).values()))
    sync.close()
    return found


def _bad_values(rank, mesh):
    """One rank of four brings an infinity: no shard's residual moves, and the step after it goes on."""
    net = sharded(mesh)
    sync = tw.adapters.fsdp2.attach(net, "acp", start_compression_step=0, **ACP)
    train(net, rank, 3)
    before, fields = copy.deepcopy(sync.state.residuals), copy.deepcopy(sync.state.fields)
    x, y = cases.batch(rank, 3, WIDTH)
    if rank == 3:
        x[0, 0] = float("inf")
    (net(x) - y).square().mean().backward()
    bad = not all(p.grad.full_tensor().isfinite().all() for p in net.parameters() if p.grad is not None)
    net.zero_grad()
    kept = _same(before, sync.state.residuals) and _same(fields, sync.state.fields)
    rejected = sync.stats().rejected_steps
    train(net, rank, 1, start=4)
    moved = not _same(before, sync.state.residuals)
    finite = all(r.isfinite().all() for r in sync.state.residuals.values())
    sync.close()
    return bad, kept, rejected, moved, finite


def _dropped(rank, mesh):
    """Steps with a backward between them that no optimizer uses: residuals and weights are as without it."""
    found = []
    for probing in (False, True):
        net = sharded(mesh)
        sync = tw.adapters.fsdp2.attach(net, "topk", density=0.1, start_compression_step=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(4):
            if probing and step:
                cases.loss_of(net, rank, 50 + step, WIDTH).backward()
                optimizer.zero_grad()
            step_of(net, optimizer, rank, step)
        found.append((whole(net), copy.deepcopy(sync.state.residuals), sync.state.dropped))
        sync.close()
    (plain, owed, none), (probed, still_owed, three) = found
    return _same(plain, probed), _same(owed, still_owed), any(x.any() for x in owed.values()), none, three


def _saved(rank, mesh, folder):
    """Through DCP with model and optimizer, then on in another object: bit for bit."""
    net = sharded(mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sync = tw.adapters.fsdp2.attach(net, "acp", start_compression_step=0, **ACP)
    stateful = isinstance(sync, Stateful)
    for step in range(3):
        step_of(net, optimizer, rank, step)
    dcp.save({"model": net.state_dict(), "sync": sync}, checkpoint_id=folder)
    momentum = copy.deepcopy(optimizer.state_dict())
    residuals = {n: x.full_tensor() for n, x in sync.state_dict().items() if n.startswith("residual/")}
    for step in range(3, 6):
        step_of(net, optimizer, rank, step)
    wanted, owed = whole(net), copy.deepcopy(sync.state.residuals)
    sync.close()
    other = sharded(mesh, Net(seed=5))
    again = tw.adapters.fsdp2.attach(other, "acp", **ACP)
    content = {"model": other.state_dict(), "sync": again}
    dcp.load(content, checkpoint_id=folder)
    other.load_state_dict(content["model"])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(momentum)
    for step in range(3, 6):
        step_of(other, optimizer, rank, step)
    on = _same(wanted, whole(other)) and _same(owed, again.state.residuals)
    refused = []
    for change in ({"method": "topk"}, {"replicas": 3}, {"version": 0}):
        with pytest.raises(ValueError) as error:
            again.load_state_dict({**again.state_dict(), **change})
        refused.append(str(error.value))
    again.close()
    return stateful, on, residuals, refused


def _scattered(rank, mesh):
    """The gradients after a compressed reduce-scatter, against the arithmetic of one step by hand."""
    found, groups = [], set()
    for dtype in ("bf16", "fp16", "int8"):
        net = sharded(mesh)
        scatter = tw.adapters.fsdp2.attach_reduce_scatter(net, "cast", dtype=dtype)
        weights = whole(net)
        cases.loss_of(net, rank, 0, WIDTH).backward()
        got = {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}
        ranks = [two_by_two.plain(weights, r, 0) for r in range(4)]
        wanted = {}
        for shard in range(2):
            for names in GROUPS:
                mean = sum(_coded(ranks[2 * c : 2 * c + 2], names, shard, dtype) for c in range(2)) / 2
                for n in names:
                    part = rows(ranks[0][n], shard)
                    padded = rows(ranks[0][n], 0).numel()
                    wanted.setdefault(n, []).append(mean[: part.numel()].view(part.shape))
                    mean = mean[padded:]
        worst = max(float((got[n] - torch.cat(wanted[n])).abs().max()) for n in got)
        largest = max(float(g.abs().max()) for g in got.values())
        with scatter:
            stats = scatter.stats()
        scatter.close()  # again: nothing happens
        with pytest.raises(RuntimeError, match="it was closed"):
            scatter(torch.zeros(2), torch.zeros(4), None, dist.ReduceOp.AVG)
        train(net, rank, 1)  # FSDP2's own again
        groups.add(len(dist.distributed_c10d._world.pg_map))
        found.append((worst, largest, stats.bytes_sent, stats.dense_bytes, stats.steps))
    assert len(groups) == 1  # given back by the first, and taken by the others
    return found


def _coded(gradients, names, shard, dtype):
    """The average of two ranks' rows, each through a 16- or 8-bit wire: [rows of all names, padded]."""
    total = 0
    for mine in gradients:
        flat = []
        for n in names:
            x = rows(mine[n], shard).reshape(-1)
            flat.append(torch.nn.functional.pad(x, (0, rows(mine[n], 0).numel() - x.numel())))
        x = torch.cat(flat)
        if dtype == "int8":
            blocks = -(-x.numel() // 256)
            size = -(-x.numel() // blocks)
            padded = torch.nn.functional.pad(x, (0, blocks * size - x.numel())).view(blocks, size)
            scale = padded.abs().amax(1, keepdim=True) / 127
            total = total + ((padded / scale).round() * scale).nan_to_num().view(-1)[: x.numel()] / 2
        else:
            total = total + (x / 2).to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()
    if dtype != "int8":
        total = total.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()
    return total


def _refusals(rank, mesh):
    attach, scatter = tw.adapters.fsdp2.attach, tw.adapters.fsdp2.attach_reduce_scatter
    told = {}

    def tell(label, error, call, *args, **kwargs):
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        told[label] = str(caught.value)

    net = sharded(mesh)
    tell("dear", NotImplementedError, attach, net, "dear")
    tell("decoupled", NotImplementedError, attach, net, "acp", rank=2, decoupled=True)
    tell("auto", NotImplementedError, attach, net, "auto")
    tell("dgc", NotImplementedError, attach, net, "dgc")
    tell("scatter", NotImplementedError, scatter, net, "acp", rank=2)
    tell("few bits", NotImplementedError, scatter, net, "cast", dtype="int4")
    tell("option", ValueError, attach, net, "acp", rnak=2)
    tell("plain", TypeError, attach, Net(), "ssgd")
    tell("both", ValueError, attach, net, "ssgd", replicas=mesh["replicate"])
    tell("no replicas", ValueError, attach, sharded(mesh["shard"]), "ssgd")
    tell("the shards", ValueError, attach, sharded(mesh["shard"]), "ssgd", replicas=mesh["shard"])
    tell("whole mesh", ValueError, attach, sharded(mesh["shard"]), "ssgd", replicas=mesh)
    tell("differ", ValueError, attach, net, "acp", rank=2 + place()[0])
    tell("tw.attach", TypeError, tw.attach, net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd")
    sync = attach(net, "ssgd")
    tell("twice", RuntimeError, attach, net, "ssgd")
    sync.close()
    bare = Net()
    fully_shard(bare.first, mesh=mesh)
    tell("not whole", ValueError, attach, bare, "ssgd")
    with torch.device("meta"):
        empty = Net()
    tell("meta", ValueError, attach, sharded(mesh, empty), "ssgd")
    if hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.9 has no model with several groups
        tell("several groups", NotImplementedError, attach, _of_two_meshes(mesh), "ssgd")
    return told


def _of_two_meshes(mesh):
    net = nn.Linear(WIDTH, 8)
    other = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    placed = lambda p: _fsdp_common.ShardPlacementResult(Shard(0), other) if p.ndim == 1 else None  # noqa: E731
    fully_shard(net, mesh=mesh["shard"], shard_placement_fn=placed)
    return net


def _everything(rank, size, folder):
    mesh = two_by_two.mesh()
    return {
        "exact": _exact(rank, mesh),
        "methods": _methods(rank, mesh, METHODS),
        "bad values": _bad_values(rank, mesh),
        "dropped": _dropped(rank, mesh),
        "saved": _saved(rank, mesh, folder),
        "scattered": _scattered(rank, mesh),
        "refusals": _refusals(rank, mesh),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("fsdp2"))


@pytest.fixture(scope="module")
def four(folder):
    return run(_everything, 4, folder, seconds=250, fresh=True)  # DTensor remembers meshes beyond a process group


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["native", "given"])
def test_ssgd_equals_plain_hsdp_bit_for_bit(four, label):
    for result in four:
        assert result["exact"][label] == (True, True, True, True, 5, 2)


def test_detach_gives_the_replicas_back(four):
    assert all(result["exact"]["detached"] for result in four)


@pytest.mark.parametrize("index", range(len(METHODS)), ids=map(_label, METHODS))
def test_a_method_equals_local_world_on_the_shards(four, index):
    for result in four:
        _check(METHODS[index], result["methods"][index])


def _check(case, found):
    name, options = case
    worst, gap, size, sent, dense, steps = found
    assert worst < (4e-3 if name == "cast" and not options else 1e-5)
    assert gap < 1e-5
    assert (size > 0) == tw.method(name, **options).has_residual
    assert steps == 4
    if name in ("acp", "powersgd", "cast"):
        assert sent < dense
    elif name == "ssgd":
        assert sent == dense if not options else dense <= sent < 1.01 * dense  # in rank order: chunks of equal size


def _more(rank, size):
    return _methods(rank, two_by_two.mesh(), MORE)


@pytest.mark.slow
def test_the_other_methods_equal_local_world_too():
    assert {name for name, _ in [*METHODS, *MORE]} == set(tw.adapters.fsdp2.works())
    for result in run(_more, 4, seconds=250, fresh=True):
        for case, found in zip(MORE, result, strict=True):
            _check(case, found)


def _switched(rank, size):
    return _accumulation(rank, two_by_two.mesh())


@pytest.mark.slow
def test_accumulation_by_either_switch():
    for found in run(_switched, 4, seconds=250, fresh=True):
        assert found["set_requires_gradient_sync"] == (True, 2)
        assert found["set_requires_all_reduce"] == (True, 2)
        assert found["bf16"] < 1e-4


def test_an_infinite_value_in_one_shard_leaves_every_shards_state(four):
    for result in four:
        assert result["bad values"] == (True, True, 1, True, True)


def test_a_dropped_backward_leaves_no_trace(four):
    for result in four:
        assert result["dropped"] == (True, True, True, 0, 3)


def test_dcp_goes_on_bit_for_bit(four):
    for result in four:
        stateful, on, _, refused = result["saved"]
        assert stateful
        assert on
        assert "topk" in refused[0]
        assert "3 replicas, but now there are 2" in refused[1]
        assert "not the state" in refused[2]


def _on_other_shards(rank, size, folder):
    """Two replicas of one shard each take the checkpoint of two by two; DCP cuts the residuals anew."""
    net = sharded(two_by_two.mesh(2, 1))
    sync = tw.adapters.fsdp2.attach(net, "acp", start_compression_step=0, **ACP)
    dcp.load({"sync": sync}, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    held = {n: r.clone() for n, r in sync.state.residuals.items()}
    train(net, rank, 1)
    sync.close()
    return held


def test_residuals_survive_another_number_of_shards(four, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = run(_on_other_shards, 2, folder, fresh=True)
    for replica, held in enumerate(after):
        before = four[2 * replica]["saved"][2]
        assert {f"residual/{replica}/{n}" for n in held} == set(before)
        assert any(r.any() for r in held.values())
        for n, r in held.items():
            assert torch.equal(r, before[f"residual/{replica}/{n}"])


@pytest.mark.parametrize("index", range(3), ids=["bf16", "fp16", "int8"])
def test_the_reduce_scatter_in_16_and_8_bits(four, index):
    for result in four:
        worst, largest, sent, dense, calls = result["scattered"][index]
        assert worst < (1e-6 if index == 2 else 2e-2) * largest
        assert calls == len(GROUPS)
        assert sent < dense * (0.3 if index == 2 else 0.51)


def test_refusals_say_what_works(four):
    for result in four:
        told = result["refusals"]
        for label in ("dear", "decoupled", "dgc", "auto"):
            assert "ssgd, cast, signsgd" in told[label]
            assert "acp" in told[label]
        assert "only cast works, with dtype=" in told["scatter"]
        assert "because no residual is kept" in told["few bits"]
        assert "rank" in told["option"]
        assert "fully_shard first" in told["plain"]
        assert "leave out replicas=" in told["both"]
        assert 'replicas=mesh["replicate"]' in told["no replicas"]
        assert "no other rank of its shards" in told["the shards"]
        assert "one dimension" in told["whole mesh"]
        assert "rank: 2" in told["differ"] or "options: rank" in told["differ"]
        assert "thinwire.adapters.fsdp2.attach" in told["tw.attach"]
        assert "already" in told["twice"]
        assert "it is not averaged" in told["not whole"]
        assert "meta device" in told["meta"]
        assert "2 parameter groups" in told.get("several groups", "2 parameter groups")


def _lost(rank, size):
    """One of two replicas dies between two steps; the other says who, where and when."""
    if rank == 1:
        dist.get_rank()
    net = sharded(two_by_two.mesh(2, 1))
    hooks, set_hook = [], FSDPModule.set_all_reduce_hook
    with patch.object(FSDPModule, "set_all_reduce_hook", lambda m, hook: hooks.append(hook) or set_hook(m, hook)):
        tw.adapters.fsdp2.attach(net, "acp", start_compression_step=0, **ACP, timeout=15)
    train(net, rank, 2)
    if rank == 1:
        import os

        os._exit(7)
    try:
        train(net, rank, 1)
    except RuntimeError as error:
        first = str(error)
    try:
        hooks[0](torch.zeros(1))  # as FSDP2 would in the next backward
    except RuntimeError as error:
        return first, str(error)
    return first, ""


@pytest.mark.slow
def test_a_dead_replica_is_named():
    first, second = run(_lost, 2, expect_exit={1: 7})[0]
    assert "step 2" in first
    assert "exchange between replicas" in first
    assert "Rank 1 did not report" in first
    assert "unusable after an earlier failure" in second

"""Plans in DDP's words, the hook beside ``attach``, and what DDP does to a hook: rebuilt buckets, no_sync, join."""

import inspect

import cases
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from spawned import run
from thinwire.adapters import ddp_buckets
from thinwire.adapters.ddp_buckets import bucket_arguments, has_bucket_list

SMALL = 0.003  # MiB
EQUAL = [  # values that do not depend on which tensors share a bucket
    ("ssgd", {}),
    ("cast", {}),
    ("acp", {"rank": 2}),
    ("powersgd", {"rank": 2}),
    ("signsgd", {}),
    ("onebit", {}),
    ("qsgd", {}),
    ("terngrad", {}),
]
KEEPS = [
    ("acp", {"rank": 2}),
    ("powersgd", {"rank": 2}),
    ("topk", {"density": 0.1}),
    ("gtopk", {"density": 0.1}),
    ("oktopk", {"density": 0.1}),
    ("signsgd", {}),
    ("onebit", {}),
    ("cast", {"dtype": torch.int8}),
]


def _hooked(net, name, options, **kwargs):
    ddp = DistributedDataParallel(net, **kwargs)
    state, hook = tw.ddp_hook(name, start_compression_step=0, **options)
    state.learn_names(net)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def _steps(net, module, rank, steps, pause=None):
    """Two micro-batches a step, the first of which stays here."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        with (pause or module).no_sync():
            cases.loss_of(module, rank, 100 + step).backward()
        loss = cases.loss_of(module, rank, step)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _beside_attach(rank):
    """The same trajectory under a plan made by ``attach`` and given to DDP; the buckets that DDP then has."""
    found = []
    for name, options in EQUAL:
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        sync = tw.attach(net, optimizer, "ssgd", fusion=SMALL)
        cases.loss_of(net, rank, 0).backward()
        plan = sync.plan
        sync.close()
        ours = cases.model()
        sync = tw.attach(
            ours, torch.optim.SGD(ours.parameters(), lr=0.05), name, plan=plan, start_compression_step=0, **options
        )
        losses = _steps(ours, ours, rank, 5, sync)
        theirs = cases.model()
        ddp, state = _hooked(theirs, name, options, **bucket_arguments(plan, theirs))
        others = _steps(theirs, ddp, rank, 5)
        layout = [b.names for b in state.stats().buckets]
        residuals = sync.services.state.residuals
        found.append(
            {
                "losses": all(map(torch.equal, losses, others)),
                "weights": all(map(torch.equal, cases.weights(ours), cases.weights(theirs))),
                "residuals": all(torch.equal(residuals[n], r) for n, r in state.state.residuals.items()),
                "kept": residuals.keys() == state.state.residuals.keys(),
                "steps": (sync.stats().steps, state.stats().steps),
                "rebuilt": state.stats().rebuilt,
                "layout": [sorted(names) for names in layout],
                "plan": [sorted(b.names) for b in plan.buckets()],
            }
        )
        sync.close()
        state.close()
    return found


def _join(rank):
    """Rank 0 runs out of batches: its zero gradients may not make it owe more, nor spoil what is sent."""
    found = []
    for name, options in KEEPS:
        net = cases.model()
        ddp, state = _hooked(net, name, options, bucket_cap_mb=SMALL)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        norms = []
        with Join([ddp]):
            for step in range(3 + 9 * rank):
                cases.down(cases.loss_of(ddp, rank, step), optimizer)
                norms.append(_norm(state))
        assert state.stats().steps == 3 + 9
        assert rank == 1 or state.stats().dropped_steps == 0  # the others use a joined rank's zeros
        found.append((norms[2], _norm(state), state.stats().steps, all(w.isfinite().all() for w in cases.weights(net))))
        state.close()
    return found


def _norm(state):
    return float(sum(r.square().sum() for r in state.state.residuals.values())) ** 0.5


def _everything(rank, size):
    return {"attach": _beside_attach(rank), "join": _join(rank)}


@pytest.fixture(scope="module")
def two():
    return run(_everything, 2, seconds=250)


@pytest.mark.dist
@pytest.mark.parametrize("index", range(len(EQUAL)), ids=[name for name, _ in EQUAL])
def test_the_hook_trains_as_attach_does(two, index):
    """Also with accumulation under no_sync, and over the rebuild of DDP's buckets."""
    for result in two:
        found = result["attach"][index]
        assert found["losses"]
        assert found["weights"]
        assert found["residuals"]
        assert found["kept"]
        assert found["steps"] == (5, 5)


@pytest.mark.dist
def test_ddp_fuses_as_the_plan_says(two):
    if not has_bucket_list():
        pytest.skip("this torch's DDP has no bucket_cap_mb_list")
    for result in two:
        for found in result["attach"]:
            assert found["rebuilt"]
            assert found["layout"] == found["plan"]
            assert len(found["plan"]) > 2


@pytest.mark.dist
@pytest.mark.parametrize("index", range(len(KEEPS)), ids=[name for name, _ in KEEPS])
def test_zero_gradients_under_join_do_not_grow_what_is_owed(two, index):
    before, after, steps, finite = two[0]["join"][index]
    assert steps == 12
    assert finite
    assert before > 0
    assert after <= before * 1.001
    assert two[1]["join"][index][2:] == (12, True)


def _net():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


PLAN = tw.Plan.of([["1.bias", "1.weight"], ["0.bias", "0.weight"]])


@pytest.mark.skipif(not has_bucket_list(), reason="this torch's DDP has no bucket_cap_mb_list")
def test_arguments_are_the_exact_sizes():
    arguments = bucket_arguments(PLAN, _net())
    assert arguments == {"bucket_cap_mb_list": [36 * 4 / 2**20, 72 * 4 / 2**20]}
    assert [int(cap * 2**20) for cap in arguments["bucket_cap_mb_list"]] == [144, 288]  # as DDP reads them
    assert bucket_arguments(PLAN, {"1.bias": 16, "1.weight": 128, "0.bias": 32, "0.weight": 256}) == arguments
    assert set(arguments) <= set(inspect.signature(DistributedDataParallel.__init__).parameters)


def test_a_torch_without_the_list_gets_a_mean_size(monkeypatch):
    monkeypatch.setattr(ddp_buckets, "has_bucket_list", lambda: False)
    assert bucket_arguments(PLAN, _net()) == {"bucket_cap_mb": 54 * 4 / 2**20}


def test_plans_that_ddp_cannot_hold_are_refused():
    mixed = _net()
    mixed[1].to(torch.bfloat16)
    with pytest.raises(ValueError, match="2 dtypes"):
        bucket_arguments(PLAN, mixed)
    with pytest.raises(ValueError, match="does not fit the model"):
        bucket_arguments(PLAN, nn.Linear(3, 3))
    apart = tw.Plan(((tw.program.PlanBucket(("1.weight", "0.weight")),
                      tw.program.PlanBucket(("1.bias", "0.bias"), dense=True)),))  # fmt: skip
    with pytest.raises(ValueError, match="in their own plain buckets"):
        bucket_arguments(apart, _net())

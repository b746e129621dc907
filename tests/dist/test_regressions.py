"""Measured defects of torch's own PowerSGD hook, as targets (M1 to M8): every method as a hook of DDP.

And through ``attach`` where ``tests/fuzz`` does not look: other buckets, torch's own checkpoints, the end.
"""

import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from spawned import run
from thinwire.core.program import Plan, PlanBucket

pytestmark = pytest.mark.dist

METHODS = {"powersgd": {"rank": 1}, "acp": {"rank": 1}, "topk": {"density": 0.01}}
ROUTES = ("attach", "hook")
CASES = [(route, name) for route in ROUTES for name in METHODS]
WIDTH, OUT = 64, 10
CAP = 0.01  # MiB: every weight matrix a bucket of its own


def mlp(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, OUT),
    ).to(dtype)  # fmt: skip


class Training:
    """One model, synchronised by one of the routes."""

    def __init__(self, rank, route, name, *, cap=CAP, scaler=None, net=None, dtype=torch.float32, **attach):
        self.rank, self.route, self.dtype = rank, route, dtype
        self.net = mlp(dtype) if net is None else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.call, self.sync = self.net, None
        if route == "attach":
            self.sync = tw.attach(
                self.net,
                self.optimizer,
                name,
                fusion=cap,
                scaler=scaler,
                start_compression_step=0,
                **METHODS[name],
                **attach,
            )
        else:
            self.call = DistributedDataParallel(self.net, bucket_cap_mb=cap)
            self.sync, hook = tw.ddp_hook(name, scaler=scaler, start_compression_step=0, **METHODS[name])
            self.call.register_comm_hook(self.sync, hook)

    def loss(self, step):
        g = torch.Generator().manual_seed(1000 * step + self.rank)
        x, y = torch.randn(8, WIDTH, generator=g), torch.randn(8, OUT, generator=g)
        return (self.call(x.to(self.dtype)) - y.to(self.dtype)).square().mean()

    def step(self, step):
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def memory(self):
        return getattr(self.sync, "services", self.sync).state

    def residuals(self):
        """Clones by the model's own names, whatever the route calls them."""
        names = {id(p): n for n, p in self.net.named_parameters()}
        state = self.memory
        if self.route == "attach":
            return {n: r.clone() for n, r in state.residuals.items()}
        known = {ordinal: names[id(p)] for ordinal, p in self.sync.names()}
        return {known[n]: r.clone() for n, r in state.residuals.items()}

    def finite(self):
        return all(bool(p.grad.isfinite().all()) for p in self.net.parameters())

    def close(self):
        self.sync.close()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- M1: an infinite loss ------------------------------------------------------------------------------------------


def m1(rank, name):
    """Steps with a non-finite gradient; whether the residual survived the bad one bit for bit; losses."""
    training, bad, untouched, losses = Training(rank, "hook", name), [], True, []
    for step in range(16):
        before = training.residuals()
        loss = training.loss(step)
        if step == 5 and rank == 0:
            loss = loss * float("inf")
        loss.backward()
        losses.append(float(loss))
        if training.finite():
            training.optimizer.step()
        else:
            bad.append(step)
            untouched = untouched and same(before, training.residuals())
        training.optimizer.zero_grad()
    clean = all(bool(r.isfinite().all()) for r in training.residuals().values())
    rejected = training.sync.stats().rejected_steps
    training.close()
    return {"bad": bad, "untouched": untouched, "clean": clean, "rejected": rejected, "end": losses[-1]}


# --- M2: the loss scale changes ------------------------------------------------------------------------------------


def m2(rank, name):
    """Gradient norm right after the scale changed, over that of a run whose scale did not."""

    def norm(new):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=10**6)
        training = Training(rank, "hook", name, scaler=scaler)
        for step in range(9):
            if step == 8:
                scaler.update(new)
            scaler.scale(training.loss(step)).backward()
            scaler.unscale_(training.optimizer)
            if step == 8:
                break
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        total = torch.stack([p.grad.norm() for p in training.net.parameters()]).norm()
        training.close()
        return float(total)

    reference = norm(65536.0)
    return [norm(32768.0) / reference, norm(1.0) / reference]


# --- M3: resumed with other buckets --------------------------------------------------------------------------------


def m3_attach(rank, name):
    """Equal residuals after the load; then equal bits to a run that changes its plan in place at that step."""
    training = Training(rank, "attach", name)
    for step in range(6):
        training.step(step)
    weights, momentum = copy.deepcopy(training.net.state_dict()), copy.deepcopy(training.optimizer.state_dict())
    saved, before = training.sync.state_dict(), training.residuals()
    old = training.sync.plan
    everything = list(old.phases[0])
    parts = tuple(
        PlanBucket(names, dense)
        for dense in (False, True)
        if (names := tuple(n for b in everything if b.dense is dense for n in b.names))
    )
    other = Plan((parts,) * len(old.phases))

    def resume(**options):
        net = mlp()
        net.load_state_dict(weights)
        found = Training(rank, "attach", name, net=net, **options)
        found.optimizer.load_state_dict(copy.deepcopy(momentum))
        found.sync.load_state_dict(saved)
        return found

    pinned, merged = resume(plan=other), resume(cap="single")
    loaded = same(before, pinned.residuals()) and same(before, merged.residuals())
    factors = all(
        t.memory.fields.keys() == training.memory.fields.keys() and same(training.memory.fields, t.memory.fields)
        for t in (pinned, merged)
    )
    training.sync.adopt_plan(other)
    for step in range(6, 12):
        for t in (training, pinned, merged):
            t.step(step)
    trajectory = all(torch.equal(a, b) for a, b in zip(training.net.parameters(), pinned.net.parameters()))
    buckets = len(old.phases[0]), len(pinned.sync.plan.phases[0]), len(merged.sync.plan.phases[0])
    same_residuals = same(training.residuals(), pinned.residuals())
    for t in (training, pinned, merged):
        t.close()
    return {"loaded": loaded, "factors": factors, "trajectory": trajectory and same_residuals, "buckets": buckets}


def m3_hook(rank, name):
    """Equal residuals after the load under another bucket_cap_mb, for the same tensors; then the uninterrupted run."""
    training = Training(rank, "hook", name)
    for step in range(6):
        training.step(step)
    saved, before = training.sync.state_dict(), training.residuals()
    net = mlp()
    net.load_state_dict(training.net.state_dict())
    resumed = Training(rank, "hook", name, net=net, cap=25)
    resumed.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    resumed.sync.load_state_dict(saved)
    # what the names stand for is known once DDP has shown its first bucket
    loaded = {**resumed.memory.residuals}
    known = {ordinal: n for n, p in training.net.named_parameters() for ordinal, q in training.sync.names() if p is q}
    for step in range(6, 12):
        training.step(step)
        resumed.step(step)
    again = {ordinal: n for n, p in net.named_parameters() for ordinal, q in resumed.sync.names() if p is q}
    worst = max(float((a - b).abs().max()) for a, b in zip(training.net.parameters(), net.parameters()))
    buckets = len(training.sync.stats().buckets), len(resumed.sync.stats().buckets)
    training.close()
    resumed.close()
    return {
        "loaded": same({known[n]: r for n, r in loaded.items()}, before) and known == again,
        "worst": worst,
        "buckets": buckets,
    }


# --- M4: several buckets, random delays ----------------------------------------------------------------------------


def m4(rank, name, steps=30):
    """A digest of the weights after training with random pauses between the gradients of a backward."""
    training = Training(rank, "hook", name)
    pause = random.Random(rank)
    for p in training.net.parameters():
        p.register_hook(lambda g: time.sleep(pause.random() * 0.002))
    for step in range(steps):
        training.step(step)
    buckets = training.sync.stats().buckets
    training.close()
    return [p.detach().clone() for p in training.net.parameters()], len(buckets)


# --- M7: a bf16 model ----------------------------------------------------------------------------------------------


def m7(rank, name):
    training = Training(rank, "hook", name, dtype=torch.bfloat16)
    for step in range(4):
        training.step(step)
    kinds = {str(r.dtype) for r in training.residuals().values()}
    finite = all(bool(p.isfinite().all()) for p in training.net.parameters())
    training.close()
    return kinds, finite


# --- M8: DCP --------------------------------------------------------------------------------------------------------


def m8(rank, route, name, folder):
    """Saved, changed, loaded in place; then loaded into a fresh process's object."""
    training = Training(rank, route, name)
    for step in range(4):
        training.step(step)
    stateful = isinstance(training.sync, Stateful)
    where = f"{folder}/{route}-{name}"
    dcp.save({"sync": training.sync}, checkpoint_id=where)
    want, fields = training.residuals(), copy.deepcopy(training.memory.fields)
    for step in range(4, 6):
        training.step(step)
    changed = not same(want, training.residuals())
    dcp.load({"sync": training.sync}, checkpoint_id=where)
    inplace = same(want, training.residuals()) and training.memory.step == 4
    training.close()
    fresh = Training(rank, route, name)
    refused = ""
    if route == "hook":  # it has not seen the parameters: told, not lost
        try:
            dcp.load({"sync": fresh.sync}, checkpoint_id=where)
        except Exception as error:
            refused = str(error)
        fresh.step(0)
    dcp.load({"sync": fresh.sync}, checkpoint_id=where)
    anew = same(want, fresh.residuals()) and same(fields, fresh.memory.fields) and fresh.memory.step == 4
    fresh.step(4)
    fresh.close()
    return {"stateful": stateful, "changed": changed, "in place": inplace, "anew": anew, "refused": refused}


def _everything(rank, size, folder):
    found = {}
    for name in METHODS:
        found[name] = [one(rank, name) for one in (m1, m2, m4, m7)]
    for route, name in CASES:
        m3 = m3_attach if route == "attach" else m3_hook
        found[route, name] = {"m3": m3(rank, name), "m8": m8(rank, route, name, folder)}
    _leave(rank)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(_everything, 2, str(tmp_path_factory.mktemp("dcp")), seconds=250, fresh=True)


every_case = pytest.mark.parametrize(("route", "name"), CASES)
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_m1_an_infinite_loss_costs_one_step(two, name):
    for result in two:
        m = result[name][0]
        assert m["bad"] == [5]
        assert m["rejected"] == 1
        assert m["untouched"]
        assert m["clean"]
        assert m["end"] < 10


@every_method
def test_m2_residuals_do_not_depend_on_the_loss_scale(two, name):
    for result in two:
        assert result[name][1] == pytest.approx([1.0, 1.0], abs=0.01)


@every_case
def test_m3_residuals_survive_other_buckets(two, route, name):
    for result in two:
        m = result[route, name]["m3"]
        assert m["loaded"]
        assert m["buckets"][0] > m["buckets"][1], m["buckets"]
        if route == "attach":
            assert m["factors"]
            assert m["trajectory"]
        elif name != "topk":  # top-k is taken per bucket
            assert m["worst"] == 0.0


@every_method
def test_m4_several_buckets_with_delays(two, name):
    (weights, buckets), (others, _) = (result[name][2] for result in two)
    assert all(map(torch.equal, weights, others))
    assert buckets > 2


@every_method
def test_m7_residuals_of_a_bf16_model_are_fp32(two, name):
    for result in two:
        kinds, finite = result[name][3]
        assert kinds == {"torch.float32"}
        assert finite


@pytest.mark.parametrize("name", METHODS)
def test_m7_small_additions_arrive(name):
    """1, then 1000 times 2^-12: bf16 alone would stay at 1 for ever."""
    torch.manual_seed(0)
    faint = torch.outer(torch.randn(16), torch.randn(16)).to(torch.bfloat16)
    faint[0] = 0
    loud = torch.zeros(16, 16, dtype=torch.bfloat16)
    loud[0] = 8.0  # hides what is faint; larger, and its own rounding to bf16 is what one sees
    method = tw.method(name, compress="matrices", **METHODS[name]) if name != "topk" else tw.method(name, density=0.06)
    world = tw.LocalWorld(2)
    arrived = torch.zeros(16, 16, dtype=torch.float64)
    for step in range(1001):
        gradient = loud + faint * (1.0 if step == 0 else 2.0**-12)
        out = world.step(method, [{"w": gradient}, {"w": gradient}])
        assert out[0]["w"].dtype == torch.bfloat16
        arrived += out[0]["w"].double()
    residual = world.residuals()[0]["w"]
    assert residual.dtype == torch.float32
    wanted = (faint.double() * (1 + 1000 * 2.0**-12))[1:]
    assert float(((arrived + residual.double())[1:] - wanted).norm() / wanted.norm()) < 0.01
    for _ in range(200):  # nothing new: what is owed arrives
        arrived += world.step(method, [{"w": torch.zeros(16, 16, dtype=torch.bfloat16)}] * 2)[0]["w"].double()
    assert float((arrived[1:] - wanted).norm() / wanted.norm()) < 0.01


@every_case
def test_m8_dcp_round_trip(two, route, name):
    for result in two:
        m = result[route, name]["m8"]
        assert m["stateful"]
        assert m["changed"]
        assert m["in place"]
        assert m["anew"]
        assert ("lost its residuals" in m["refused"]) == (route == "hook"), m["refused"]


# --- M5: the end of the process -------------------------------------------------------------------------------------


def _leave(rank):
    """Some work on every route, then neither detach nor close."""
    kept = [Training(rank, route, name) for route, name in CASES]
    for training in kept:
        for step in range(3):
            training.step(step)
    globals()["_kept"] = kept


def _no_farewell(rank, size, groups):
    if not groups:  # then nobody calls destroy_process_group either
        dist.init_process_group("gloo")
    _leave(rank)


def test_m5_exit_code_0_without_detach(two):
    assert all(two)  # `run` has seen the exit codes; the groups were destroyed with everything still attached


def test_m5_exit_code_0_with_the_groups_left():
    run(_no_farewell, 2, False, init=False, fresh=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_m5_many_times(size):
    for i in range(25):
        run(_no_farewell, size, i % 2 == 0, init=i % 2 == 0, seconds=250, fresh=True)

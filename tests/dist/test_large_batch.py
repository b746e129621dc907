"""LARS and LAMB on real ranks: ratios shared out, half on the wire, a loss scale, every method of the engine."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.methods.registry import METHODS
from thinwire.systems.optim import LAMB, LARS, param_groups
from thinwire.systems.optim.pto import decide

pytestmark = pytest.mark.dist

MAKE = {
    "lars": lambda p, **o: LARS(p, 0.5, weight_decay=0.01, **o),
    "lamb": lambda p, **o: LAMB(p, 0.02, **o),
}
OPTIONS = {"topk": {"density": 0.1}, "gtopk": {"density": 0.1}, "oktopk": {"density": 0.1}, "omgs": {"density": 0.1}}
OPTIONS |= {"hitopk": {"density": 0.1}, "lags": {"max_ratio": 10}, "powersgd": {"rank": 2}, "acp": {"rank": 2}}


def train(rank, make, method="ssgd", *, steps=6, autocast=False, attach=None):
    """Train the small model on one batch per rank: (losses, weights, optimizer, sync.stats(), optimizer.stats())."""
    net = cases.model()
    optimizer = make(net)
    losses = []
    with tw.attach(net, optimizer, method, **(attach or {})) as sync:
        x, y = cases.batch(rank, 0)
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = net(x)
            loss = (out.float() - y).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if sync.pending:  # decoupled
            sync.synchronize()
        shared = optimizer.stats() if isinstance(optimizer, (LARS, LAMB)) else None
        return losses, cases.weights(net), optimizer, sync.stats(), shared


# --- ratios shared out ----------------------------------------------------------------------------------------------


def _shared(rank, size, name, topology):
    found = []
    for parallel in (None, "node", "world", "auto"):
        make = lambda net, p=parallel: MAKE[name](net.parameters(), parallel=p)  # noqa: E731
        _, weights, _, _, stats = train(rank, make, steps=14, attach={"topology": topology})
        found.append((weights, stats))
    return found


@pytest.mark.parametrize(
    "name, size, layout", [("lars", 2, [2]), ("lars", 3, [2, 1]), ("lamb", 2, [1, 1]), ("lamb", 3, [3])]
)
def test_shared_out_it_is_the_same_bit_for_bit(name, size, layout):
    results = run(_shared, size, name, tw.Topology(size, layout))
    alone = results[0][0][0]
    for ranks in results:
        for weights, _ in ranks:
            assert all(torch.equal(a, b) for a, b in zip(alone, weights))
        off, node, world, auto = (stats for _, stats in ranks)
        assert (off.running, world.running) == ("off", "world")
        assert (world.ranks, world.layers) == (size, 4)  # the matrices; biases are skipped
        assert 1 / size <= world.busiest < 1
        assert node.running == (
            "node" if len(layout) > 1 and max(layout) > 1 else "world" if len(layout) == 1 else "off"
        )
        assert auto.running in ("off", "node", "world")
        assert (auto.running, auto.why) == decide(auto.full_seconds, auto.shared_seconds)
        assert ("node" in auto.shared_seconds) == (node.running == "node")
        assert auto.full_seconds == results[0][3][1].full_seconds  # of the slowest rank, so equal


def _without_one(rank, size):
    """One rank's script takes a gradient away, another's another one of equal size."""
    net = cases.model()
    optimizer = LARS(net.parameters(), 0.1, parallel="world")
    with tw.attach(net, optimizer, "ssgd"):
        cases.loss_of(net, rank, 0).backward()
        net[2 * rank].weight.grad = None
        return cases.said(optimizer.step)


def test_ranks_that_have_gradients_of_different_layers_are_told():
    for said in run(_without_one, 2):
        assert said.startswith("RuntimeError: ranks share the norms of layers, but have gradients of different")


def _refusals(rank, size):
    for make in (lambda p: LARS(p, 0.1, parallel="auto"), lambda p: LAMB(p, parallel=None)):
        net = cases.model()
        with pytest.raises(ValueError, match="bucket"):
            tw.attach(net, make(net.parameters()), "dear")
        make_whole = make(net.parameters())
        with tw.attach(net, make_whole, "dear", update_in_step=True):  # the refused one has left nothing behind
            for step in range(2):
                cases.loss_of(net, rank, step).backward()
                make_whole.step()
                make_whole.zero_grad()
        weights = cases.weights(net)
        twin = cases.model()
        optimizer = make(twin.parameters())
        with tw.attach(twin, optimizer, tw.SSGD(deterministic=True)):
            for step in range(2):
                cases.loss_of(twin, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(weights, cases.weights(twin)))
    return True


def test_what_needs_all_gradients_asks_for_them():
    assert run(_refusals, 2) == [True, True]


def _decoupled(rank, size):
    ends = []
    for method in (tw.SSGD(deterministic=True), tw.DeAR()):
        for make in (
            lambda n: LARS(n.parameters(), 0.5, weight_decay=0.1),
            lambda n: LAMB(n.parameters(), max_grad_norm=None),
        ):
            ends.append(train(rank, make, method, attach={"plan": tw.Plan.of(PLAN)})[1])
    return ends


PLAN = [["6.bias", "6.weight", "4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]]


def test_layer_by_layer_it_runs_decoupled():
    for lars, lamb, dear_lars, dear_lamb in run(_decoupled, 2):
        assert all(torch.equal(a, b) for a, b in zip(lars, dear_lars))
        assert all(torch.equal(a, b) for a, b in zip(lamb, dear_lamb))


# --- mixed precision -----------------------------------------------------------------------------------------------


def _every_method(rank, size):
    """bf16 autocast, fp32 parameters and state, LARS; each method of the registry."""
    found = {}
    for name in METHODS:
        if name == "dgc":  # brings its own momentum: needs plain SGD
            make = lambda net: torch.optim.SGD(net.parameters(), lr=0.05)  # noqa: E731
        else:
            make = lambda net: LARS(param_groups(net, 0.01, skip_lr_scale=0.1), 1.0, trust_coefficient=0.02)  # noqa: E731
        method = tw.method(name, **OPTIONS.get(name, {}))
        losses, weights, optimizer, _, _ = train(rank, make, method, steps=8, autocast=True)
        kinds = {str(x.dtype) for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)}
        found[name] = (losses, weights, kinds)
    return found


def test_bf16_autocast_with_every_method():
    results = run(_every_method, 2)
    for name in METHODS:
        mean = [sum(pair) / 2 for pair in zip(*(r[name][0] for r in results))]
        assert mean[-1] < 0.9 * mean[0], name
        for r in results:
            assert all(torch.equal(a, b) for a, b in zip(r[name][1], results[0][name][1])), name
            assert all(w.dtype == torch.float32 and bool(w.isfinite().all()) for w in r[name][1])
            assert r[name][2] <= {"torch.float32"}, name


SCALED = ["ssgd", "topk", "acp", "dear"]


def _overflow(rank, size, name):
    """Step 2 overflows on rank 1 only, in one coordinate that Top-k would not choose; then without that step."""
    ends = []
    for bad in (True, False):
        net = cases.model()
        optimizer = LARS(net.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        with tw.attach(
            net, optimizer, tw.method(name, **OPTIONS.get(name, {})), scaler=scaler, start_compression_step=0
        ) as sync:
            for step in (0, 1, 2, 3, 4) if bad else (0, 1, 3, 4):
                before = {n: r.clone() for n, r in sync.services.state.residuals.items()}
                hook = net[2].weight.register_hook(spoil) if step == 2 and rank == 1 else None
                scaler.scale(cases.loss_of(net, rank, step)).backward()
                if hook is not None:
                    hook.remove()
                scaler.step(optimizer)
                if sync.pending:  # decoupled
                    sync.synchronize()
                scaler.update()
                optimizer.zero_grad()
                after = sync.services.state.residuals
                same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
                seen.append((scaler.get_scale(), same))
            ends.append((cases.weights(net), seen))
    return ends


def spoil(gradient):
    gradient = gradient.clone()
    gradient.view(-1)[17] = float("inf")
    return gradient


@pytest.mark.parametrize("name", SCALED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(name):
    for (weights, seen), (expected, _) in run(_overflow, 2, name):
        assert [scale for scale, _ in seen] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert seen[2][1]  # residuals, bit for bit
        if name != "acp":  # no state that counts steps: as if it had not been
            assert all(torch.equal(a, b) for a, b in zip(weights, expected))
        assert all(bool(w.isfinite().all()) for w in weights)

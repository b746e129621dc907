"""Rules of papers and of their authors' code, written anew from their definitions: thinwire does the same.

gTop-k (1901.04359), SPD-KFAC (2107.06533), Once-for-all (1908.09791) as in EASNet, and Parrot
(2303.01778), DiLoCo (2311.08105) as in hivemind and torchft. Others stand where their concept does: federated rules in
tests/unit/federated, torch's model averaging in tests/dist/test_local.py.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.placement import place_threshold
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import LocalWorld
from thinwire.systems.federated.schedule import fit
from thinwire.systems.kfac import make_plan, published
from thinwire.systems.kfac.plan import FactorLayer
from thinwire.systems.kfac.prices import LayerTimes, layers_of
from thinwire.systems.supernet.operators import ElasticBatchNorm, ElasticDepthwise

# --- gTop-k: the operator on whole vectors, and the tree of it -------------------------------------------------------


def _top(x, k):
    """The vector with zeros instead of all but its k largest magnitudes."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x))[:k]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("density", [0.001, 0.02, 0.3])
def test_gtopk_is_a_tree_of_pairwise_merges(size, density):
    d = 1000
    draw = np.random.default_rng(size)
    gradients = draw.standard_normal((size, d)) ** 3 + draw.standard_normal(d)  # a common part: indices coincide
    k = round(density * d)
    left = [_top(g, k) for g in gradients]
    while len(left) > 1:
        left = [_top(a + b, k) for a, b in zip(left[::2], left[1::2])]
    found = LocalWorld(size).step(tw.GTopK(density), [{"w": torch.tensor(g)} for g in gradients])
    for rank in found:
        assert np.array_equal(rank["w"].numpy(), left[0] / size)


# --- SPD-KFAC: who inverts, and which factors travel together --------------------------------------------------------


@pytest.mark.parametrize("network", ["resnet50", "resnet152", "densenet201", "bert-base"])
@pytest.mark.parametrize("workers", [2, 4, 7, 64])
def test_kfac_places_the_largest_first_on_whom_has_least(network, workers):
    sides = [side for layer in layers_of(builtin(network)) for side in (layer.d_a, layer.d_g)]
    loads = np.zeros(workers, dtype=int)
    for side in sorted((s for s in sides if s >= 1024), reverse=True):
        loads[loads.argmin()] += side
    found = place_threshold(sides, workers, 1024)
    assert {i for i, owner in enumerate(found.owner) if owner < 0} == {i for i, s in enumerate(sides) if s < 1024}
    own = [sum(s for s, owner in zip(sides, found.owner) if owner == worker) for worker in range(workers)]
    assert sorted(own) == sorted(loads)  # who of several with equal loads is next may differ


def _fused(ready, seconds, startup):
    """Groups of a stream: the next joins if it is ready while the link is taken, or sooner than a start-up later.

    Args:
        ready: when each is ready, ascending. seconds: of the elements of each alone. startup: of a message.
    """
    groups, free = [[0]], 0.0
    for i in range(1, len(ready)):
        begins = max(free, ready[i - 1])
        ends = begins + startup + sum(seconds[j] for j in groups[-1])
        if ready[i] < ends and ready[i] < begins + startup:
            groups[-1].append(i)
        else:
            groups.append([i])
            free = ends
    return groups


@pytest.mark.parametrize("side", [0, 1])
def test_kfac_fuses_what_saves_a_start_up(side):
    draw, sizes_of_groups = np.random.default_rng(side), set()
    for _ in range(120):
        n, startup, rate = int(draw.integers(1, 60)), draw.uniform(1e-5, 1e-3), 10 ** draw.uniform(-10, -8)
        layers = [FactorLayer(str(i), int(a), int(g)) for i, (a, g) in enumerate(draw.integers(1, 500, (n, 2)))]
        steps, order = draw.exponential(10 ** draw.uniform(-5, -3), n), tuple(range(n))
        known = LayerTimes(tuple(steps), tuple(steps), (0.0,) * n, (0.0,) * n, order, order[::-1])
        costs = Costs({("AllReduce", "world", 4): Linear(startup, rate)}, {})
        order = order[::-1] if side else order
        elements = [(layers[i].d_g if side else layers[i].d_a) for i in order]
        seconds = [rate * 4 * s * (s + 1) / 2 for s in elements]  # symmetric: a half is sent
        wanted = _fused(np.cumsum(steps[list(order)]), seconds, startup)
        plan = make_plan(layers, 4, costs, known, maker=published.spd)
        found = plan.g_buckets if side else plan.a_buckets
        assert found == tuple(tuple(order[n] for n in group) for group in wanted)
        sizes_of_groups.update(map(len, found))
    assert {1, 2, 3} < sizes_of_groups


# --- DiLoCo: AdamW inside, torch's Nesterov momentum on the mean change outside --------------------------------------


def _local_steps(rank, size, every, lr, momentum):
    """The widest gap, after any step, to the weights of both ranks played in one process by torch alone."""
    nets, shape = [], (4, 6)
    for _ in range(3):
        torch.manual_seed(5)
        nets.append(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double())
    inner = [torch.optim.AdamW(net.parameters(), lr=0.02) for net in nets]
    anchor = [p.detach().clone() for p in nets[1].parameters()]
    outer, gap = torch.optim.SGD(anchor, lr=lr, momentum=momentum, nesterov=momentum > 0), 0.0
    settings = tw.Local(every, outer=tw.Nesterov(lr, momentum))
    with tw.attach(nets[0], inner[0], settings, timeout=30):
        for step in range(4 * every):
            for net, optimizer, played in zip(nets, inner, (rank, 0, 1)):
                optimizer.zero_grad()
                x = torch.randn(shape, generator=torch.Generator().manual_seed(2 * step + played))
                net(x.double()).square().mean().backward()
                optimizer.step()
            if step % every == every - 1:
                for at, p, q in zip(anchor, nets[1].parameters(), nets[2].parameters()):
                    at.grad = at - (p.detach() + q.detach()) / 2
                outer.step()
                for net in nets[1:]:
                    for p, at in zip(net.parameters(), anchor):
                        p.data.copy_(at)
            gap = max(
                gap, *(float((p - q).abs().max()) for p, q in zip(nets[0].parameters(), nets[1 + rank].parameters()))
            )
    return gap


@pytest.mark.dist
@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0)])
def test_diloco_is_torchs_nesterov_on_what_both_ranks_changed(lr, momentum):
    assert max(run(_local_steps, 2, 3, lr, momentum)) < 1e-13


# --- Once-for-all's layers are torch's, cut to size ------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [1, 5, 8])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_an_elastic_convolution_is_a_plain_one_with_the_mapped_centre(size, channels, stride):
    torch.manual_seed(0)
    elastic = ElasticDepthwise(8, (3, 5, 7)).double()
    with torch.no_grad():
        for p in elastic.parameters():
            p.normal_()
    maps, kernel = dict(elastic.maps.items()), elastic.weight.detach().clone()
    for larger, smaller in ((7, 5), (5, 3)):
        if size <= smaller:
            rows = kernel[:, 0, 1:-1, 1:-1].reshape(8, -1).numpy()
            kernel = torch.tensor(rows @ maps[f"{larger}to{smaller}"].detach().numpy().T).view(8, 1, smaller, smaller)
    x = torch.randn(2, channels, 9, 9, dtype=torch.float64)
    plain = nn.Conv2d(channels, channels, size, stride, size // 2, groups=channels, bias=False).double()
    with torch.no_grad():
        plain.weight.copy_(kernel[:channels])
    ours = conv2d(x, elastic.kernel(size, channels), stride=stride, padding=size // 2, groups=channels)
    torch.testing.assert_close(ours, plain(x), rtol=1e-12, atol=1e-12)
    ours.square().sum().backward()
    plain(x).square().sum().backward()
    if size == 7:
        torch.testing.assert_close(elastic.weight.grad[:channels], plain.weight.grad, rtol=1e-12, atol=1e-12)
    else:  # the chain rule through the last map
        last = maps["7to5" if size == 5 else "5to3"]
        rows = plain.weight.grad.view(channels, -1)
        source = elastic.kernel(size + 2, channels).detach()[:, 0, 1:-1, 1:-1].reshape(channels, -1)
        torch.testing.assert_close(last.grad, rows.T @ source, rtol=1e-12, atol=1e-10)
    assert not elastic.weight.grad[channels:].any()


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0])
def test_an_elastic_batch_norm_is_a_plain_one_of_fewer_channels(momentum):
    torch.manual_seed(0)
    elastic = ElasticBatchNorm(8, eps=1e-3, momentum=momentum).double()
    with torch.no_grad():
        elastic.weight.normal_()
        elastic.bias.normal_()
    whole = {name: x.clone() for name, x in elastic.state_dict().items()}
    for channels in (5, 8, 1, 3):
        plain = nn.BatchNorm2d(channels, eps=1e-3, momentum=momentum).double()
        plain.load_state_dict({name: x[:channels] if x.ndim else x for name, x in elastic.state_dict().items()})
        for training in (True, True, False):
            elastic.train(training).zero_grad()
            plain.train(training).zero_grad()
            x = torch.randn(4, channels, 3, 3, dtype=torch.float64)
            one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
            assert torch.equal(elastic(one), plain(two))
            elastic(one).pow(3).sum().backward()
            plain(two).pow(3).sum().backward()
            assert torch.equal(one.grad, two.grad)
            for p, q in zip(elastic.parameters(), plain.parameters()):
                assert torch.equal(p.grad[:channels], q.grad)
                assert not p.grad[channels:].any()
        seen = elastic.state_dict()
        for name, x in plain.state_dict().items():
            assert torch.equal(seen[name][:channels] if x.ndim else seen[name], x)
            if x.ndim:
                assert torch.equal(seen[name][channels:], whole[name][channels:])
        whole = {name: x.clone() for name, x in seen.items()}


# --- Parrot: how long a device takes ---------------------------------------------------------------------------------


def test_a_fit_within_its_bounds_is_numpys():
    draw, within = np.random.default_rng(0), 0
    for _ in range(200):
        n = draw.integers(1, 2000, draw.integers(2, 40)).astype(float)
        t = draw.uniform(0.01, 2) * n + draw.uniform(0, 50) + draw.normal(0, 10, n.size)
        if len(set(n)) < 2:
            continue
        slope, start = np.polyfit(n, t, 1)
        if slope > 0 and start >= 0:
            within += 1
            found = fit(n, t)
            np.testing.assert_allclose([found.a, found.b], [slope, start], rtol=1e-7, atol=1e-7)
    assert within > 120

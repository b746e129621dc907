"""Sizes of the published network: parameters, tensors, multiplications, shapes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from thinwire.systems.supernet import Space
from thinwire.systems.supernet.space import round8
from thinwire.systems.supernet.stereo import ElasticStereo


@pytest.fixture(scope="module")
def published():
    return ElasticStereo()


def size(module):
    return sum(p.numel() for p in module.parameters()), len(list(module.parameters()))


def test_parts_of_the_published_network(published):
    assert size(published) == (5_078_506, 832)
    assert size(published.features) == (3_401_360, 208)
    assert size(published.aggregation) == (1_451_704, 536)
    assert size(published.refinement) == (225_442, 88)


def test_tiny_configuration():
    assert size(ElasticStereo.tiny())[0] == 40_790


def formula(kernel, depth, expand, scales):
    """Parameters of an extracted uniform network, from the shapes alone."""
    widths, channels = [64, 32, 16, 8][:scales], [3, 24, 32, 64, 128]
    total = 2 * (54 * 16 + 32 + 9 * 16 + 32 + 6 * 2 * (9 * 32 * 32 + 64) + 289)  # both refinements
    for s in range(scales):
        for b in range(depth):
            c_in, c_out = channels[s + 1] if b else channels[s], channels[s + 1]
            m = round8(c_in * expand)
            total += m * (c_in + 2) + m * (kernel**2 + 2) + c_out * (m + 2)
            if s % 2:
                q = round8(m // 4)
                total += 2 * m * q + q + m
    for module in range(6):
        for i, d in enumerate(widths):
            total += 2 * d * d + 9 * d * d + 6 * d + (243 * d + 54 if module >= 3 else 0)
            for j, other in enumerate(widths):
                if j > i:
                    total += other * d + 2 * d
                elif j < i:
                    steps = i - j
                    total += (steps - 1) * (9 * other * other + 2 * other) + 9 * other * d + 2 * d
    return total + sum(d * d + d for d in widths)


def test_every_uniform_network_has_as_many_parameters_as_the_formula(published):
    space = Space()
    for k in space.kernels:
        for d in space.depths:
            for e in space.expands:
                for s in space.scales:
                    active = published.active_set(space.uniform(k, d, e, s))
                    extracted = formula(k, d, e, s)
                    if (k + 2 * d + 3 * e + s) % 17 == 0:  # few of them for real: extraction costs time
                        assert size(published.extract(space.uniform(k, d, e, s)))[0] == extracted
                    maps = {7: 0, 5: 625, 3: 706}[k] * d * s
                    seen = {7: 49, 5: 25, 3: 25}[k]  # of the stored kernel
                    middles = sum(round8(([3, 24, 32, 64, 128][i] if b == 0 else [24, 32, 64, 128][i]) * e)
                                  for i in range(s) for b in range(d))  # fmt: skip
                    assert active.elements == extracted + maps + middles * (seen - k * k)


@pytest.mark.parametrize(
    "values,parameters,share",
    [
        ((7, 4, 8, 4), 5_067_210, 99.8), ((7, 4, 8, 2), 1_055_638, 20.8),
        ((3, 2, 2, 4), 1_854_922, 36.9), ((3, 2, 2, 2), 781_814, 15.5),
    ],
)  # fmt: skip
def test_corners(published, values, parameters, share):
    net = published.space.uniform(*values)
    assert size(published.extract(net))[0] == parameters
    assert round(100 * published.active_set(net).share, 1) == share


@pytest.mark.parametrize(
    "values,gmac",
    [
        ((7, 4, 8, 4), 124.4),
        *(
            pytest.param(values, gmac, marks=pytest.mark.slow)
            for values, gmac in (((7, 4, 8, 2), 111.2), ((3, 2, 2, 4), 109.9), ((3, 2, 2, 2), 101.1))
        ),
    ],
)
def test_multiplications_at_576x960(published, values, gmac):
    plain = published.extract(published.space.uniform(*values)).eval().to("meta")
    view = torch.empty(1, 3, 576, 960, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(view, view)
    assert counter.get_total_flops() / 2e9 == pytest.approx(gmac, abs=0.1)


@pytest.mark.parametrize("scales", [2, 3, 4])
def test_shapes(published, scales):
    plain = published.extract(published.space.uniform(3, 2, 2, scales)).eval().to("meta")
    view = torch.empty(2, 3, 48, 96, device="meta")
    found = [tuple(x.shape) for x in plain(view, view)]
    coarse = [(2, 48 // (3 * 2**s), 96 // (3 * 2**s)) for s in reversed(range(scales))]
    assert found == [*coarse, (2, 24, 48), (2, 48, 96)]


def test_two_ratios_of_one_width_are_one_network(published):
    space = published.space
    a, b = space.uniform(3, 2, 8, 2), published.canonical(space.uniform(3, 2, 8, 2))
    assert a != b
    assert b.stages[0][0] == (3, 6)
    assert b.stages[0][1] == b.stages[1][0] == (3, 8)
    assert size(published.extract(a)) == size(published.extract(b))

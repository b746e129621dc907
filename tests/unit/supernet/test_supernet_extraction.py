"""A sub-network computes the same inside the large one and by itself, bit for bit."""

import copy
import itertools

import numpy as np
import pytest
import torch
from supernet_nets import shaken, some, tiny, views

from thinwire.systems.supernet import Space
from thinwire.systems.supernet.operators import ElasticDepthwise
from thinwire.systems.supernet.stereo import ElasticStereo, load_net, save_net


def centre(weight, size):
    edge = (weight.shape[-1] - size) // 2
    return weight[..., edge : edge + size, edge : edge + size]


def same(net, sub_net, pair):
    net.activate(sub_net)
    with torch.no_grad():
        inside, plain = net(*pair), net.extract(sub_net)(*pair)
    return len(inside) == sub_net.scales + 2 and all(torch.equal(a, b) for a, b in zip(inside, plain, strict=True))


def test_every_sub_network_of_tiny_and_its_extraction_agree_bit_for_bit():
    net = shaken(tiny()).eval()
    pair = views()
    for k in (3, 5, 7):
        for d in (1, 2):
            for e in (2, 4):
                assert same(net, net.space.uniform(k, d, e, 2), pair)
    assert all(same(net, sub_net, pair) for sub_net in some(net.space, 20))


@pytest.mark.slow
def test_corners_of_the_published_network_agree_bit_for_bit():
    torch.manual_seed(0)
    net = shaken(ElasticStereo()).eval()
    corners = [net.space.uniform(*c) for c in ((7, 4, 8, 4), (7, 4, 8, 2), (3, 2, 2, 4), (3, 2, 2, 2))]
    for sub_net in [*corners, *some(net.space, 3)[2:]]:
        assert same(net, sub_net, views(24, 48, batch=1))


def test_elastic_refinement_agrees_bit_for_bit():
    space = Space((3,), (1,), (2,), (2,), refine_widths=(4, 8), refine_depths=(1, 3))
    net = shaken(ElasticStereo(space, (8, 16), 48, 2, 1, 8, (1, 2, 4))).eval()
    sizes = set()
    for cut in [(4, 1), (4, 3), (8, 1), (8, 3)]:
        sub_net = space.uniform(3, 1, 2, 2, cut)
        assert same(net, sub_net, views())
        sizes.add(sum(p.numel() for p in net.extract(sub_net).parameters()))
    assert len(sizes) == 4


def test_an_extracted_network_survives_its_state_dict():
    net = shaken(tiny()).eval()
    sub_net = some(net.space, 1)[2]
    plain, other = net.extract(sub_net), shaken(tiny(1)).eval().extract(sub_net)
    assert not torch.equal(plain(*views())[-1], other(*views())[-1])
    other.load_state_dict(plain.state_dict())
    assert torch.equal(plain(*views())[-1], other(*views())[-1])
    assert not any("Elastic" in type(m).__name__ for m in plain.features.modules())


def test_extraction_copies():
    net = tiny().eval()
    plain = net.extract(net.space.largest)
    before = plain(*views())[-1]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    assert torch.equal(before, plain(*views())[-1])


def test_networks_survive_files(tmp_path):
    net = shaken(tiny()).eval()
    save_net(net, tmp_path / "net.pt")
    other = load_net(tmp_path / "net.pt").eval()
    assert torch.equal(net(*views())[-1], other(*views())[-1])
    assert other.space == net.space


def test_a_network_made_of_numpy_numbers_survives_files(tmp_path):
    net = tiny()
    net.config = {name: np.int64(x) if type(x) is int else x for name, x in net.config.items()}
    assert any(isinstance(x, np.int64) for x in net.config.values())
    save_net(net, tmp_path / "net.pt")
    assert load_net(tmp_path / "net.pt").config == net.config


@pytest.mark.parametrize("segmented", [False, True])
def test_sorting_channels_does_not_change_the_function(segmented):
    net = shaken(tiny(dtype=torch.float64)).eval()
    before = net(*views(dtype=torch.float64))
    other = copy.deepcopy(net)
    other.sort_channels(segmented)
    assert any(not torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))
    for a, b in zip(before, other(*views(dtype=torch.float64))):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    block = other.features[1][1]
    norms = block.project.weight.abs().sum((0, 2, 3))
    edges = [0, 32, 64] if segmented else [0, 64]
    for start, end in itertools.pairwise(edges):
        assert (norms[start:end].diff() <= 0).all()
    assert segmented == bool((norms.diff() > 0).any())


def test_maps_at_the_start_are_a_crop():
    kernels = ElasticDepthwise(8, (3, 5, 7))
    with torch.no_grad():
        kernels.weight.normal_()
    for size in (3, 5, 7):
        assert torch.equal(kernels.kernel(size, 4), centre(kernels.weight[:4], size))


@pytest.mark.parametrize("size,seen", [(3, 5), (5, 5), (7, 7)])
def test_gradients_of_small_kernels_stay_in_the_centre(size, seen):
    kernels = ElasticDepthwise(8, (3, 5, 7))
    with torch.no_grad():
        for p in kernels.parameters():
            p.normal_()
    kernels.kernel(size, 6).square().sum().backward()
    touched = kernels.weight.grad.abs().sum((0, 1)) > 0
    assert int(touched.sum()) == seen * seen
    assert centre(touched, seen).all()
    assert not kernels.weight.grad[6:].any()
    assert (kernels.maps["7to5"].grad is not None) == (size < 7)
    assert (kernels.maps["5to3"].grad is not None) == (size == 3)

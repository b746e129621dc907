"""Deformable convolution, warp and cost volume against loops, shifts and plain convolutions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from supernet_nets import views

from thinwire.systems.supernet.stereo.layers import (
    DeformConv,
    Refinement,
    correlation,
    deform_conv2d,
    soft_argmax,
    torchvision_kernel,
    warp,
)

DOUBLE = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def test_without_offset_it_is_a_convolution():
    x, w = draw(2, 4, 7, 9), draw(6, 4, 3, 3, seed=1)
    offset, mask = torch.zeros(2, 36, 7, 9, dtype=DOUBLE), torch.ones(2, 18, 7, 9, dtype=DOUBLE)
    torch.testing.assert_close(
        deform_conv2d(x, offset, mask, w, 2), F.conv2d(x, w, padding=2, dilation=2), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("down,right", [(1, 0), (0, -2), (-1, 3), (50, 0)])
def test_whole_offsets_are_shifts(down, right):
    x, w = draw(1, 4, 8, 9), draw(4, 4, 3, 3, seed=1)
    offset = torch.tensor([down, right] * 18, dtype=DOUBLE).view(1, 36, 1, 1).expand(1, 36, 8, 9)
    mask = torch.ones(1, 18, 8, 9, dtype=DOUBLE)
    padded = F.pad(x, (60, 60, 60, 60))
    shifted = padded[:, :, 60 + down - 2 : 70 + down, 60 + right - 2 : 71 + right]
    expected = F.conv2d(shifted, w, dilation=2)
    torch.testing.assert_close(deform_conv2d(x, offset, mask, w, 2), expected, rtol=1e-12, atol=1e-12)


def test_gradients():
    x, w = draw(1, 2, 4, 5).requires_grad_(), draw(2, 2, 3, 3, seed=1).requires_grad_()
    offset = (
        0.3 + 0.4 * torch.rand(1, 36, 4, 5, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    ).requires_grad_()
    mask = draw(1, 18, 4, 5, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: deform_conv2d(*a, 1), (x, offset, mask, w))


def test_torchvision_computes_the_same_where_it_loads():
    if torchvision_kernel() is None:
        pytest.skip("torchvision does not load here")
    x, w, offset, mask = (
        draw(2, 4, 7, 9),
        draw(6, 4, 3, 3, seed=1),
        draw(2, 36, 7, 9, seed=2),
        draw(2, 18, 7, 9, seed=3),
    )
    theirs = torchvision_kernel()(x, offset, w, padding=2, dilation=2, mask=mask)
    torch.testing.assert_close(deform_conv2d(x, offset, mask, w, 2), theirs, rtol=1e-12, atol=1e-12)


def test_a_new_layer_is_a_dilated_convolution():
    layer = DeformConv(8)
    with torch.no_grad():
        layer.weight.normal_()
        layer.offset.weight.zero_()
        layer.offset.bias.zero_()
    x = torch.randn(1, 8, 5, 6)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, padding=2, dilation=2), rtol=1e-4, atol=1e-4)


@given(st.integers(0, 47))
@settings(max_examples=20, deadline=None)
def test_whole_disparities_shift(d):
    image = views()[0]
    found = warp(image, torch.full((2, 24, 48), float(d)))
    assert torch.equal(found[..., d:], image[..., : 48 - d])
    assert torch.equal(found[..., :d], image[..., :1].expand(-1, -1, -1, d))


def test_half_a_pixel_is_the_mean_of_two():
    image = views()[0]
    found = warp(image, torch.full((2, 24, 48), 2.5))
    torch.testing.assert_close(found[..., 3:], (image[..., :45] + image[..., 1:46]) / 2)


def test_the_warp_has_the_gradient_of_its_slope():
    image = draw(1, 2, 3, 12)
    disparity = (1.3 + torch.zeros(1, 3, 12, dtype=DOUBLE)).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: warp(image, d), (disparity,))


def test_volume_is_the_triple_loop():
    left, right = draw(1, 3, 4, 7), draw(1, 3, 4, 7, seed=1)
    volume = correlation(left, right, 9)
    assert volume.shape == (1, 9, 4, 7)
    for d in range(9):
        for y in range(4):
            for x in range(7):
                wanted = float((left[0, :, y, x] * right[0, :, y, x - d]).mean()) if x >= d else 0.0
                assert float(volume[0, d, y, x]) == pytest.approx(wanted, abs=1e-12)


def test_soft_argmax_of_one_sure_candidate_is_exact():
    volume = torch.full((1, 12, 3, 4), -1e4)
    volume[:, 7] = 1e4
    assert torch.equal(soft_argmax(volume), torch.full((1, 3, 4), 7.0))
    assert torch.allclose(soft_argmax(torch.zeros(1, 12, 3, 4)), torch.full((1, 3, 4), 5.5))


def test_refinement_scales_disparity_with_the_width():
    step = Refinement(8, (1, 2)).eval()
    with torch.no_grad():
        step.last.weight.zero_()
        step.last.bias.zero_()
    for width, ratio in ((24, 1.5), (32, 2.0)):
        view = torch.randn(1, 3, 12, width)
        found = step(torch.full((1, 8, 16), 3.0), view, view)
        torch.testing.assert_close(found, torch.full((1, 12, width), 3.0 * ratio))

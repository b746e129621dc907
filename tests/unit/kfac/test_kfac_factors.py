"""Factors against their definition, and against closed forms of the Fisher matrix."""

import itertools

import pytest
import torch
from layers_by_hand import conv_factors, mlp, run_once
from torch import nn

from thinwire.core.kernels.symmetric import unpack_upper
from thinwire.systems.kfac.factors import LayerSums, input_rows
from thinwire.systems.kfac.layers import find_layers


def factors_of(module, x, g, scaling="reference", tokens="expand", parts=1):
    layer = find_layers(module)[0][0]
    sums = LayerSums(layer, scaling, tokens)
    for x_part, g_part in zip(x.chunk(parts), g.chunk(parts)):
        sums.add_input(x_part)
        sums.add_gradient(g_part)
        sums.new_pass()
    return [unpack_upper(sums.statistic(side)[:-1]) for side in (0, 1)]


CONVS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "bias": False, "padding": 1},
    {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 2, "dilation": (2, 1), "padding": 1, "stride": 2},
]


@pytest.mark.parametrize("options", CONVS)
def test_convolutions_are_the_triple_loop(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, **options).double()
    x = torch.randn(3, 2, 6, 5).double()
    g = run_once(conv, x)
    a, gg = factors_of(conv, x, g)
    wanted = conv_factors(conv, x, g, conv.bias is not None)
    torch.testing.assert_close(a, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gg, wanted[1], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("options, mode", [
    ({"padding": "same"}, "zeros"), ({"padding": "same"}, "circular"), ({"padding": "same", "dilation": 2}, "reflect"),
    ({"padding": "same", "dilation": 2}, "replicate"), ({"padding": "valid"}, "zeros"),
])  # fmt: skip
def test_patches_give_the_convolution_back(options, mode):
    """Whatever the padding, weight times patch is the layer's output."""
    conv = nn.Conv2d(2, 3, (2, 3), bias=False, padding_mode=mode, **options).double()
    x = torch.randn(2, 2, 7, 6).double()
    out = input_rows(conv, x) @ conv.weight.flatten(1).mT
    torch.testing.assert_close(out.view(2, -1, 3).mT.reshape(conv(x).shape), conv(x))


@pytest.mark.parametrize("module, shape", [(nn.Linear(4, 3), (5, 7, 4)), (nn.Conv2d(2, 3, 2), (5, 2, 4, 4))])
def test_ratios_of_the_scalings(module, shape):
    module = module.double()
    x = torch.randn(shape).double()
    g = run_once(module, x)
    batch, t = 5, g.numel() // (5 * 3)
    found = {s: factors_of(module, x, g, s) for s in ("reference", "authors", "kaisa")}
    for side, ratios in ((0, (t**-2, t**-3)), (1, (t**2, 1 / (batch**2 * t**2)))):
        for name, ratio in zip(("authors", "kaisa"), ratios):
            torch.testing.assert_close(found[name][side], found["reference"][side] * ratio, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.kron(*found["authors"]), torch.kron(*found["reference"]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", ["expand", "reduce"])
def test_micro_batches_and_tokens(tokens):
    module = nn.Linear(4, 3).double()
    x = torch.randn(6, 5, 4).double()
    g = run_once(module, x)
    whole, parts = factors_of(module, x, g, tokens=tokens), factors_of(module, x, g, tokens=tokens, parts=3)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    if tokens == "reduce":
        rows = torch.cat([x.mean(1), torch.ones(6, 1).double()], 1)
        torch.testing.assert_close(whole[0], rows.mT @ rows / 6)
        own = 6 * g.sum(1)
        torch.testing.assert_close(whole[1], own.mT @ own / 6)


def test_deep_linear_nets_have_exactly_this_fisher():
    """A Gaussian output of unit variance: the block of a layer is A kron G, from unit vectors in place of noise."""
    net = mlp(4, 5, 3, 2, activation=nn.Identity)
    x = torch.randn(6, 4).double()
    layers, _ = find_layers(net)
    for layer in layers:
        inputs, jacobian = {}, []
        hook = layer.module.register_forward_hook(lambda m, a, out, seen=inputs: seen.update(a=a[0].detach(), out=out))
        out = net(x)
        hook.remove()
        fisher = 0
        for b, k in itertools.product(range(6), range(2)):
            dw, db = torch.autograd.grad(out[b, k], (layer.weight, layer.bias), retain_graph=True)
            row = torch.cat([dw, db[:, None]], 1).mT.reshape(-1)  # columns stacked
            fisher = fisher + torch.outer(row, row) / 6
        for k in range(2):
            jacobian.append(torch.autograd.grad(out[:, k].sum(), inputs["out"], retain_graph=True)[0])
        sums = LayerSums(layer, "reference", "expand")
        sums.add_input(inputs["a"])
        for g in jacobian:  # one draw of the noise after another, each the whole batch
            sums.add_gradient(g / 6, sampled=True)
        a, g = (unpack_upper(sums.statistic(side)[:-1]) for side in (0, 1))
        torch.testing.assert_close(torch.kron(a, 2 * g), fisher, rtol=1e-12, atol=1e-12)  # the mean over two draws


def test_one_example_behind_a_relu():
    """With one example the empirical Fisher block is the outer product of the gradient, exactly A kron G."""
    net = mlp(4, 5, 3, activation=nn.ReLU)
    x, layers = torch.randn(1, 4).double(), find_layers(net)[0]
    seen = {}
    for i, layer in enumerate(layers):
        layer.module.register_forward_hook(
            lambda m, a, out, i=i: seen.update({i: (a[0].detach(), out.retain_grad() or out)})
        )
    net(x).square().sum().backward()
    for i, layer in enumerate(layers):
        a, g = factors_of(layer.module, seen[i][0], seen[i][1].grad)
        row = layer.gradient().mT.reshape(-1)
        torch.testing.assert_close(torch.kron(a, g), torch.outer(row, row), rtol=1e-12, atol=1e-12)


def test_which_layers():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 9))
    layers, notes = find_layers(net, skip_layers=["4"])
    assert [(x.name, x.shape.d_a, x.shape.d_g) for x in layers] == [("0", 28, 4), ("3", 5, 5)]
    assert notes == []
    layers, notes = find_layers(net, max_dim=9)
    assert [x.name for x in layers] == ["3", "4"]
    assert "0" in notes[0]
    net[3].bias.requires_grad_(False)
    assert find_layers(net, max_dim=9)[0][0].shape.d_a == 4
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable"):
        find_layers(net)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "0 has groups=2.*skip_layers"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3)), "0 is a transposed.*skip_layers"),
        (lambda: tied(), "1 shares its weight.*skip_layers"),
    ],
)
def test_layers_that_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        find_layers(make())


def tied():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    net[1].weight = net[0].weight
    return net

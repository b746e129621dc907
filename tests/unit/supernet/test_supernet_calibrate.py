import pytest
import torch
from supernet_nets import dots, shaken, tiny
from torch import nn

from thinwire.core.program import Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.executors.alone import run_alone
from thinwire.systems.supernet.stereo import calibrate, evaluate
from thinwire.systems.supernet.stereo.evaluation import active_norms, constant_guess


def statistics(net):
    return {name: b.clone() for name, b in net.named_buffers()}


def test_statistics_are_means_of_batch_means_and_biased_variances():
    net = shaken(tiny())
    sub_net, batches, seen = net.space.uniform(5, 1, 2, 2), dots(10, size=4), []
    norm = net.features[1][0].norm2
    handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().double()))
    run_alone(calibrate(net, sub_net, batches))
    handle.remove()
    assert [x.shape[0] for x in seen] == [4, 4, 4, 4, 2, 2]  # both views of each batch
    mean = sum(x.shape[0] * x.mean((0, 2, 3)) for x in seen) / 20
    var = sum(x.shape[0] * x.var((0, 2, 3), unbiased=False) for x in seen) / 20
    c = seen[0].shape[1]
    torch.testing.assert_close(norm.running_mean[:c].double(), mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm.running_var[:c].double(), var, rtol=1e-6, atol=1e-7)


def test_nothing_but_the_statistics_it_uses_changes():
    net = shaken(tiny()).eval()
    net.features[0].train()
    sub_net, before, weights = net.space.smallest, statistics(net), [p.clone() for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    run_alone(calibrate(net, sub_net, dots(8)))
    once = statistics(net)
    channels = {id(norm): c for norm, c in active_norms(net, sub_net)}
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))
    assert modes == [m.training for m in net.modules()]
    changed = 0
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            c = channels.get(id(module), 0)
            for key in ("running_mean", "running_var"):
                assert torch.equal(once[f"{name}.{key}"][c:], before[f"{name}.{key}"][c:])
                changed += c > 0 and not torch.equal(once[f"{name}.{key}"], before[f"{name}.{key}"])
            assert torch.equal(once[f"{name}.num_batches_tracked"], before[f"{name}.num_batches_tracked"])
    assert changed == 2 * len(channels)
    run_alone(calibrate(net, sub_net, dots(8)))
    assert all(torch.equal(x, once[name]) for name, x in statistics(net).items())


def test_many_ranks_find_what_one_finds():
    size, batches = 3, dots(12, size=2)
    alone = shaken(tiny())
    run_alone(calibrate(alone, alone.space.largest, batches))
    score = run_alone(evaluate(alone, alone.space.largest, batches))
    nets, found = [shaken(tiny()) for _ in range(size)], [None] * size
    run_lockstep([calibrate(n, n.space.largest, batches[r::size]) for r, n in enumerate(nets)], Topology(size))
    for n in nets:
        for name, x in statistics(n).items():
            torch.testing.assert_close(x, statistics(alone)[name], rtol=1e-6, atol=1e-7)

    def keep(r):
        found[r] = yield from evaluate(nets[r], nets[r].space.largest, batches[r::size])

    run_lockstep([keep(r) for r in range(size)], Topology(size))
    for metrics in found:
        assert metrics.pixels == score.pixels
        assert metrics.epe == pytest.approx(score.epe, rel=1e-4)


def test_a_rank_without_batches_takes_part():
    nets = [shaken(tiny()), shaken(tiny())]
    run_lockstep([calibrate(n, n.space.smallest, dots(4) if r else []) for r, n in enumerate(nets)], Topology(2))
    assert all(torch.equal(a, b) for a, b in zip(statistics(nets[0]).values(), statistics(nets[1]).values()))


def test_evaluation_leaves_the_mode_and_the_guess_is_the_median():
    net = tiny().train()
    run_alone(evaluate(net, net.space.smallest, dots(4)))
    assert net.training
    held = dots(8)
    known = torch.cat([b.disparity.flatten() for b in held])
    known = known[known.isfinite()]
    guesses = [float((known - c).abs().mean()) for c in range(2, 10)]
    assert constant_guess(held, 48) <= min(guesses) + 1e-6

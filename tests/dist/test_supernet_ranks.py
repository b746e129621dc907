"""Elastic training on real ranks: one reduction of what was touched, the same numbers as without the savings."""

import pytest
import supernet_cases as cases
import torch

import thinwire as tw
from spawned import run
from thinwire.systems.supernet import ActiveSet, ScheduleMismatch, Space
from thinwire.systems.supernet.stereo import (
    Phase,
    RandomDots,
    SupernetTrainer,
    pyramid_loss,
    short,
    shrink,
)

pytestmark = pytest.mark.dist


def _trained(rank, size, steps, batch, options):
    net, trainer, reports = cases.train(rank, size, steps, batch, **options)
    stats = trainer.sync.stats()
    trainer.close()
    return cases.weights(net), [r.elements for r in reports], stats.bytes_sent, stats.dense_bytes


@pytest.mark.parametrize("sampling", ["shared", "per-rank"])
def test_active_is_dense_bit_for_bit_and_sends_four_bytes_an_element(sampling):
    options = {"sampling": sampling}
    active = run(_trained, 2, 3, 2, options)
    dense = run(_trained, 2, 3, 2, {**options, "method": "dense"})
    for (a, elements, sent, whole), (b, _, all_of_it, _) in zip(active, dense):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        checks = 3 * 8  # a hash of eight bytes to the one other rank
        assert sent == 4 * sum(elements) + checks
        assert all_of_it == whole == 3 * 4 * 40_790
        assert sent < whole
    assert all(torch.equal(x, y) for x, y in zip(active[0][0], active[1][0]))


def test_many_ranks_train_as_one_with_the_whole_batch():
    options = {"dtype": torch.float64, "frozen": True, "loss_over": "world"}
    one = _trained(0, 1, 3, 4, options)[0]
    for found in run(_trained, 2, 3, 2, options):
        for a, b in zip(found[0], one):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def _mismatch(rank, size):
    said = []
    net, trainer, _ = cases.train(rank, size, 1, 2)
    good = ActiveSet.union([net.active_set(n) for n in trainer.draws(1, 0)])
    method = trainer.sync.services.method
    for step, active in ((1, good if rank else net.active_set(net.space.smallest)), (1 + rank, good)):
        try:
            method.announce(active, trainer.sync, step)
        except ScheduleMismatch as error:
            said.append(str(error))
    trainer.step(cases.batch_of(1, 2, rank, size), 1)  # nothing was sent, nothing is broken
    trainer.close()
    other = SupernetTrainer(net, cases.PHASE, torch.optim.SGD(net.parameters(), lr=0.1), seed=rank)
    try:
        other.step(cases.batch_of(0, 2, rank, size), 0)
    except ScheduleMismatch as error:
        said.append(str(error))
    other.close()
    return said


def test_ranks_that_would_reduce_different_parts_all_raise():
    for said in run(_mismatch, 2):
        assert len(said) == 3
        assert all("different sub-networks" in text and "rank 1: " in text for text in said)


@pytest.mark.parametrize("divisor", ["world", "participants"])
def test_per_rank_sampling_averages_what_single_processes_find(divisor):
    options = {"sampling": "per-rank", "divisor": divisor, "dtype": torch.float64, "frozen": True, "momentum": 0.0}
    found = run(_trained, 2, 1, 2, options)
    start, total, count = cases.net_of(torch.float64).eval(), {}, {}
    for rank in range(2):
        net = cases.net_of(torch.float64).eval()
        batch = cases.batch_of(0, 2, rank, 2, torch.float64)
        drawn = [cases.PHASE.draw(0, 0, rank * 2 + j) for j in range(2)]
        for n in drawn:
            net.activate(n)
            pyramid_loss(net(batch.left, batch.right), batch.disparity, 48).backward()
        own = ActiveSet.union([net.active_set(n) for n in drawn])
        for name, p in net.named_parameters():
            used = torch.zeros_like(p)
            if own.rect(name) is not None:
                used[own.rect(name)] = 1
            count[name] = count.get(name, 0) + used
            total[name] = total.get(name, 0) + (0 if p.grad is None else p.grad)
    differ = 0
    for result in found:
        for (name, p), after in zip(start.named_parameters(), result[0]):
            by = 2 if divisor == "world" else count[name].clamp_min(1)
            torch.testing.assert_close(after, p - 0.05 * total[name] / by, rtol=1e-12, atol=1e-12)
            differ += int((count[name] == 1).sum())
    assert differ > 0


def _first_only(rank, size):
    """A weight that only the first of two sub-networks uses."""
    net = cases.net_of()
    large = Phase("x", Space((7,), (2,), (4,), (2,)), 10, 0.1)
    trainer = SupernetTrainer(net, large, torch.optim.SGD(net.parameters(), lr=0.1))
    nets = [net.space.largest, net.space.smallest]
    trainer.sync.services.method.announce(ActiveSet.union([net.active_set(n) for n in nets]), trainer.sync, 0)
    batch = cases.batch_of(0, 2, rank, size)
    with trainer.sync.no_sync():
        for n in nets:
            net.activate(n)
            pyramid_loss(net(batch.left, batch.right), batch.disparity, 48).backward()
    own = net.features[1][1].expand.weight.grad.clone()
    trainer.sync.synchronize()
    found = net.features[1][1].expand.weight.grad.clone()
    trainer.close()
    return own, found


def test_what_only_an_earlier_sub_network_used_is_reduced_too():
    results = run(_first_only, 2)
    mean = (results[0][0] + results[1][0]) / 2
    for _, found in results:
        torch.testing.assert_close(found, mean)
        assert found.any()


def test_another_method_runs_on_the_active_part():
    found = run(_trained, 2, 3, 2, {"method": tw.TopK(density=0.05)})
    assert all(torch.equal(x, y) for x, y in zip(found[0][0], found[1][0]))
    assert found[0][2] < 4 * sum(found[0][1])  # less than the active part whole


def _resumed(rank, size, folder, stop):
    net = cases.net_of()

    def kill(phase, step, report):
        if stop is not None and (phase.name, step) == ("shrink", stop):
            raise KeyboardInterrupt

    try:
        shrink(net, RandomDots(12, 24, 48, 9), short(net.space, 2, 4), batch=1, method="active", sampling="per-rank",
               checkpoint_dir=folder, checkpoint_every=1, on_step=kill)  # fmt: skip
    except KeyboardInterrupt:
        return None
    return cases.weights(net)


@pytest.mark.slow
def test_a_run_on_two_ranks_goes_on_bit_for_bit(tmp_path):
    whole = run(_resumed, 2, str(tmp_path / "a"), None)
    run(_resumed, 2, str(tmp_path / "b"), 2)
    again = run(_resumed, 2, str(tmp_path / "b"), None)
    for a, b in zip(whole, again):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def _expect(rank, size):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    sync = tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd", fusion="none")
    x, said = torch.full((2, 4), 1.0 + rank), []
    sync.services.expect(["2.weight", "2.bias"])
    net[2](x).sum().backward()
    found = net[2].weight.grad.clone(), net[0].weight.grad
    for names in (["nothing"], ["2.weight"]):  # the first is unknown, the second too few
        try:
            sync.services.expect(names)
            net[2](x).sum().backward()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    sync.close()
    return found, said


def test_only_what_is_expected_may_arrive():
    for (used, unused), said in run(_expect, 2):
        assert torch.equal(used, torch.full((4, 4), 3.0))  # two samples of 1 and of 2
        assert unused is None
        assert "nothing" in said[0]
        assert "2.bias received a gradient, but expect() did not name it" in said[1]

"""Training on one rank: resumable bit for bit, and it learns."""

import pytest
import torch
from supernet_nets import tiny

from thinwire.engine.state import checkpoint
from thinwire.systems.supernet.stereo import Phase, RandomDots, batches, short, shrink
from thinwire.systems.supernet.stereo.evaluation import Calibrated, constant_guess
from thinwire.systems.supernet.stereo.training import adam

DATA = RandomDots(12, 24, 48, 9)


class Killed(Exception):
    pass


def phases(net):
    return short(net.space, 3, 4)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    whole = tiny()
    shrink(whole, DATA, phases(whole), batch=2, checkpoint_dir=tmp_path / "a", checkpoint_every=2)
    for stop in [("large", 2), ("shrink", 0)]:
        folder = tmp_path / "-".join(map(str, stop))

        def kill(phase, step, report, stop=stop):
            if (phase.name, step) == stop:
                raise Killed

        net = tiny()
        with pytest.raises(Killed):
            shrink(net, DATA, phases(net), batch=2, checkpoint_dir=folder, checkpoint_every=2, on_step=kill)
        other = tiny(seed=9)  # weights come from the checkpoint
        report = shrink(other, DATA, phases(other), batch=2, checkpoint_dir=folder, checkpoint_every=2)
        assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), other.state_dict().values())), stop
        assert sum(p.done for p in report.phases) == {"large": 5, "shrink": 4}[stop[0]]
    again = tiny(seed=9)
    report = shrink(again, DATA, phases(again), batch=2, checkpoint_dir=tmp_path / "a", checkpoint_every=2)
    assert [p.done for p in report.phases] == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters()))
    assert [path.name for path in checkpoint.complete(tmp_path / "a" / "1-shrink")] == [
        "step-000000002",
        "step-000000004",
    ]
    with pytest.raises(ValueError, match="give as many steps"):
        shrink(tiny(), DATA, short(again.space, 3, 3), batch=2, checkpoint_dir=tmp_path / "a")


def test_weights_that_a_step_does_not_use_stay():
    net = tiny()
    space = type(net.space)((3,), (1,), (2,), (2,))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    shrink(net, DATA, [Phase("small", space, 2, 1e-2)], batch=2)
    active = net.active_set(space.largest)
    moved = 0
    for name, p in net.named_parameters():
        rest, old = p.detach().clone(), before[name].clone()
        if (rect := active.rect(name)) is not None:
            moved += int((rest[rect] != old[rect]).any())
            rest[rect] = old[rect] = 0
        assert torch.equal(rest, old), name
    assert moved > 0.8 * sum(active.rect(name) is not None for name in before)


def test_decay_is_on_weights_and_maps_alone():
    net = tiny()
    decayed, others = (group["params"] for group in adam(net, 1e-3).param_groups)
    assert len(decayed) + len(others) == len(list(net.parameters()))
    names = {id(p): name for name, p in net.named_parameters()}
    assert all(p.ndim >= 2 for p in decayed)
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") or ".1." in names[id(p)] for p in others)
    assert any("maps" in names[id(p)] for p in decayed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shrinking_beats_the_constant_guess_at_every_corner():
    net = tiny()
    held = list(batches(RandomDots(32, 48, 96, 15, seed=99), 8))
    score = Calibrated(net, list(batches(RandomDots(80, 48, 96, 15, seed=5), 20)), held)
    data, guess = RandomDots(4096, 48, 96, 15), constant_guess(held, 48)
    large, shrinking = short(net.space, 300, 300)
    shrink(net, data, [large])
    first = [score.metrics(net.space.uniform(*c)).epe for c in ((7, 2, 4, 2), (3, 1, 2, 2))]
    shrink(net, data, [shrinking])
    last = [score.metrics(net.space.uniform(*c)).epe for c in ((7, 2, 4, 2), (3, 1, 2, 2))]
    print(f"constant {guess:.2f}; after large {first}; after shrinking {last}")
    assert max(last) < min(0.8, guess / 2)
    assert last[1] < first[1]

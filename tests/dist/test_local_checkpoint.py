"""Checkpoints under local steps: each rank's own model at the same size, the outer weights at another."""

import pathlib

import cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from spawned import run
from thinwire.engine.local import Local, Nesterov

pytestmark = pytest.mark.dist

SETTINGS = {
    "averaged": Local(4),
    "averaged, late": Local(4, fragments=2, fragment_sync_delay=3),
    "diloco": Local(4, tw.Cast("int8"), outer=Nesterov(0.7, 0.5, ramp_rounds=3)),
    "low rank, late": Local(4, tw.ACP(rank=2, min_rate=1.0), outer=Nesterov(0.7, 0.5), fragments=2,
                            fragment_sync_delay=3),
    "top-k, late": Local(4, tw.TopK(0.1), fragments=3, fragment_sync_delay=2),
    "looking": Local(3, tw.Cast("int2"), fragment_sync_delay=1, look=tw.Look()),
    "mixed": Local(3, tw.PowerSGD(rank=2, min_rate=1.0), fragment_sync_delay=2, fragment_update_alpha=0.5),
}  # fmt: skip
STOPS = {"averaged": (5, 8), "averaged, late": (9,), "diloco": (8, 10), "low rank, late": (9,), "top-k, late": (5, 10)}
STOPS |= {
    "looking": (7,),
    "mixed": (8,),
}  # between rounds, at their ends, and with something under way


def _job(settings, **attach):
    """With statistics, so that buffers travel too."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(24, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    options = {"start_compression_step": 0, "keep_dense": "none"} | attach
    return net, optimizer, tw.attach(net, optimizer, settings, **options)


def _all(net):
    return [x.detach().clone() for x in net.state_dict().values()]


def _outer(net, sync):
    with sync.outer_weights():
        return cases.weights(net)


def _same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _resume(rank, size, folder):
    rows = []
    for name, settings in SETTINGS.items():
        net, optimizer, sync = _job(settings)
        cases.walk(net, optimizer, rank, 0, 14)
        through, outer = _all(net), _outer(net, sync)
        sync.close()
        for stop in STOPS[name][-1:]:
            at = f"{folder}/{name}-{stop}"
            net, optimizer, sync = _job(settings)
            cases.walk(net, optimizer, rank, 0, stop)
            tw.checkpoint.save(at, net, optimizer, sync, stop)
            cases.walk(net, optimizer, rank, stop, 14)
            saved = _same(through, _all(net))
            sync.close()
            net, optimizer, sync = _job(settings)
            cases.walk(net, optimizer, rank, 0, 6)  # what is under way here is not what was under way there
            assert tw.checkpoint.load(at, net, optimizer, sync) == stop
            cases.walk(net, optimizer, rank, stop, 14)
            rows.append((name, stop, saved, _same(through, _all(net)), _same(outer, _outer(net, sync))))
            sync.close()
    return rows


def test_training_goes_on_bit_for_bit_from_any_moment(tmp_path):
    for rows in run(_resume, 2, str(tmp_path), seconds=250):
        for name, stop, *same in rows:
            assert same == [True, True, True], f"{name}, saved after step {stop}"


def _save(rank, size, folder):
    rows = {}
    for name, settings in SETTINGS.items():
        for stop in STOPS[name]:
            net, optimizer, sync = _job(settings)
            cases.walk(net, optimizer, rank, 0, stop)
            tw.checkpoint.save(f"{folder}/{name}-{stop}", net, optimizer, sync, stop)
            rows[name, stop] = _outer(net, sync), sync.state_dict()
            sync.close()
    return rows


def _load(rank, size, folder):
    rows = {}
    for name, settings in SETTINGS.items():
        for stop in STOPS[name]:
            net, optimizer, sync = _job(settings)
            tw.checkpoint.load(f"{folder}/{name}-{stop}", net, optimizer, sync)
            weights, outer, state = _all(net), _outer(net, sync), sync.state_dict()
            moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
            cases.walk(net, optimizer, rank, stop, stop + 6)
            rows[name, stop] = weights, outer, state, moments, _outer(net, sync)
            sync.close()
    return rows


def _merged(settings, fragment):
    """The outer weights of a saved fragment after what was under way has been merged, and its momenta."""
    outer, momenta, mean = fragment["anchors"], fragment["momenta"], fragment["mean"]
    if mean is None:
        return outer, momenta
    if settings.averages:
        return mean, momenta
    if settings.outer is None:
        return [x - m for x, m in zip(outer, mean)], momenta
    beta = settings.outer.momentum_at(fragment["rounds"] - fragment["rejected"] - 1)
    momenta = [beta * v + m for v, m in zip(momenta, mean)]
    return [x - settings.outer.lr * (m + beta * v) for x, v, m in zip(outer, momenta, mean)], momenta


def _owed(state):
    found = {}
    for key, value in state.items():
        if key.startswith("residual/"):
            found[key.split("/", 2)[2]] = value
    return found


@pytest.mark.parametrize("old, new", [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow), (2, 1)])
def test_another_number_of_ranks_begins_from_the_outer_weights(tmp_path, old, new):
    before = run(_save, old, str(tmp_path), seconds=250)
    after = run(_load, new, str(tmp_path), seconds=250)
    seen = set()
    for key in before[0]:
        label = f"{key}, {old} to {new}"
        settings, (outer, state) = SETTINGS[key[0]], before[0][key]
        merged = [_merged(settings, fragment) for fragment in state["outer"]["fragments"]]
        expected = [x for weights, _ in merged for x in weights]
        momenta = [x for _, some in merged for x in some]
        if any(fragment["due"] is not None for fragment in state["outer"]["fragments"]):
            seen.add("under way")
            assert not _same(expected, outer), label
        else:
            assert _same(expected, outer), label
        saved = torch.load(tmp_path / f"{key[0]}-{key[1]}" / f"step-{key[1]:09d}" / "model.pt", weights_only=True)
        assert _same([x for name, x in saved["model"].items() if name in _parameters()], outer), label
        mean = {}
        for _, one in (rank[key] for rank in before):
            for name, x in _owed(one).items():
                mean[name] = mean.get(name, 0) + x.double() / old
        for rank in after:
            weights, at_start, found, moments, later = rank[key]
            torch.testing.assert_close(at_start, expected, rtol=1e-6, atol=1e-7, msg=label)
            assert _same([x for name, x in zip(saved["model"], weights) if name in _parameters()], at_start), label
            fragments = found["outer"]["fragments"]
            assert all(fragment["due"] is None for fragment in fragments), label
            kept = [x for fragment in fragments for x in fragment["momenta"]]
            torch.testing.assert_close(kept, momenta, rtol=1e-6, atol=1e-7, msg=label)
            assert _owed(found).keys() == mean.keys(), label
            for name, x in _owed(found).items():
                seen.add("owed")
                torch.testing.assert_close(x.double(), mean[name], rtol=1e-5, atol=1e-7, msg=label)
            assert _same(moments, [one["exp_avg"] for one in saved["optimizer"]["state"].values()]), label
            assert _same(weights, after[0][key][0]), label  # statistics too
            assert _same(later, after[0][key][4]), label
            assert not _same(later, at_start), label
    assert seen == {"under way", "owed"}


def _parameters():
    return {f"{layer}.{kind}" for layer in (0, 1, 3, 5) for kind in ("weight", "bias")}


def _train_and_save(rank, size, folder, name):
    net, optimizer, sync = _job(SETTINGS[name])
    step = tw.checkpoint.load(folder, net, optimizer, sync) or 0
    begun = _outer(net, sync)
    cases.walk(net, optimizer, rank, step, step + 5)
    tw.checkpoint.save(folder, net, optimizer, sync, step + 5)
    left, owed = _outer(net, sync), _owed(sync.state_dict())
    sync.close()
    return step, begun, left, owed


def test_one_rank_trains_on_and_hands_over_what_it_has_learnt_and_kept(tmp_path):
    (_, _, _, owed), (_, _, _, other) = run(_train_and_save, 2, str(tmp_path), "diloco")
    ((_, begun, alone, kept),) = run(_train_and_save, 1, str(tmp_path), "diloco")
    again = run(_train_and_save, 2, str(tmp_path), "diloco")
    assert not _same(begun, alone)
    assert any(x.any() for x in kept.values())
    for name, x in kept.items():
        torch.testing.assert_close(x, (owed[name] + other[name]) / 2)
    for step, weights, _, _ in again:
        assert step == 10
        assert _same(weights, alone)


def _refusals(rank, size, folder):
    import torch.distributed.checkpoint as dcp

    net, optimizer, sync = _job(Local(4, tw.TopK(0.1)))
    cases.walk(net, optimizer, rank, 0, 5)
    tw.checkpoint.save(f"{folder}/local", net, optimizer, sync, 5)
    dcp.save({"sync": sync}, checkpoint_id=f"{folder}/dcp")
    said = ""
    try:  # DCP keeps one of what ranks call alike
        dcp.load({"sync": sync}, checkpoint_id=f"{folder}/dcp")
    except ValueError as error:
        said = str(error)
    with pytest.raises(TypeError, match="not from a Linear"):
        tw.checkpoint.save(folder, net, optimizer, net[0], 5)
    sync.close()
    for settings, other, words in (
        (tw.TopK(0.1), cases.model, "was saved under local steps, Local"),
        (Local(8, tw.TopK(0.1)), cases.model, "sync_every=4"),
        (Local(4, tw.TopK(0.1)), cases.model, "outer weights of"),
    ):
        net = other()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        before = cases.weights(net)
        sync = tw.attach(net, optimizer, settings)
        with pytest.raises(ValueError, match=words):
            tw.checkpoint.load(f"{folder}/local", net, optimizer, sync)
        assert _same(before, cases.weights(net))
        cases.walk(net, optimizer, rank, 0, 1)
        if isinstance(settings, tw.TopK):
            tw.checkpoint.save(f"{folder}/topk", net, optimizer, sync, 1)
        sync.close()
    net, optimizer, sync = _job(Local(4))
    with pytest.raises(ValueError, match="which exchanges gradients"):
        tw.checkpoint.load(f"{folder}/topk", net, optimizer, sync)
    sync.close()
    dist.barrier()
    return said


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path):
    (said,) = filter(None, run(_refusals, 2, str(tmp_path)))
    assert "which thinwire.checkpoint.save keeps and torch.distributed.checkpoint does not" in said


def _damaged(rank, size, folder):
    net, optimizer, sync = _job(SETTINGS["low rank, late"])
    weights = {}
    for step in (5, 10):
        cases.walk(net, optimizer, rank, step - 5, step)
        tw.checkpoint.save(folder, net, optimizer, sync, step)
        weights[step] = _all(net)
    sync.close()
    if rank == 0:
        file = pathlib.Path(folder, "step-000000010", "rank-00001.pt")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    net, optimizer, sync = _job(SETTINGS["low rank, late"])
    step = tw.checkpoint.load(folder, net, optimizer, sync)
    found = step, _same(weights[5], _all(net)), _same(weights[10], weights[5])
    if rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    before, outer = _all(net), _outer(net, sync)
    with pytest.raises(ValueError, match="step-000000005 does not fit"):
        tw.checkpoint.load(folder, net, optimizer, sync)
    found += (_same(before, _all(net)), _same(outer, _outer(net, sync)))
    sync.close()
    return found


def test_all_go_back_where_one_file_is_damaged_and_nobody_goes_on_where_one_does_not_fit(tmp_path):
    for found in run(_damaged, 2, str(tmp_path)):
        assert found == (5, True, False, True, True)

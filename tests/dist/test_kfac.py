"""K-FAC on real ranks: sharded is the joint batch, whatever the schedule; equal bits, counted messages, failures."""

import math

import pytest
import torch
from cases import logged
from torch import nn

import thinwire as tw
from kfac_with import kfac_with
from rounding import nudged
from spawned import run
from thinwire.core.kernels.symmetric import pack_upper
from thinwire.core.pricing.costs import Costs

pytestmark = pytest.mark.dist

BATCH, STEPS = 8, 8
TERMS = BATCH * 4 * 4  # of the longest sum in a step: a weight's gradient in the convolution
COSTS = Costs.of_link(1e9, 50e-6, 4)
EVERY_RANK = 10**6  # inverts what has a smaller side
OPTIONS = {"damping": 1e-2, "factor_update_steps": 2, "inv_update_steps": 4, "kl_clip": 1e-3, "costs": COSTS}


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 16, 12), nn.Tanh(),
        nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 3),
    ).double()  # fmt: skip


def data(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 2, 4, 4, generator=draw).double(), torch.randn(BATCH, 3, generator=draw).double()


def train(rank, size, options, *, steps=STEPS, net=None, attach=None, before=None, after=None, first=0, data=data):
    """Train on this rank's part of the joint batches: (kfac, sync, net)."""
    net = net or network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = tw.attach(net, optimizer, **(attach or {}))
    kfac = kfac_with(net, sync, **{**OPTIONS, **options})
    for step in range(first, first + steps):
        x, y = (part.chunk(size)[rank] for part in data(step))
        loss = 0.5 * (net(x) - y).square().sum() / len(x)
        loss.backward()
        if before is not None:
            before(kfac, step)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(kfac, step)
    return kfac, sync, optimizer, net


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def of(kind, kfac):
    """This rank's factors or inverses, packed, by name."""
    return {key.removeprefix(f"{kind}/"): x for key, x in kfac.state_dict().items() if key.startswith(f"{kind}/")}


def joint(method="inverse", steps=STEPS, **options):
    """One rank with all data: its weights, its factors, and how far rounding may lead another right run from each."""

    def alone(seed):
        draw, net = torch.Generator().manual_seed(seed), network()
        moved = lambda step: tuple(nudged(x, TERMS, draw) for x in data(step)) if seed else data(step)  # noqa: E731
        kfac, sync, _, _ = train(0, 1, {**options, "method": method}, net=net, steps=steps, data=moved)
        sync.close()
        return {"weights": flat(net), **of("factor", kfac)}

    plain, *others = map(alone, range(4))
    off = {name: max(float((other[name] - x).abs().max()) for other in others) for name, x in plain.items()}
    return plain.pop("weights"), plain, off


# --- T6, T8: sharded is joint --------------------------------------------------------------------------------------

CASES = [
    {"schedule": "dkfac"},
    {"schedule": "mpd"},
    {"limit": 0, "threshold": EVERY_RANK},
    {"limit": math.inf, "threshold": 0},
    {"limit": 1000, "threshold": 13, "transport": "owner_fused"},
    {"threshold": 0, "transport": "allgather"},
    {"schedule": "spd-published", "threshold": 13},
    {"method": "inverse_pi", "threshold": 0, "transport": "broadcast"},
    {"method": "eigen", "threshold": 13},
    {"schedule": "kaisa:1"},
    {"schedule": "kaisa:1/2"},
    {"schedule": "kaisa:1/2", "method": "eigen", "transport": "allgather"},
]


def _sharded(rank, size, cases):
    found = []
    for options in cases:
        kfac, sync, _, net = train(rank, size, options)
        stats = kfac.stats()
        found.append((flat(net), of("factor", kfac), of("inverse", kfac), stats, kfac.plan))
        sync.close()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_is_the_joint_batch(size):
    cases = CASES if size == 4 else CASES[1:4:2]
    cases = [*cases, {"schedule": f"kaisa:1/{size}"}]
    ranks = run(_sharded, size, cases, seconds=250)
    methods = {options.get("method", "inverse") for options in cases}
    alone = {method: joint(method) for method in methods}
    for i, options in enumerate(cases):
        joined, whole, off = alone[options.get("method", "inverse")]
        named = lambda m, o=options: f"{o}: {m}"  # noqa: E731
        for weights, factors, inverses, stats, plan in (found[i] for found in ranks):
            torch.testing.assert_close(weights, joined, rtol=0, atol=off["weights"], msg=named)
            assert torch.equal(weights, ranks[0][i][0]), options
            for name, factor in whole.items():
                torch.testing.assert_close(factors[name], factor, rtol=0, atol=off[name], msg=named)
            for name, inverse in inverses.items():
                other = next(f[i][2][name] for f in ranks if name in f[i][2])
                assert torch.equal(inverse, other), (options, name)
            assert (stats.factor_updates, stats.inverse_updates, stats.steps) == (4, 2, STEPS)
            assert plan == ranks[0][i][4]


def _dp(rank, size):
    kfac, sync, _, net = train(rank, size, {"schedule": "dp"})
    held = sorted(of("inverse", kfac))
    sync.close()
    return flat(net), kfac.stats(), held, kfac.plan


def test_dp_sends_no_factor_and_ranks_agree():
    ranks = run(_dp, 2)
    plan = ranks[0][3]
    for weights, stats, _, _ in ranks:
        assert torch.equal(weights, ranks[0][0])
        assert stats.bytes_sent["factors"] == stats.bytes_sent["inverses"] == 0
        assert stats.bytes_sent["returns"] > 0
    assert sorted(name for _, _, held, _ in ranks for name in held) == sorted(plan.factor(i) for i in range(8))


# --- T13, T14: when messages leave, and how many --------------------------------------------------------------------


def _events(rank, size, schedule):
    net, log = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tw.attach(net, optimizer) as sync:
        channel_of = sync.services.channel

        def channel(*args):
            made, names = channel_of(*args), []
            begin, ready, wait = made.begin, made.ready, made.wait
            made.begin = lambda inside, make: (names.clear(), names.extend(inside), begin(inside, make))[2]
            made.ready = lambda index: (log.append((names[index][0], index)), ready(index))[1]
            made.wait = lambda: (log.append("wait"), wait())[1]
            return made

        sync.services.channel = channel
        rules = {"limit": 0, "threshold": 0, "transport": "broadcast"} if schedule == "spd" else {}
        options = {**OPTIONS, "factor_update_steps": 1, "inv_update_steps": 1}
        kfac_with(net, sync, schedule=schedule, **rules, **options)
        net.register_forward_hook(lambda *_: log.append("forward over"))
        for step in range(3):
            x, y = data(step)
            log.clear()
            loss = (net(x) - y).square().mean()
            loss.backward()
            log.append("backward over")
            optimizer.step()
            optimizer.zero_grad()
    return log


@pytest.mark.parametrize("schedule", ["spd", "dkfac"])
def test_when_messages_leave(schedule):
    for log in run(_events, 2, schedule):
        factors = log[: log.index("wait")]
        a = [i for i, event in enumerate(factors) if event[0].endswith("/A")]
        g = [i for i, event in enumerate(factors) if event[0].endswith("/G")]
        assert len({event for event in factors if event[0][-2:] in ("/A", "/G")}) == len(a) + len(g)  # none twice
        if schedule == "spd":
            assert len(a) == len(g) == 4
            assert max(a) < factors.index("forward over") < min(g)
            assert factors[-1] == "backward over"
        else:
            assert (len(a), len(g)) == (1, 1)
            assert min(a) > factors.index("forward over")
        inverses = log[log.index("wait") + 1 :]
        if schedule == "spd":
            assert sum(event[0][-2:] in ("/A", "/G") for event in inverses) == 8
            assert inverses[-1] == "wait"


def _counted(rank, size, intervals):
    options = {"factor_update_steps": intervals[0], "inv_update_steps": intervals[1]}
    options |= {"limit": 0, "threshold": 0, "transport": "broadcast"}
    kfac, sync, _, _ = train(rank, size, options, steps=12)
    sync.close()
    return kfac.stats(), kfac.plan


@pytest.mark.parametrize("intervals", [(2, 4), (10, 100)])
def test_collectives_and_bytes_are_the_plans(intervals):
    for stats, plan in run(_counted, 2, intervals):
        factors, inverses = (len(range(0, 12, every)) for every in intervals)
        assert (stats.factor_updates, stats.inverse_updates) == (factors, inverses)
        assert stats.collectives["factors"] == 8 * factors
        assert stats.collectives["inverses"] == 8 * inverses
        statistic = sum(8 * layer.packed(side) for layer in plan.layers for side in (0, 1))
        assert stats.bytes_sent["factors"] == statistic * factors  # 2 (W-1)/W = 1
        messages = sum(round(8 * plan.elements(i) / 2) for i in range(8))
        assert stats.bytes_sent["inverses"] == messages * inverses
        assert stats.bytes_sent["returns"] == 0


# --- micro-batches, scaler, failures --------------------------------------------------------------------------------


def _micro(rank, size):
    found = []
    for parts in (1, 2):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tw.attach(net, optimizer) as sync:
            kfac = kfac_with(net, sync, **{**OPTIONS, "factor_update_steps": 1, "inv_update_steps": 1})
            for step in range(4):
                x, y = (part.chunk(size)[rank].chunk(parts) for part in data(step))
                for i in range(parts):
                    last = i == parts - 1
                    loss = lambda i=i: 0.5 * (net(x[i]) - y[i]).square().sum() / len(x[i]) / parts  # noqa: B023, E731
                    if last:
                        loss().backward()
                    else:
                        with sync.no_sync():
                            loss().backward()
                        with pytest.raises(RuntimeError, match="micro-batches"):
                            kfac.state_dict()
                optimizer.step()
                optimizer.zero_grad()
            found.append((flat(net), of("factor", kfac)))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_are_one_batch(size):
    _, _, off = joint(steps=4, factor_update_steps=1, inv_update_steps=1)
    for (whole, factors), (parts, others) in run(_micro, size):
        torch.testing.assert_close(parts, whole, rtol=0, atol=off["weights"])
        for name in factors:
            torch.testing.assert_close(others[name], factors[name], rtol=0, atol=off[name])


def _scaled(rank, size):
    net = network().float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    with tw.attach(net, optimizer, scaler=scaler) as sync:
        kfac = kfac_with(net, sync, **{**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8})
        log = []
        for step in range(6):
            x, y = (part.chunk(size)[rank].float() for part in data(step))
            if step == 0 and rank == 1:
                y = y * 1e36  # its gradients overflow
            scaler.scale(0.5 * (net(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log.append((kfac.stats().factor_updates, kfac.stats().inverse_updates, scaler.get_scale()))
        return flat(net), log, [x.isfinite().all() for x in of("factor", kfac).values()]


def test_a_skipped_step_leaves_no_trace_and_the_inverse_due():
    ranks = run(_scaled, 2)
    for weights, log, finite in ranks:
        assert torch.equal(weights, ranks[0][0])
        assert all(finite)
        assert log[0] == (0, 0, 2.0**15)  # skipped: not taken in yet
        assert log[1][1] == 1  # taken in with the next step, whose statistics were wanted since the first gave no G
        assert log[-1][1] == 1


def _broken(rank, size, from_side):
    text, seen = logged(), {}

    def after(kfac, step):
        """The factors of the next steps are these, since ``factor_decay`` is 1."""
        layer = kfac.plan.layers[1]
        name = f"{layer.name}/A"
        state = kfac.state_dict()
        if step == 2:
            seen["old"] = state.get(f"inverse/{name}")
            bad = -100 * torch.eye(layer.d_a).double()
        elif step == 3:
            old, now = seen.pop("old"), state.get(f"inverse/{name}")
            seen["kept"] = (old is now) if old is None else torch.equal(now, old)
            seen["level"] = dict(kfac.stats().levels)
            bad = torch.eye(layer.d_a).double()
            bad[0, 0] = -0.05  # indefinite, but not with ten times the damping
        else:
            if step == 4:
                seen["raised"] = dict(kfac.stats().levels)
            return
        kfac.load_state_dict({**state, f"factor/{name}": pack_upper(bad)})

    options = {
        "threshold": from_side,
        "factor_update_steps": 1,
        "inv_update_steps": 1,
        "factor_decay": 1.0,
        "transport": "broadcast",
    }
    _, sync, _, net = train(rank, size, options, steps=6, after=after)
    sync.close()
    return flat(net), seen, [line for line in text if "cannot be inverted" in line]


@pytest.mark.parametrize("from_side", [EVERY_RANK, 0])
def test_what_cannot_be_inverted_keeps_its_old_inverse(from_side):
    ranks = run(_broken, 2, from_side)
    for weights, seen, words in ranks:
        assert torch.equal(weights, ranks[0][0])
        assert seen["kept"]
        assert seen["level"] == {"3/A": 5}
        assert seen["raised"] == {"3/A": 1}
        assert len(words) == 1


# --- T17: checkpoints -----------------------------------------------------------------------------------------------


def _saved(rank, size, folder, options):
    kfac, sync, optimizer, net = train(rank, size, options, steps=5)
    tw.checkpoint.save(folder, net, optimizer, sync, 5)
    held = of("factor", kfac), of("inverse", kfac)
    sync.close()
    kfac, sync, _, net = train(rank, size, options, steps=10)
    sync.close()
    return held, flat(net)


def _resumed(rank, size, folder, options):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = tw.attach(net, optimizer)
    kfac = kfac_with(net, sync, **{**OPTIONS, **options})
    tw.checkpoint.load(folder, net, optimizer, sync)
    held = of("factor", kfac), of("inverse", kfac)
    for step in range(5, 10):
        x, y = (part.chunk(size)[rank] for part in data(step))
        loss = 0.5 * (net(x) - y).square().sum() / len(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    placement = kfac.plan.owners
    sync.close()
    return held, flat(net), placement


@pytest.mark.slow
def test_resume(tmp_path):
    options = {"schedule": "kaisa:1/2", "transport": "broadcast"}
    saved = run(_saved, 4, str(tmp_path), options)
    again = run(_resumed, 4, str(tmp_path), options)
    for (held, weights), (found, after, _) in zip(saved, again):
        for mine, other in zip(held, found):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert torch.equal(weights, after)
    two = run(_resumed, 2, str(tmp_path), options)
    _, _, off = joint(steps=10)
    for found, after, placement in two:
        assert all(torch.equal(found[0][name], factor) for name, factor in saved[0][0][0].items())
        torch.testing.assert_close(after, saved[0][1], rtol=0, atol=off["weights"])
        assert max(placement) == 1


# --- refusals -------------------------------------------------------------------------------------------------------


def _refused(rank, size):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tw.attach(net, optimizer, "dear") as sync, pytest.raises(ValueError, match="decoupled"):
        kfac_with(net, sync, **OPTIONS)
    with tw.attach(net, optimizer) as sync:
        with pytest.raises(ValueError, match="kaisa:1/2"):
            kfac_with(net, sync, **OPTIONS, schedule="kaisa:1/3")
        with pytest.raises(ValueError, match="rank 1 differs from rank 0: K-FAC: factor_decay"):
            kfac_with(net, sync, **OPTIONS, factor_decay=0.9 + 0.05 * rank)
        kfac = kfac_with(net, sync, **OPTIONS, schedule="dkfac")
        with pytest.raises(RuntimeError, match="already"):
            kfac_with(net, sync, **OPTIONS)
        plan = kfac.plan
    with tw.attach(net, optimizer) as sync:
        with pytest.raises(ValueError, match="method: 'inverse' in the plan, 'eigen' here"):
            kfac_with(net, sync, **OPTIONS, plan=plan, method="eigen")
        kfac_with(net, sync, **OPTIONS, plan=type(plan).from_json(plan.to_json()))
    return True


def test_refusals():
    assert all(run(_refused, 2))

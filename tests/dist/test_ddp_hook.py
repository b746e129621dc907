"""``ddp_hook``: the same numbers as plain DDP and as LocalWorld, through everything DDP does to a hook."""

import pathlib

import cases
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from spawned import run
from thinwire.adapters.ddp_module import checked
from thinwire.adapters.local_ddp import connect, load_from, save_in

pytestmark = pytest.mark.dist

METHODS = [
    ("ssgd", {}),
    ("ssgd", {"deterministic": True}),
    ("cast", {"dtype": torch.bfloat16}),
    ("acp", {"rank": 2}),
    ("powersgd", {"rank": 2}),
    ("topk", {"density": 0.1}),
    ("signsgd", {}),
    ("cast", {"dtype": torch.int8}),
    ("qsgd", {}),
    ("terngrad", {}),
]
SMALL = 0.003  # MiB: several buckets of the tiny models


class Conv(nn.Module):
    """A channels_last convolution: DDP lays its gradient out in another order than ``GradBucket.gradients`` says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8 * 8, 5)

    def forward(self, x):
        x = x.reshape(6, 3, 8, -1)[..., :8]
        x = torch.nn.functional.pad(x, (0, 8 - x.shape[-1]))
        return self.head(torch.relu(self.conv(x)).mean(3).flatten(1))


def _net(kind):
    return Conv().to(memory_format=torch.channels_last) if kind == "conv" else cases.model()


def _hooked(net, method, options=None, **kwargs):
    ddp = DistributedDataParallel(net, **kwargs)
    state, hook = tw.ddp_hook(method, start_compression_step=0, **(options or {}))
    ddp.register_comm_hook(state, hook)
    return ddp, state


def _train(net, module, rank, steps, width=24, lr=0.05):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        cases.down(cases.loss_of(module, rank, step, width), optimizer)
    return cases.weights(net)


VARIANTS = {
    "one bucket": ("mlp", {}),
    "small buckets": ("mlp", {"bucket_cap_mb": SMALL}),
    "bucket views": ("mlp", {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}),
    "unused": ("mlp", {"bucket_cap_mb": SMALL, "find_unused_parameters": True}),
    "static graph": ("mlp", {"bucket_cap_mb": SMALL, "static_graph": True}),
    "channels_last": ("conv", {"bucket_cap_mb": 0.0005}),
}


def _against_ddp(rank):
    found = {}
    for label, (kind, kwargs) in VARIANTS.items():
        width = 144 if kind == "conv" else 24
        plain = _net(kind)
        theirs = _train(plain, DistributedDataParallel(plain, **kwargs), rank, 6, width)
        net = _net(kind)
        ddp, state = _hooked(net, "ssgd", **kwargs)
        ours = _train(net, ddp, rank, 6, width)
        stats = state.stats()
        worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs))
        found[label] = (worst, stats.steps, len(stats.buckets), stats.bytes_sent, stats.dense_bytes)
        state.close()
    return found


def _gradients(rank, steps=5):
    """Per method: the layout and gradients of every step, then residuals; weights stay where they are."""
    found = []
    for kind in ("mlp", "conv"):
        for name, options in METHODS:
            net, seen = _net(kind), []
            ddp, state = _hooked(net, name, options, bucket_cap_mb=SMALL)
            for step in range(steps):
                cases.loss_of(ddp, rank, step, 144 if kind == "conv" else 24).backward()
                layout = [(b.names, b.dense) for b in state.stats().buckets]
                seen.append((layout, {n: p.grad.clone() for n, p in state.names()}))
                net.zero_grad()
            residuals = {n: r.clone() for n, r in state.state.residuals.items()}
            found.append((kind, name, seen, residuals, state.stats().bytes_sent))
            state.close()
    return found


def _uneven(rank):
    """Rank 1 has more batches: DDP re-issues the hook with zeros on rank 0."""
    net = cases.model()
    ddp, state = _hooked(net, "acp", {"rank": 2}, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with Join([ddp]):
        cases.walk(ddp, optimizer, rank, 0, 3 + 3 * rank)
    with state:
        norm = sum(float(r.norm()) for r in state.state.residuals.values())
        return state.stats().steps, norm


def _misuse(rank):
    problems = {}
    net = cases.model()
    ddp, state = _hooked(net, "acp", {"rank": 2 + rank})
    try:
        cases.loss_of(ddp, rank, 0).backward()
    except Exception as error:
        problems["options"] = f"{type(error).__name__}: {error}"
    state, hook = tw.ddp_hook("ssgd")
    for label in ("first", "second"):
        ddp = DistributedDataParallel(cases.model())
        ddp.register_comm_hook(state, hook)
        try:
            cases.loss_of(ddp, rank, 0).backward()
        except Exception as error:
            problems[label] = f"{type(error).__name__}: {error}"
    return problems


def _resume(rank):
    """Saved by 2 ranks; a hook of 1 rank (its own group) takes the mean; another model is refused."""
    net = cases.model()
    ddp, state = _hooked(net, "topk", {"density": 0.1}, bucket_cap_mb=SMALL)
    _train(net, ddp, rank, 4)
    saved = state.state_dict()
    parts = [None, None]
    dist.all_gather_object(parts, saved)
    other, fresh = _hooked(cases.model(width=20), "topk", {"density": 0.1})
    fresh.load_state_dict(saved)
    try:
        cases.loss_of(other, rank, 0, 20).backward()
        refused = ""
    except Exception as error:
        refused = str(error)
    merged = {**parts[0], **parts[1]}
    group = [dist.new_group([r]) for r in range(2)][rank]
    alone, _ = tw.ddp_hook("ssgd", process_group=group)
    merged_method = {**merged, "method": "ssgd"}
    alone.load_state_dict(merged_method)
    name = next(iter(alone.state.residuals))
    mean = (parts[0][f"residual/0/{name}"] + parts[1][f"residual/1/{name}"]) / 2
    kept = torch.allclose(alone.state.residuals[name], mean)
    try:
        fresh.load_state_dict({**saved, "method": "acp"})
        method = ""
    except ValueError as error:
        method = str(error)
    try:
        fresh.load_state_dict({k: v for k, v in merged.items() if not k.startswith(f"residual/{rank}/")})
        lacking = ""
    except ValueError as error:
        lacking = str(error)
    return refused, kept, method, lacking


def _everything(rank, size):
    return {
        "ddp": _against_ddp(rank),
        "gradients": _gradients(rank),
        "uneven": _uneven(rank),
        "resume": _resume(rank),
        "misuse": _misuse(rank),
    }


@pytest.fixture(scope="module")
def two():
    return run(_everything, 2, seconds=250)


@pytest.mark.parametrize("label", VARIANTS)
def test_ssgd_equals_ddp_bit_for_bit(two, label):
    for result in two:
        worst, steps, buckets, sent, dense = result["ddp"][label]
        assert worst == 0.0
        assert steps == 6
        assert sent == dense
        assert buckets == 1 if label == "one bucket" else buckets > 1


def test_every_method_equals_local_world(two):
    """Also a channels_last model, and the buckets that DDP rebuilds after the first step."""
    results = [r["gradients"] for r in two]
    for index in range(len(results[0])):
        kind, name, seen, _, _ = results[0][index]
        options = METHODS[index % len(METHODS)][1]
        near = {"rtol": 0.02, "atol": 1e-3} if name == "cast" else {"rtol": 1e-4, "atol": 1e-6}
        world, method = tw.LocalWorld(2), tw.method(name, **options)
        assert seen[0][0] != seen[-1][0], "DDP has not rebuilt its buckets: the case tests too little"
        for step, (layout, _) in enumerate(seen):
            assert layout == results[1][index][2][step][0]
            local = [_local_gradients(kind, rank, step) for rank in range(2)]
            # what the method leaves dense is a plain average
            for names, dense in layout:
                for n in names if dense else ():
                    for r in results:
                        torch.testing.assert_close(r[index][2][step][1][n], (local[0][n] + local[1][n]) / 2, **near)
            compressed = [names for names, dense in layout if not dense]
            world.plan = tw.Plan.of(compressed)
            keep = {n for names in compressed for n in names}
            expected = world.step(method, [{n: g for n, g in one.items() if n in keep} for one in local])
            for rank in range(2):
                for n, value in expected[rank].items():
                    torch.testing.assert_close(results[rank][index][2][step][1][n], value, **near)
        for rank, residuals in enumerate(world.residuals()):
            for n, value in residuals.items():
                torch.testing.assert_close(results[rank][index][3][n], value, **near)


def _local_gradients(kind, rank, step):
    net = _net(kind)
    cases.loss_of(net, rank, step, 144 if kind == "conv" else 24).backward()
    ordered = list(reversed(list(net.parameters())))
    return {f"float32/{i}": p.grad.clone() for i, p in enumerate(ordered)}


def test_uneven_inputs_under_join(two):
    for result in two:
        steps, norm = result["uneven"]
        assert steps == 6
        assert 0 < norm < 10


def test_misuse_is_told(two):
    for rank, result in enumerate(two):
        assert "rank 1 differs from rank 0" in result["misuse"]["options"]
        assert "rank" in result["misuse"]["options"]
        assert "first" not in result["misuse"]
        assert "call ddp_hook once for each" in result["misuse"]["second"], rank


def test_state_on_another_model_method_or_world(two):
    for rank, result in enumerate(two):
        refused, kept, method, lacking = result["resume"]
        assert "saved by another model" in refused
        assert kept
        assert "'acp'" in method
        assert f"no residuals of rank {rank}" in lacking


def test_unknown_names_are_refused_at_once():
    with pytest.raises(ValueError, match="did you mean 'acp'"):
        tw.ddp_hook("acpp")
    with pytest.raises(ValueError, match="unknown option of acp"):
        tw.ddp_hook("acp", rnak=4)
    with pytest.raises(ValueError, match="rank"):
        tw.ddp_hook("acp", rank=0)
    with pytest.raises(ValueError, match=r"use thinwire\.attach"):
        tw.ddp_hook("dear")


def _alone(rank, size):
    net, plain = cases.model(), cases.model()
    ddp, state = _hooked(net, "acp", {"rank": 2}, bucket_cap_mb=SMALL)
    ours = _train(net, ddp, rank, 4)
    theirs = _train(plain, plain, rank, 4)
    stats = state.stats()
    state.load_state_dict(state.state_dict())
    return all(torch.equal(a, b) for a, b in zip(ours, theirs)), stats.steps, stats.note, stats.bytes_sent


def test_one_rank_sends_nothing():
    ((same, steps, note, sent),) = run(_alone, 1)
    assert same
    assert (steps, sent) == (4, 0)
    assert "acp runs as ssgd" in note


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.always, self.sometimes = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x, use):
        y = self.always(x)
        return (y + self.sometimes(x) if use else y).square().mean()


def _owed(state, size):
    """What ranks owe to the layer that is used sometimes, as a mean."""
    owed = state.state.residuals["sometimes.weight"].double().clone()
    torch.distributed.all_reduce(owed)
    return owed / size


def _unused(rank, size, to_none):
    """The layer is used by both ranks, by one, or by none."""
    net = Sometimes()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    state, hook = tw.ddp_hook("topk", density=0.1, start_compression_step=0)
    state.learn_names(net)
    ddp.register_comm_hook(state, hook)
    worst = []
    for step in range(9):
        use, before = (step % 3 == 0 or (step % 3 == 1 and rank == 0)), _owed(state, size) if step else 0.0
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        own = torch.autograd.grad(net(x, True), net.sometimes.weight)[0].double() if use else torch.zeros(8, 8).double()
        torch.distributed.all_reduce(own)
        ddp(x, use).backward()
        grad = net.sometimes.weight.grad
        applied = 0.0 if grad is None else grad.double().clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        worst.append(float((before + own / size - applied - _owed(state, size)).abs().max()))
    return max(worst)


@pytest.mark.parametrize("to_none", [False, True])
def test_what_is_owed_to_a_parameter_that_no_rank_uses_stays_owed(to_none):
    for lost in run(_unused, 2, to_none):
        assert lost < 1e-7


def _silent(rank, size):
    net = cases.model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    state, hook = tw.ddp_hook("powersgd", rank=2, timeout=6, start_compression_step=0)
    ddp.register_comm_hook(state, hook)
    for step in range(3):
        cases.loss_of(ddp, rank, step).backward()
    told = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:
        told.wait(["told"])  # silent, but not gone
        return ""
    try:
        cases.loss_of(ddp, rank, 3).backward()
    except RuntimeError as error:
        told.set("told", "")
        try:
            ddp.zero_grad()
            cases.loss_of(ddp, rank, 4).backward()
        except RuntimeError:
            return str(error)
    return "nothing was raised"


def test_a_silent_rank_is_named():
    message, _ = run(_silent, 2)
    assert "the exchange failed at step 3" in message
    assert "Rank 1 did not report: dead, late or done already" in message


KEPT = [("acp", {"rank": 2}), ("topk", {"density": 0.1}), ("dgc", {"density": 0.1}), ("hitopk", {"density": 0.1}),
        ("signsgd", {}), ("cast", {}), ("ssgd", {})]  # fmt: skip


def _kept(rank, size, folder):
    """Take over what is there, train, save. Returns for each method what was owed before and after."""
    found = []
    for name, options in KEPT:
        net = cases.model()
        ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL)
        topology = tw.Topology(size) if name == "hitopk" else None
        seen = connect(ddp, checked(name, **options), (), framework="a test", world_size=size, topology=topology)
        sync = seen.sync
        known = load_from(pathlib.Path(folder), name, seen)
        shapes = {n: p.shape for n, p in net.named_parameters()}
        owed = [{}, {}]
        for i in range(2):
            owed[i] = {n: sync.state.extended(n, shapes[n]).double() for n in sync.state.residuals}
            if not i:
                _train(net, ddp, rank, 3)
        dist.barrier()
        save_in(pathlib.Path(folder), name, seen)
        dist.barrier()
        found.append((known, *owed))
        sync.close()
    return found


def test_one_rank_keeps_what_several_owed_until_there_are_several_again(tmp_path):
    two, _, again = (run(_kept, size, str(tmp_path)) for size in (2, 1, 2))
    owing = set()
    for (name, _), *before, (known, after, _) in zip(KEPT, *two, again[1]):
        assert known
        for parameter in {*before[0][2], *before[1][2]}:
            mean = sum(rank[2][parameter] for rank in before) / 2
            if mean.any():
                owing.add(name)
                torch.testing.assert_close(after[parameter], mean, rtol=1e-6, atol=1e-7, msg=name)
    assert owing == {"acp", "topk", "dgc", "hitopk", "signsgd"}


@pytest.mark.parametrize("method", ["local", "diloco", tw.Local(4)])
def test_local_steps_are_for_the_bare_model(method):
    with pytest.raises(ValueError, match=r"attach to the bare model, thinwire\.attach\(model, optimizer, Local\("):
        tw.ddp_hook(method)

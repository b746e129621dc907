"""The rules of deferred updates, in one process: one update per step, none lost, nothing read that is not there."""

import copy
import logging

import pytest
import torch
from torch import nn

import thinwire as tw


def make(width=6):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def loss_of(net, step, width=6):
    return net(torch.randn(5, width, generator=torch.Generator().manual_seed(step))).square().mean()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


class Counting(torch.optim.SGD):
    """Counts the updates of each parameter, and keeps what copy.copy would lose."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = {p: 0 for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.updates[p] += 1
        return super().step(closure)


def test_one_update_per_parameter_and_step():
    net = make()
    optimizer = Counting(net.parameters(), lr=0.1)
    with tw.attach(net, optimizer, "dear", fusion="none") as sync:
        for step in range(4):
            loss_of(net, step).backward()
            assert sync.pending == ()
            before = dict(optimizer.updates)
            optimizer.step()
            assert optimizer.updates == before
            assert len(sync.pending) == 6
            net[0](torch.zeros(1, 6))  # needs the first layer alone
            assert list(optimizer.updates.values()) == [step + 1] * 2 + [step] * 4
            loss_of(net, 0)
            loss_of(net, 0)
            sync.synchronize()
            assert list(optimizer.updates.values()) == [step + 1] * 6
            assert all(p.grad is None for p in net.parameters())


def both(loop, **options):
    """What a loop leaves behind with S-SGD and decoupled."""
    results = []
    for method in (tw.SSGD(), tw.DeAR(fusion="none", poison_stale=True, **options)):
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with tw.attach(net, optimizer, method) as sync:
            results.append(loop(net, optimizer, sync))
        results.append(weights(net))
    for a, b in zip(results[:2], results[2:]):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _step(net, optimizer, step):
    loss_of(net, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_evaluation_state_dicts_and_copies_see_the_last_update():
    def loop(net, optimizer, sync):
        seen = []
        for step in range(3):
            _step(net, optimizer, step)
            net.eval()
            with torch.no_grad():
                seen.append(loss_of(net, 9))
            net.train()
            _step(net, optimizer, step + 10)
            with torch.no_grad():  # in training mode
                seen.append(loss_of(net, 9))
            _step(net, optimizer, step + 20)
            seen += copy.deepcopy(net.state_dict()).values()
            _step(net, optimizer, step + 30)
            seen += net[2].state_dict().values()
            _step(net, optimizer, step + 40)
            seen += [s["momentum_buffer"].clone() for s in optimizer.state_dict()["state"].values()]
            _step(net, optimizer, step + 50)
            sync.state_dict()
            seen += weights(net)
            _step(net, optimizer, step + 60)
            sync.synchronize()
            sync.synchronize()
            seen += weights(net)
        _step(net, optimizer, 70)
        net.load_state_dict({name: value + 1 for name, value in make().state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        _step(net, optimizer, 71)
        return seen

    both(loop)


def test_an_exception_in_forward_leaves_the_rest_pending():
    def loop(net, optimizer, sync):
        _step(net, optimizer, 0)
        handle = net[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(net, 1)
        handle.remove()
        if sync.services.method.name == "dear":
            assert sync.pending == ("4.weight", "4.bias")
        _step(net, optimizer, 1)
        return []

    both(loop)


def test_two_optimizers_that_step_apart():
    results = []
    for method in (tw.SSGD(), tw.DeAR(fusion="single")):
        net = make()
        a = torch.optim.SGD(net[0].parameters(), lr=0.1)
        b = torch.optim.Adam([*net[2].parameters(), *net[4].parameters()], lr=0.01)
        with tw.attach(net, [a, b], method):
            for step in range(4):
                loss_of(net, step).backward()
                a.step()
                loss_of(net, 9)  # a forward between the two
                if step % 2:
                    b.step()
                a.zero_grad()
                b.zero_grad()
        results.append(weights(net))
    torch.testing.assert_close(*results, rtol=0, atol=0)


REFUSED = {
    "torch's clip": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "clip by value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 1.0),
    "norm": lambda net: net[0].weight.grad.norm(),
    "print": lambda net: str(net[0].weight.grad),
    "arithmetic": lambda net: net[0].weight.grad * 2,
    "in place": lambda net: net[0].weight.grad.mul_(2),
    "data": lambda net: net[0].weight.grad.data,
    "item": lambda net: net[0].weight.grad[0, 0].item(),
    "a second backward": lambda net: loss_of(net, 1).backward(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_gradients_that_are_not_there_cannot_be_read(what):
    net = make()
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "dear") as sync:
        loss_of(net, 0).backward()
        words = "no_sync" if "backward" in what else "sync.clip_grad_norm_"
        with pytest.raises(RuntimeError, match=words):
            REFUSED[what](net)
        if "backward" in what:
            with sync.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
                loss_of(net, 1).backward()
        grad = net[0].weight.grad
        assert (grad.shape, grad.dtype, grad.device.type) == ((6, 6), torch.float32, "cpu")
        assert grad.numel() == 36


def test_what_else_is_refused():
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tw.attach(net, optimizer, "dear", check_finite=False):
        with pytest.raises(RuntimeError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(net, 0)).backward()
        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(RuntimeError, match="check_finite=False"):
            scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    table = nn.Parameter(torch.randn(5, 3))
    holder = nn.Module()
    holder.table = table
    with tw.attach(holder, torch.optim.SGD([table], lr=0.1), "dear"):
        loss = nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum()
        with pytest.raises(TypeError, match="table received a sparse gradient"):
            loss.backward()


@pytest.mark.parametrize("name", ["powersgd", "topk", "signsgd", "omgs", "lags"])
def test_methods_that_cannot_be_decoupled(name):
    with pytest.raises(TypeError, match=f"{name} cannot be decoupled"):
        tw.method(name, decoupled=True)


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="check_finite"):
        tw.ACP(decoupled=True, check_finite=False)
    for bad in (0, -1, "tiny"):
        with pytest.raises(ValueError, match="fusion"):
            tw.DeAR(fusion=bad)
    with pytest.raises(ValueError, match="update_in_step"):
        tw.DeAR(update_in_step=3)
    with pytest.raises(ValueError, match="DeAR is SSGD with decoupled=True: for decoupled=False use SSGD"):
        tw.DeAR(decoupled=False)
    with pytest.raises(ValueError, match="flat"):
        tw.SSGD(decoupled=True, collective="torus")
    assert tw.DeAR(update_in_step=["a", "b"]).update_in_step == ("a", "b")
    assert tw.DeAR(update_in_step="a").update_in_step == ("a",)


@pytest.mark.parametrize("later", [False, True])
def test_a_compiled_model_is_updated_in_step(caplog, later):
    results = []
    with caplog.at_level(logging.INFO, "thinwire"):
        for method in ("ssgd", "dear"):
            net = make()
            if not later:
                net.compile(backend="eager")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with tw.attach(net, optimizer, method) as sync:
                if later:
                    net.compile(backend="eager")
                for step in range(3):
                    loss_of(net, step).backward()
                    optimizer.step()
                    assert sync.pending == ()
                    optimizer.zero_grad()
            results.append(weights(net))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert sum("compiled" in record.message for record in caplog.records) == 1


def test_a_layer_that_is_replaced_by_its_compiled_form_is_noticed():
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tw.attach(net, optimizer, "dear") as sync:
        net[0] = torch.compile(net[0], backend="eager")
        loss_of(net, 0).backward()
        optimizer.step()
        assert sync.pending == ()

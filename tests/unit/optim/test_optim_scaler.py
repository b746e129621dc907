"""Loss scales: they never reach norms; a step on scaled gradients is refused; nothing changes but the scale."""

import logging

import oracles
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.engine.state import scaler as engine_scaler
from thinwire.systems.optim import LAMB, LARS

MAKE = {
    "lars": lambda p, **o: LARS(p, 0.5, weight_decay=0.01, **o),
    "lamb": lambda p, **o: LAMB(p, 0.05, **o),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, step):
    draw = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 8, generator=draw)).square().mean()


@pytest.mark.parametrize("name", MAKE)
def test_a_scale_changes_no_bit(name):
    ends = []
    for scale in (1.0, 2.0**16, None):
        model = net()
        optimizer = MAKE[name](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for step in range(5):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other))


@pytest.mark.parametrize("told_by", ["optimizer", "attach"])
@pytest.mark.parametrize("name", MAKE)
def test_a_step_on_scaled_gradients_is_refused(name, told_by):
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = MAKE[name](model.parameters(), **({"scaler": scaler} if told_by == "optimizer" else {}))
    with tw.attach(model, optimizer, scaler=scaler if told_by == "attach" else None):
        optimizer.step()  # nothing has a gradient yet
        scaler.scale(loss_of(model, 0)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"call scaler.step\(optimizer\), or scaler.unscale_\(optimizer\) first"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        scaler.unscale_(optimizer)
        optimizer.step()  # by hand
        scaler.update()
        assert not torch.equal(before[0], model[0].weight)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 2)).backward()
        with pytest.raises(RuntimeError, match="still carry the loss scale"):
            optimizer.step()
    if told_by == "attach":
        optimizer.step()  # after detach nobody knows of a scaler


def test_an_idle_scaler_refuses_nothing():
    for scaler in (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False), None):
        model = net()
        optimizer = LARS(model.parameters(), 0.1, scaler=scaler)
        loss_of(model, 0).backward()
        optimizer.step()  # bf16 autocast needs no scaler
    assert engine_scaler.loss_scale(None, torch.device("cpu")) is None
    assert engine_scaler.loss_scale(torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")) is None
    scale = engine_scaler.loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0), torch.device("cpu"))
    assert float(scale) == 8.0


def test_looking_leaves_no_trace():
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = LARS(model.parameters(), 0.1)
    scaler.scale(loss_of(model, 0)).backward()
    assert engine_scaler.still_scaled(scaler, optimizer)
    assert not scaler._per_optimizer_states
    scaler.unscale_(optimizer)
    assert not engine_scaler.still_scaled(scaler, optimizer)


def test_an_unknown_layout_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(engine_scaler, "warned", False)

    class Other(torch.amp.GradScaler):
        """A GradScaler whose record of stages is kept elsewhere."""

        def __getattribute__(self, name):
            if name == "_per_optimizer_states":
                raise AttributeError(name)
            return super().__getattribute__(name)

    scaler = Other("cpu")
    scaler._scale = torch.ones(())
    optimizer = LARS(net().parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert not engine_scaler.still_scaled(scaler, optimizer)
        assert not engine_scaler.still_scaled(scaler, optimizer)
    assert caplog.text.count("keeps its stages differently") == 1


def test_an_overflow_leaves_state_alone():
    model = net()
    optimizer = LARS(model.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()
        before = [optimizer.state[p].get("momentum_buffer", torch.zeros(())).clone() for p in model.parameters()]
        weights = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
        assert same == (step == 1)
        if step == 1:
            after = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after))
            assert scaler.get_scale() == 512.0


def test_parallel_without_ranks_warns_and_is_off(caplog):
    weights, gradients = oracles.problem()
    with caplog.at_level(logging.WARNING, "thinwire"):
        shared, optimizer = oracles.run(lambda p: LARS(p, 0.1, parallel="world"), weights, gradients, [0.1] * 3)
    assert caplog.text.count("parallel='world' has no effect") == 1
    plain, _ = oracles.run(lambda p: LARS(p, 0.1), weights, gradients, [0.1] * 3)
    assert all(torch.equal(a, b) for a, b in zip(shared, plain))
    assert optimizer.stats().running == "off"
    caplog.clear()
    model = net()
    optimizer = LARS(model.parameters(), 0.1, parallel="auto")
    with caplog.at_level(logging.WARNING, "thinwire"), tw.attach(model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
        assert (optimizer.stats().running, optimizer.stats().why) == ("off", "there is nobody to share with")
    assert "parallel='auto' has no effect on one rank" in caplog.text

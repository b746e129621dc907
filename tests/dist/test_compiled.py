"""torch.compile before and after ``attach``: the same weights as without it, also as one whole graph."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

CASES = [
    ("ssgd", {}),
    ("acp", {"rank": 2, "start_compression_step": 0}),  # 8 bits round a last bit to another code
    ("dear", {"update_in_step": True}),
]
FORMS = ("whole graph", "module.compile", "parts")


def _compiled(net, form, backend):
    """What to call."""
    if form == "whole graph":
        return torch.compile(net, backend=backend, fullgraph=True)
    if form == "module.compile":
        net.compile(backend=backend)
    else:
        for layer in net[::2]:
            layer.compile(backend=backend)
    return net


def _train(rank, name, options, form, before, backend):
    torch._dynamo.reset()
    net = call = cases.model()
    if form is not None and before:
        call = _compiled(net, form, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sync = tw.attach(net, optimizer, name, **options)
    if form is not None and not before:
        call = _compiled(net, form, backend)
    for step in range(3):
        if name != "dear":
            with sync.no_sync():
                cases.loss_of(call, rank, 100 + step).backward()
        cases.down(cases.loss_of(call, rank, step), optimizer)
    steps = sync.stats().steps
    sync.close()
    return cases.weights(net), steps


def _all(rank, size, backend, forms):
    found = {}
    for name, options in CASES:
        plain, steps = _train(rank, name, options, None, False, backend)
        for form in forms:
            for before in (True, False):
                weights, again = _train(rank, name, options, form, before, backend)
                worst = max(float((a - b).abs().max()) for a, b in zip(plain, weights))
                found[name, form, before] = (worst, steps, again)
    return found


def test_compiled_models_train_as_plain_ones():
    for result in run(_all, 2, "eager", FORMS[:1], seconds=250):
        assert len(result) == len(CASES) * 2
        for case, (worst, steps, again) in result.items():
            assert worst == 0.0, case
            assert (steps, again) == (3, 3), case


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "forms"), [("eager", FORMS[1:]), ("aot_eager", FORMS), ("inductor", FORMS[:1])])
def test_compiled_in_parts_and_by_other_backends(backend, forms):
    for result in run(_all, 2, backend, forms, seconds=250):
        for case, (worst, steps, again) in result.items():
            assert worst < 1e-6, case
            assert (steps, again) == (3, 3), case


def _around(rank, size):
    """Reentrant checkpointing around compiled parts: right for exact methods, told for those that keep something."""
    from torch.utils.checkpoint import checkpoint

    found = {}
    for name, options in CASES[:2]:
        weights = []
        for form in (None, "parts"):
            torch._dynamo.reset()
            net = cases.model()
            if form is not None:
                _compiled(net, form, "eager")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            sync = tw.attach(net, optimizer, name, **options)
            try:
                for step in range(2):
                    x, y = cases.batch(rank, step)
                    for layer in net[:-1:2]:
                        x = torch.tanh(checkpoint(layer, x.requires_grad_(), use_reentrant=True))
                    cases.down((net[-1](x) - y).square().mean(), optimizer)
                weights.append(cases.weights(net))
            except RuntimeError as error:
                weights.append(str(error))
            sync.close()
        found[name] = weights
    return found


def test_reentrant_checkpointing_around_compiled_parts_is_never_wrong_in_silence():
    for result in run(_around, 2, seconds=250):
        for name, (plain, compiled) in result.items():
            if isinstance(compiled, str):
                assert name != "ssgd"
                assert "a second backward" in compiled or "twice" in compiled
            else:
                assert all(torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(plain, compiled)), name

"""Low rank on the simulated card: matrices of one shape in one call give what each alone gives."""

import pytest
import torch
from torch import nn
from training import training

from thinwire.core.methods import base, lowrank
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD


def alike():
    """Three matrices of one shape, one of another and a tall one."""
    return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), *(nn.Linear(24, 24) for _ in range(2)), nn.Linear(24, 8, False))


def ran(method, **options):
    """The parameters after some steps, and the launches of two more."""
    with training(method, model=alike, **options) as run:
        for step in range(8):
            if step == 6:
                run.card.names.clear()
                run.card.waits.clear()
            run.step()
        assert not run.card.findings
        assert all(one.where.startswith(("test: ", "torch.optim/")) for one in run.card.waits)
        return [p.detach().inner.clone() for p in run.model.parameters()], run.card.launches


@pytest.mark.parametrize("kind", [ACP, PowerSGD])
@pytest.mark.parametrize(
    "how,options",
    [({}, {}), ({}, {"scaled": True}), ({"error_feedback": False}, {}), ({}, {"dtype": torch.bfloat16})],
    ids=["plain", "scaled", "without feedback", "bf16"],
)
def test_a_batch_gives_what_each_alone_gives(kind, how, options, monkeypatch):
    method = kind(rank=2, min_rate=1.0, verify_every=0, **how)
    together, launches = ran(method, **options)
    for module in (base, lowrank):
        monkeypatch.setattr(module, "LARGE_ON_CARD", 0)
    alone, more = ran(method, **options)
    tolerance = 1e-2 if options.get("dtype") is torch.bfloat16 else 1e-5
    for got, want in zip(together, alone):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert launches < more

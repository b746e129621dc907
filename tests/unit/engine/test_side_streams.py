"""What a side stream reads is not given away before it has: on CPUs, with tensors that only claim to be on a card."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from thinwire.core.program import PlanBucket
from thinwire.engine.memory import Memory
from thinwire.systems.kfac.factors import LayerSums
from thinwire.systems.kfac.layers import find_layers


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on a card, and notes which streams will read it."""

    noted: ClassVar[list] = []

    @property
    def is_cuda(self):
        return True

    def record_stream(self, stream):
        OnCard.noted.append((self.data_ptr(), stream))


@pytest.fixture
def side(monkeypatch):
    OnCard.noted = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "side")
    return OnCard.noted


@pytest.mark.parametrize("cheap_pack", [True, False])
def test_gradients_that_a_program_reads(side, cheap_pack):
    weights = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2))]
    for p in weights[:2]:
        p.grad = torch.ones_like(p).as_subclass(OnCard)
    memory = Memory(PlanBucket(("a", "b", "c")), weights, cheap_pack=cheap_pack)
    memory.bucket(0, None)
    assert side == [(p.grad.data_ptr(), "side") for p in weights[:2]]


def test_sums_of_kfac(side):
    net = nn.Sequential(nn.Linear(3, 2))
    sums = LayerSums(find_layers(net)[0][0], "reference", "expand")
    sums.add_input(torch.ones(4, 3))
    sums.moments[0] = sums.moments[0].as_subclass(OnCard)
    where = sums.moments[0].data_ptr()
    sums.statistic(0)
    assert side == [(where, "side")]

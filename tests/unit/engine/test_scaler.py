"""The search for the GradScaler that calls an optimizer."""

import weakref

import torch

from thinwire.core.methods.topk import TopK
from thinwire.core.program import State, Topology
from thinwire.engine.ranks.communicator import Alone
from thinwire.engine.session import Session
from thinwire.engine.state.scaler import SkippedSteps


def _step_hook():
    """What an optimizer's hook finds."""
    weight = torch.nn.Parameter(torch.zeros(2))
    comm, names = Alone(), {id(weight): "weight"}
    comm.ranks = (0, 1)
    session = Session(TopK(0.1), comm, State(0, Topology(2)), None, names)
    session.find_scaler(torch.optim.SGD([weight], 0.1))
    session.close()
    return session.scaler


class Own(torch.amp.GradScaler):
    def step(self, optimizer, *args, **kwargs):
        return optimizer()


def test_a_scaler_is_found_whose_step_has_called():
    scaler = Own("cpu", enabled=False)
    assert scaler.step(lambda: _step_hook()) is scaler
    assert _step_hook() is None


def test_the_search_keeps_nothing_of_the_loop_alive():
    output = torch.nn.Linear(2, 2)
    gone = weakref.ref(output)
    assert _step_hook() is None
    del output
    assert gone() is None


class Listener:
    def hears(self, optimizer):
        pass


def test_a_listener_that_is_gone_leaves_torch_as_it_was():
    before = torch.amp.GradScaler.step
    listener = Listener()
    heard = SkippedSteps(listener.hears)
    del listener
    assert torch.amp.GradScaler.step is before
    heard.remove()
    assert torch.amp.GradScaler.step is before

"""The search for the GradScaler that calls an optimizer."""

import weakref

import torch

from thinwire.core.methods.topk import TopK
from thinwire.core.program import State, Topology
from thinwire.engine.ranks.communicator import SingleRank
from thinwire.engine.session import Session
from thinwire.engine.state.scaler import SkippedSteps


def _step_hook():
    """What an optimizer's hook finds."""
    weight = torch.nn.Parameter(torch.zeros(2))
    comm, names = SingleRank(), {id(weight): "weight"}
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


class Wrapped:
    """An optimizer of no torch class, which a scaler takes."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, *args, **kwargs):
        return self.inner.step()


class Heard:
    def __init__(self):
        self.skipped = []

    def hears(self, optimizer):
        self.skipped.append(optimizer)


def test_an_optimizer_of_no_torch_class_steps_beside_a_listener_and_its_skipped_steps_are_heard():
    heard = Heard()
    listener, scaler = SkippedSteps(heard.hears), torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    wrapped = Wrapped(torch.optim.SGD([weight], 0.5))
    for gradient in (1.0, torch.inf):
        scaler.scale(weight.sum()).backward()
        weight.grad.mul_(gradient)
        scaler.step(wrapped)
        scaler.update()
        weight.grad = None
    assert weight.tolist() == [0.5, 0.5]
    assert heard.skipped == [wrapped]
    listener.remove()

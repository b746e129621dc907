"""The search for the GradScaler that calls an optimizer."""

import weakref

import torch

from thinwire.core.program import State, Topology
from thinwire.engine.state.scaler import found_scaler


def _search():
    return found_scaler(State(0, Topology(2)), torch.device("cpu"))


def _step_hook():
    return _search()


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

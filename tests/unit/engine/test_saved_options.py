"""Options in states: what their names were before is read, and another value of one still counts."""

import json
import logging

import pytest
import torch

import thinwire as tw
from thinwire.adapters import ddp_persistence
from thinwire.core.program import State
from thinwire.engine.session import Session
from thinwire.engine.state.persistence import saved_options


@pytest.mark.parametrize("ordered, taken", [("True", True), ("False", False)])
def test_a_hook_takes_over_factors_of_the_same_options_by_their_older_names(ordered, taken, caplog):
    world, method = tw.LocalWorld(2), tw.ACP(rank=2, min_rate=1.0, deterministic=True)
    for _ in range(2):
        world.step(method, [{"w": torch.randn(8, 6)} for _ in range(2)])
    session = Session(method, None, world.states[0], None, dict)
    saved = ddp_persistence.to_state_dict(session, [("w", torch.zeros(8, 6))], "model")
    now = json.loads(saved["options"])
    assert now.pop("deterministic") == "True"
    then = {
        {"check_finite": "guard", "update_in_step": "eager", "poison_stale": "check"}.get(k, k): now[k] for k in now
    }
    fresh = Session(method, None, State(0, tw.Topology(2)), None, dict)
    with caplog.at_level(logging.WARNING, "thinwire"):
        ddp_persistence.from_state_dict(fresh, {**saved, "options": json.dumps({**then, "ordered": ordered})}, "model")
    assert bool(fresh.state.snapshot()["shared"]) == taken
    assert ("the method's options changed" in caplog.text) != taken


def test_a_method_of_ones_own_may_still_call_an_option_so():
    class Own(tw.SSGD):
        def options(self):
            return {"merge": 1, "fusion": 2}

    assert saved_options('{"merge": "1", "ordered": "x"}', Own()) == {"merge": "1", "deterministic": "x"}

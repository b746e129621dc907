import pytest

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import Measured
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.engine.controller.planning import sooner_apart
from thinwire.predict.choose.worth import shipped


def asked(seconds, compute=None):
    costs = Costs.of_link(100e6, 200e-6, 2, compute=compute)
    measured = Measured(builtin("resnet50", batch_size=4), costs, Topology(2))
    return sooner_apart(measured, "gloo", 0.01, shipped(), taken="powersgd", seconds=seconds, steps=1.5)


def test_local_steps_are_named_with_both_figures_where_they_are_sooner_by_a_tenth_at_their_worst():
    (said,) = asked(100.0)
    assert said.startswith('auto: attach(model, optimizer, "local") would be faster: ')
    assert said.endswith("against 100 s x 1.50 for powersgd")
    step, steps = float(said.split()[7]), float(said.split()[12])
    assert asked(step * steps / 1.5 / 0.9) == []  # by the middle of its range it would be


def test_nothing_is_said_where_something_has_no_price():
    assert asked(100.0, compute={}) == []


@pytest.mark.parametrize("seconds", [0.0, 1e-3])
def test_nothing_is_said_of_what_is_not_sooner(seconds):
    assert asked(seconds) == []

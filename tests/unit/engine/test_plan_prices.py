"""What "auto" takes of priced plans: the planner's own recommendation, and a word on local steps."""

from dataclasses import replace

import pytest
import torch

from thinwire.core.methods.registry import lossy_candidates
from thinwire.core.methods.registry import method as named
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.engine.controller.planning import EXACT_PLANS, AgreedTimes, PlanPrices
from thinwire.engine.parameters import ManagedParameter
from thinwire.predict.choose import choose
from thinwire.predict.choose.worth import shipped

PROFILE = builtin("resnet50", batch_size=4)


def managed(method, profile=PROFILE):
    parameters = [torch.nn.Parameter(torch.empty(t.shape, device="meta")) for t in profile.tensors]
    return [
        ManagedParameter(i, t.name, p, method.dense(t.name, t.shape, False))
        for i, (t, p) in enumerate(zip(profile.tensors, parameters))
    ]


def prices(bits, lossy=True, workers=2, **options):
    costs = Costs.of_link(bits, 200e-6, workers, **options)
    measured = AgreedTimes(PROFILE, 0.0, 1.0)
    return PlanPrices("gloo", Topology(workers), managed, SSGD(), costs, measured, False, shipped() if lossy else None)


@pytest.mark.parametrize("bits", [1e7, 1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("lossy", [True, False])
def test_auto_takes_what_the_planner_recommends(bits, lossy):
    asked = prices(bits, lossy)
    candidates = [*EXACT_PLANS, *(lossy_candidates() if lossy else ())]
    rows = [(str(i), named(name, **options)) for i, (name, options) in enumerate(candidates)]
    planned = choose(rows, PROFILE, Topology(2), asked.costs, lossy=lossy)
    found = asked.best()
    best = planned.best if planned.best.label in dict(rows) else planned.best_exact  # "alone" is no plan
    assert (found["method"], found["options"]) == candidates[int(best.label)]
    assert found["seconds"] == pytest.approx(best.step_seconds)


def test_local_steps_are_named_where_they_would_be_recommended():
    first, plain, said = prices(1e8).best()["why"]
    assert first.startswith("auto: cast, dtype=int4: ")
    assert plain.startswith("auto: plain ssgd: ")
    assert said.startswith('auto: attach(model, optimizer, "local") would be faster: ')
    assert said.endswith(" for cast")
    *_, said = prices(1e8, lossy=False).best()["why"]
    assert said.startswith('auto: attach(model, optimizer, "local") would be faster: ')
    slow = AgreedTimes(PROFILE.scaled(100.0), 0.0, 1.0)
    assert len(replace(prices(1e11, lossy=False), measurement=slow).best()["why"]) == 2

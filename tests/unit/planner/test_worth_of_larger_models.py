"""What a step is worth on a model much larger than the one that was measured."""

import pytest

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.predict.choose.worth import UNKNOWN, MeasuredWorth, worth_from

ROWS = (
    MeasuredWorth("acp", {"rank": 4}, 1, 0, 1_000_000, 2, (1.7, 1.6, 2.1)),
    MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 1_000_000, 2, (1.0, 1.1, 1.2)),
)


@pytest.mark.parametrize(("elements", "known"), [(1_000_000, True), (4_000_000, True), (4_000_001, False)])
def test_who_needed_many_steps_is_not_trusted_far_from_what_was_measured(elements, known):
    worth = worth_from(ROWS)
    assert (worth(ACP(rank=4), elements, 2) is not UNKNOWN) == known
    assert worth(PowerSGD(rank=4), elements, 2).middle == 1.1

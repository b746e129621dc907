"""Make the plan after the first step: in the order of arrival or of need, with sizes that suit the network's rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.pricing.plans import follows_network, gain_of_overlap
from thinwire.core.program import Method, Plan
from thinwire.engine.controller.planning import make_plan
from thinwire.engine.parameters import Managed
from thinwire.engine.ranks.communicator import Alone, Communicator

_ONE_BUCKET_BYTES = 1 << 20  # not worth splitting


def rebuild(
    method: Method,
    managed: Sequence[Managed],
    communicator: Communicator | Alone,
    order: Sequence[int],
    unseen: Sequence[int],
    backward_seconds: float,
    *,
    measured: bool,
) -> Plan:
    """Make the plan; all ranks call this and get the same.

    Args:
        method: whose plan it is.
        managed: the parameters.
        communicator: of the ranks.
        order: all parameters, by index; rank 0's counts.
        unseen: those that had no gradient; rank 0's likewise.
        backward_seconds: from the first gradient to the last, in the first step; rank 0's likewise.
        measured: another plan will follow from measured times, so the network's rate is not needed here.
    """
    rows = [order, [int(i in unseen) for i in order]]
    agreed = torch.tensor(rows, dtype=torch.int64, device=communicator.device)
    lasted = torch.tensor(backward_seconds, dtype=torch.float64, device=communicator.device)
    communicator.broadcast([agreed, lasted])
    order, flags = agreed.tolist()
    late = [i for i, flag in zip(order, flags) if flag]
    rate = None
    large = sum(m.parameter.nbytes for m in managed) > _ONE_BUCKET_BYTES
    plain = large and not measured and follows_network(method, communicator.backend)
    if plain and isinstance(communicator, Communicator) and (seen := communicator.typical_exchange()) is not None:
        sent, seconds = seen
        rate = gain_of_overlap(lambda size: seconds / sent * size, lasted.item())
    return make_plan(method, managed, order, late, communicator.backend, all_reduce=rate)

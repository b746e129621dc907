"""Say whether local steps would reach a loss sooner than what "auto" chose; "auto" never chooses local steps itself."""

from __future__ import annotations

from typing import Any

from thinwire.core.pricing.plans import Measured
from thinwire.engine.local.settings import local_settings
from thinwire.predict.choose.rank import LOSSY_GAIN
from thinwire.predict.choose.worth import WorthOf, resolved
from thinwire.predict.timeline import simulate


def sooner_apart(
    measured: Measured,
    backend: str,
    optimizer_seconds: float,
    worth_of: WorthOf,
    *,
    taken: str,
    seconds: float,
    steps: float,
) -> list[str]:
    """Return a sentence with both figures if ``"local"``, at the most steps it was seen to need, is sooner by a tenth.

    Args:
        measured: model, network and ranks.
        backend: "gloo" or "nccl".
        optimizer_seconds: of an update.
        worth_of: what a step of each method is worth.
        taken: the chosen method, in words.
        seconds, steps: of the chosen method: time of a step, and steps to a loss relative to exact averaging.
    """
    profile, topology, costs = measured.profile, measured.topology, measured.costs
    where: dict[str, Any] = {"backend": backend, "shared_compute": not measured.side_stream}
    try:
        method = resolved(local_settings("local", {}).priced(), profile, topology, costs, worth=worth_of, **where)
        timeline = simulate(method, profile, topology, costs, optimizer_seconds=optimizer_seconds, **where)
    except (LookupError, ValueError):  # something cannot be priced here
        return []
    worth = worth_of(method, profile.elements, topology.world_size)
    if not timeline.step_seconds * worth.high < (1 - LOSSY_GAIN) * seconds * steps:
        return []
    return [
        f'auto: attach(model, optimizer, "local") would be faster: {timeline.step_seconds:.4g} s a step x '
        f"{worth.middle:.2f} steps, exchanging every {timeline.every}, "
        f"against {seconds:.4g} s x {steps:.2f} for {taken}"
    ]

"""Turn an arrived sum into a contribution: how much its age lets it count, or whether it is too old."""

from __future__ import annotations

from thinwire.systems.parameter_server.effects import Contribution
from thinwire.systems.parameter_server.messages import Grad
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import alpha, norm
from thinwire.systems.parameter_server.table import Member


def weigh(settings: Settings, version: int, member: Member, message: Grad) -> Contribution | None:
    """Return the contribution of a sum to an update of ``version``; None if it is older than the settings allow.

    A pulled sum brings its weight along; a pushed sum gets it here, because v cannot change between arrival and update.
    """
    rows = message.rows
    scale, weight = 1.0, message.weight
    if message.pull == 0:
        tau = version - rows[0].base
        if settings.enforce == "drop" and tau > settings.bound:
            return None
        scale, weight = alpha(settings.alpha, tau), norm(settings.norm, settings.alpha, tau)
    return Contribution(member.node, member.number, rows, scale, weight, message.tensor)

"""Turn the name of a schedule into a plan: which factors are fused, who inverts what, and how it is sent.

Sources: D-KFAC and SPD-KFAC, Shi, Zhang and Li 2021 (arXiv 2107.06533; the exact rules are those of the authors' code,
shyhuai/kfac_pytorch); MPD-KFAC, Osawa et al. 2019, Pauloski et al. 2020; KAISA, Pauloski et al. 2021 (arXiv
2107.01739); DP-KFAC, Zhang, Shi et al. 2022 (arXiv 2206.15143).

Differences from the papers: an exact optimum for fusion and placement by measured cost are the defaults, the published
rules are options; the decomposition's eigenvalues are sent instead of a d_G x d_A table, so A and G need not have the
same owner; DP-KFAC is KAISA with one worker per layer, whose owner uses its own batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.placement import place, place_threshold
from thinwire.core.program import WORLD
from thinwire.systems.kfac.fusion import fused
from thinwire.systems.kfac.plan import TRANSPORTS, FactorLayer, KFACPlan
from thinwire.systems.kfac.prices import inversion_cost, inversion_seconds, message_elements
from thinwire.systems.kfac.times import LayerTimes

SCHEDULES = ("dkfac", "mpd", "spd", "kaisa:<fraction>", "dp")
PLANNERS = ("optimal", "spd", "fixed:<MiB>MB", "layer", "one")
RULES = ("cost", "threshold:<side>", "all", "none")
WEIGHTS = ("cost", "d", "d2", "d3")
METHODS = ("inverse", "inverse_pi", "eigen")
WIRES = ("fp32", "bf16")


@dataclass(frozen=True)
class Choices:
    """The options of a plan, with their checks.

    Attributes:
        schedule: one of ``SCHEDULES``. planner: one of ``PLANNERS``, how factors are fused.
        inverse_rule: one of ``RULES``, what every rank inverts. inverse_weight: one of ``WEIGHTS``, for balancing
            owners.
        inverse_comm: a transport or "auto". method: one of ``METHODS``. wire_dtype: one of ``WIRES``.

    Raises:
        ValueError: a value is unknown; the message lists the choices.
    """

    schedule: str = "spd"
    planner: str = "optimal"
    inverse_rule: str = "cost"
    inverse_weight: str = "cost"
    inverse_comm: str = "auto"
    method: str = "inverse"
    wire_dtype: str = "fp32"

    def __post_init__(self) -> None:
        words = {
            "schedule": (SCHEDULES, r"dkfac|mpd|spd|dp|kaisa:(1(\.0*)?|0?\.\d+|1/\d+)"),
            "planner": (PLANNERS, r"optimal|spd|layer|one|fixed:\d+(\.\d+)?MB"),
            "inverse_rule": (RULES, r"cost|all|none|threshold:\d+"),
            "inverse_weight": (WEIGHTS, "|".join(WEIGHTS)),
            "inverse_comm": (("auto", *TRANSPORTS), "|".join(("auto", *TRANSPORTS))),
            "method": (METHODS, "|".join(METHODS)),
            "wire_dtype": (WIRES, "|".join(WIRES)),
        }
        for name, (choices, pattern) in words.items():
            value = getattr(self, name)
            if not (isinstance(value, str) and re.fullmatch(pattern, value)):
                raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")

    def workers(self, world: int) -> int:
        """Return the number of ranks that precondition each layer.

        Raises:
            ValueError: KAISA's fraction does not match the number of ranks.
        """
        if self.schedule == "dp":
            return 1
        if not self.schedule.startswith("kaisa:"):
            return world
        text = self.schedule.removeprefix("kaisa:")
        above, _, below = text.partition("/")
        workers = world * float(above) / float(below or 1)
        if workers < 1 or abs(workers - round(workers)) > 1e-6 or world % round(workers):
            valid = ", ".join(
                f"kaisa:{w}/{world}" if w < world else "kaisa:1" for w in range(1, world + 1) if world % w == 0
            )
            raise ValueError(f"schedule={self.schedule!r} does not divide {world} ranks into equal groups; use {valid}")
        return round(workers)

    @property
    def prices_factors(self) -> bool:
        """Whether fusion depends on times and costs."""
        return self.schedule == "spd" and self.planner in ("optimal", "spd")

    @property
    def prices_inverses(self) -> bool:
        """Whether placement or transport depend on costs."""
        choosing = self.schedule == "spd" and ("cost" in (self.inverse_rule, self.inverse_weight))
        return choosing or (self.schedule not in ("dkfac", "mpd", "dp") and self.inverse_comm == "auto")


def make_plan(
    layers: Sequence[FactorLayer],
    world_size: int,
    choices: Choices,
    costs: Costs,
    times: LayerTimes | None = None,
) -> KFACPlan:
    """Return the plan of a schedule. The same arguments give the same plan on every rank.

    Args:
        layers: in forward order.
        world_size: number of ranks.
        choices: the options.
        costs: of exchanges ("AllReduce", "Broadcast", "AllGather" in the world) and of inversions.
        times: when factors are ready; None: all at the same time.

    Raises:
        ValueError: KAISA's fraction does not match the number of ranks.
        LookupError: the costs hold no exchange.
    """
    layers = tuple(layers)
    workers = choices.workers(world_size)
    overlap = choices.schedule.partition(":")[0] in ("spd", "kaisa")
    exchange = choices.schedule != "dp"
    known = times or LayerTimes.unknown(len(layers))
    blank = KFACPlan(
        layers, world_size, choices.schedule, choices.method,
        (known.a_order,), (known.g_order,), overlap, exchange, workers, (-1,) * (2 * len(layers)),
        "broadcast" if choices.inverse_comm == "auto" else choices.inverse_comm, choices.wire_dtype,
    )  # fmt: skip
    if not exchange:
        blank = replace(blank, a_buckets=(), g_buckets=())
    else:
        planner = {"spd": choices.planner, "kaisa": "fixed:25MB"}.get(choices.schedule.partition(":")[0], "one")
        a, g = fused(planner if world_size > 1 else "one", layers, world_size, costs, known)
        blank = replace(blank, a_buckets=a, g_buckets=g)
    return _placed(blank, choices, costs)


# --- placement ------------------------------------------------------------------------------------------------------


def _placed(plan: KFACPlan, choices: Choices, costs: Costs) -> KFACPlan:
    """Return the plan with owners and transport."""
    name, world = choices.schedule.partition(":")[0], plan.world_size
    if name == "dkfac" or (world == 1):
        return plan
    if name == "mpd":
        return replace(plan, owners=tuple(i % world for i in range(len(plan.layers)) for _ in range(2)))
    if name in ("kaisa", "dp"):
        plan = replace(plan, owners=_in_groups(plan))
        return plan if plan.workers == 1 else _cheapest([plan], choices, costs)
    return _cheapest([replace(plan, owners=o) for o in _candidates(plan, choices, costs)], choices, costs)


def _in_groups(plan: KFACPlan) -> tuple[int, ...]:
    """Assign layers to groups, then their factors to the group's ranks, both longest first with d^3 as cost."""
    groups = plan.world_size // plan.workers
    of_layer = place([float(x.d_a) ** 3 + float(x.d_g) ** 3 for x in plan.layers], groups).owner
    owners = [-1] * (2 * len(plan.layers))
    for group in range(groups):
        items = [i for i in range(len(owners)) if of_layer[i // 2] == group]
        inside = place([float(plan.dim(i)) ** 3 for i in items], plan.workers).owner
        for item, rank in zip(items, inside):
            owners[item] = group * plan.workers + rank
    return tuple(owners)


def _candidates(plan: KFACPlan, choices: Choices, costs: Costs) -> list[tuple[int, ...]]:
    """Return owners by the rule; "cost" gives three candidates: all, cheap or no factors are inverted everywhere."""
    dims = [plan.dim(i) for i in range(len(plan.owners))]
    world = plan.world_size
    weights = [_weight(choices, costs, d) for d in dims]
    rule = choices.inverse_rule
    if rule == "all":
        return [plan.owners]
    if rule.startswith("threshold:"):
        return [place_threshold(dims, world, int(rule.partition(":")[2]), weights).owner]
    nobody = place(weights, world).owner
    if rule == "none":
        return [nobody]
    sizes = [message_elements(plan.method, d) * plan.layers[i // 2].itemsize for i, d in enumerate(dims)]
    sending = [costs.seconds("Broadcast", WORLD, world, size) for size in sizes]
    seconds = [inversion_seconds(costs, plan.method, d) for d in dims]
    dearer = [i for i in range(len(dims)) if not seconds[i] < sending[i]]
    some = [-1] * len(dims)
    for i, owner in zip(dearer, place([weights[i] for i in dearer], world).owner):
        some[i] = owner
    return [plan.owners, tuple(some), nobody]


def _weight(choices: Choices, costs: Costs, d: int) -> float:
    if choices.inverse_weight == "cost":
        return inversion_seconds(costs, choices.method, d)
    return float(d) ** {"d": 1, "d2": 2, "d3": 3}[choices.inverse_weight]


def _cheapest(plans: Sequence[KFACPlan], choices: Choices, costs: Costs) -> KFACPlan:
    """Return the cheapest of all plans and transports; the first among equals."""
    transports = TRANSPORTS if choices.inverse_comm == "auto" else (choices.inverse_comm,)
    offers = [replace(plan, transport=transport) for plan in plans for transport in transports]
    if len(offers) == 1:  # no choice, so no costs needed
        return offers[0]
    return min(offers, key=lambda plan: inversion_cost(costs, plan).total)

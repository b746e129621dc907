"""The users' options of local steps: how often, with which codec, and how the mean change is applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.registry import METHODS, resolve, unknown
from thinwire.core.methods.registry import method as of_registry
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.periods import CODES, LONGEST, steps_late
from thinwire.core.program import Method
from thinwire.engine.look import Look, as_look

if TYPE_CHECKING:
    from thinwire.core.program import Topology
    from thinwire.predict.timeline.local_steps import Periodic


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: SGD with Nesterov momentum on the mean change of a round.

    Paper: Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.

    A change that keeps its direction over many rounds is multiplied by ``lr / (1 - momentum)`` in the end: by 7 with
    the published values, so the step is larger than the inner optimizer's learning rate alone would make it. So in
    short runs use a smaller momentum, or a ramp.

    Args:
        lr: factor for the mean change.
        momentum: of changes.
        ramp_rounds: rounds of a fragment over which the momentum grows from 0 to its value; 0: no ramp.
    """

    lr: float = 0.7
    momentum: float = 0.9
    ramp_rounds: int = 0

    def __post_init__(self) -> None:
        check_number("Nesterov: lr", self.lr, above=0)
        check_number("Nesterov: momentum", self.momentum, least=0, below=1)
        check_count("Nesterov: ramp_rounds", self.ramp_rounds, 0)

    def momentum_at(self, round_: int) -> float:
        return self.momentum * min(1.0, round_ / self.ramp_rounds) if self.ramp_rounds else self.momentum


@dataclass(frozen=True)
class QSR:
    """Quadratic synchronisation rule: the lower the learning rate, the longer the period, ``(alpha / lr)`` squared.

    Paper: Gu et al.: A Quadratic Synchronization Rule for Distributed Deep Learning, ICLR 2024, arXiv 2310.14423.

    The learning rate is that of the optimizer's first group when a period begins, and must be equal on all ranks. If it
    rises afterwards, as in a warm-up from 0, the period ends as soon as it is too long for the new rate.

    Args:
        alpha: the paper takes 0.0175 to 0.03 for SGD on ImageNet and AdamW on ViT; tune it.
        least: the shortest period, in steps.
        most: the longest period, in steps; None: no limit.
    """

    alpha: float
    least: int = 2
    most: int | None = None

    def __post_init__(self) -> None:
        check_number("QSR: alpha", self.alpha, above=0)
        check_count("QSR: least", self.least, least=1)
        if self.most is not None:
            check_count("QSR: most", self.most, least=self.least)

    def period(self, lr: float) -> int:
        most = 1 << 30 if self.most is None else self.most
        return min(most, max(self.least, math.floor((self.alpha / lr) ** 2))) if lr > 0 else most


@dataclass(frozen=True)
class Local:
    """Local steps: each rank trains independently, and all average their weights, or their changes, every few steps.

    Args:
        sync_every: H, optimizer steps between two exchanges of a parameter. "auto": three rounds of 2 steps are
            measured, with two codecs three of each, unless those in 2 bits take longer than 4 steps. Then H is chosen
            for the least time to a loss: mean step times the number of steps that ``benchmarks/race.py`` has found such
            a period to need. Or a :class:`QSR`.
        codec: the method that sends the mean change, with its residual; None: weights are averaged as they are.
            ``attach`` also takes "int8", "int4", "int2", "int1", "bf16", "fp16" or a method's name, and a command line
            also "none". "auto": 4 bits, or 2 if these reach a loss a twentieth sooner; needs ``sync_every="auto"``.
        outer: the outer optimizer, which applies the mean change; None: the change is applied as it is.
        fragments: parts of the model that are exchanged at different steps, each once in ``sync_every``, so that less
            is sent at a time (Streaming DiLoCo, arXiv 2501.18512).
        fragment_sync_delay: optimizer steps made while a fragment is under way. 0: training waits for the exchange.
            "full": one less than the period. "auto": as many as hide the exchange, or fewer, whichever reaches a loss
            sooner by the times of three rounds.
        fragment_update_alpha: share of its own weights that a rank keeps when a fragment is merged: 0 takes the outer
            weights, which drops the steps made in the meantime. None: those steps stay, and the rank's deviation at
            sending is removed; half of it, if two or more steps were made in the meantime.
        sync_every_max: the largest H that "auto" takes.
        warmup_steps: number of first steps after each of which weights are averaged, as if H were 1.
        moments: state of the inner optimizer that is averaged too, by name, every so many rounds:
            ``{"exp_avg": 3, "exp_avg_sq": 6}`` (DES-LOC, arXiv 2505.22549). Only if training waits for the exchange.
        inside: the method by which the ranks of a machine average gradients at every step; only machines then train
            independently, and each counts once. None: every rank trains independently.
        look: a slow look-ahead along the way that the outer weights have gone, or its ``beta``; None: none.
        average_buffers: names of buffers that become the mean over the ranks, besides running statistics (BatchNorm's);
            others become rank 0's.
        pace: "common": all ranks make as many steps; "own": on slower machines a period has fewer steps, so that nobody
            waits. Then take the loop's steps from ``for step in sync.steps(total)``.
        anchors: "device": what is kept between rounds (outer weights, momenta, slow means, residuals) is with the
            weights; "cpu": it is in host memory, pinned, and on the GPU only while its fragment is under way.

    Raises:
        ValueError: an option is out of range.
    """

    sync_every: int | str | QSR = 8
    codec: Method | str | None = None
    outer: Nesterov | None = None
    fragments: int = 1
    fragment_sync_delay: int | str = 0
    fragment_update_alpha: float | None = None
    sync_every_max: int = LONGEST
    warmup_steps: int = 0
    moments: Mapping[str, int] = field(default_factory=dict)
    inside: Method | None = None
    look: Look | None = None
    pace: str = "common"
    average_buffers: Sequence[str] = field(default=(), repr=False)
    anchors: str = field(default="device", repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.sync_every, int):
            check_count("sync_every", self.sync_every, least=1)
        elif not isinstance(self.sync_every, QSR) and self.sync_every != "auto":
            raise ValueError(
                f'sync_every={self.sync_every!r} must be a whole number of at least 1, "auto" or thinwire.QSR(alpha)'
            )
        check_choice("anchors", self.anchors, ("device", "cpu"))
        check_choice("pace", self.pace, ("common", "own"))
        if self.own_pace and self.fragments > 1 and self.fragment_sync_delay == 0:
            raise ValueError('pace="own": a slow rank would wait for each fragment: set fragment_sync_delay= above 0')
        if self.own_pace and isinstance(self.sync_every, QSR):
            raise ValueError('pace="own" needs a period that does not follow the learning rate: give sync_every=')
        check_count("sync_every_max", self.sync_every_max, least=2)
        check_count("warmup_steps", self.warmup_steps, 0)
        check_count("fragments", self.fragments, least=1)
        if isinstance(self.fragment_sync_delay, str):
            check_choice("fragment_sync_delay", self.fragment_sync_delay, ("full", "auto"))
            if self.fragment_sync_delay == "auto" and isinstance(self.sync_every, QSR):
                raise ValueError('fragment_sync_delay="auto" works with a fixed period, or "auto": give a number')
        else:
            check_count("fragment_sync_delay", self.fragment_sync_delay, 0)
            every, delay = self.sync_every, self.fragment_sync_delay
            if isinstance(every, int) and delay >= every:
                raise ValueError(
                    f"fragment_sync_delay={delay} must be below sync_every={every}: a fragment must be back before it "
                    "is sent again"
                )
        if not (self.outer is None or isinstance(self.outer, Nesterov)):
            raise ValueError(
                f"outer={self.outer!r} must be a thinwire.Nesterov, such as thinwire.Nesterov(lr=0.7), or None"
            )
        if not isinstance(self.moments, Mapping):
            raise ValueError(f'moments={self.moments!r} must be rounds by name, such as {{"exp_avg": 3}}')
        object.__setattr__(self, "moments", dict(self.moments))
        if isinstance(self.average_buffers, str):
            raise ValueError(f"average_buffers={self.average_buffers!r} must be a list of names")
        for name, rounds in self.moments.items():
            check_count(f"moments: {name}", rounds, least=1)
        if self.moments and self.fragment_sync_delay != 0:
            raise ValueError("moments would lose the steps made while they are in transit: set fragment_sync_delay=0")
        if self.fragment_update_alpha is not None:
            check_number("fragment_update_alpha", self.fragment_update_alpha, least=0, most=1)
        if self.codec == "auto" and self.sync_every != "auto":
            raise ValueError('codec="auto" needs sync_every="auto": name a method, or "int8"')
        if not (self.codec is None or self.codec == "auto" or isinstance(self.codec, Method)):
            raise ValueError(f"codec={self.codec!r} must be a method, for example thinwire.ACP(rank=16), or None")
        if self.inside is not None and (not isinstance(self.inside, Method) or self.inside.decoupled):
            raise ValueError(
                f'inside={self.inside!r} must be a method that is not decoupled, for example "ssgd", or None'
            )
        object.__setattr__(self, "look", as_look(self.look))
        if "local" in self.method.unfit:
            raise ValueError(f"{self.method.name} cannot be a codec of local steps: {self.method.unfit['local']}")
        if self.method.decoupled:
            raise ValueError(f"{self.method.name} is decoupled, which is for gradients only: leave out decoupled=True")

    @property
    def codecs(self) -> tuple[Method, ...]:
        """The methods that a round may run, the one that sends least last. Without a codec: plain averaging."""
        if isinstance(self.codec, Method):
            return (self.codec,)
        return (SSGD(),) if self.codec is None else tuple(map(Cast, CODES))

    @property
    def told(self) -> str:
        """The settings in words, as checkpoints name them; those before knew no ``pace``, and of 0.1 no ``look``."""
        return repr(self).replace(", pace='common')", ")").replace(", look=None)", ")")

    @property
    def own_pace(self) -> bool:
        return self.pace == "own"

    @property
    def ahead(self) -> float:
        """How far it looks ahead; 0: not at all."""
        return 0.0 if self.look is None else self.look.beta

    @property
    def method(self) -> Method:
        return self.codecs[0]

    @property
    def first_code(self) -> int:
        """Index of the codec that the first rounds run: the one that sends least."""
        return len(self.codecs) - 1

    @property
    def averages(self) -> bool:
        """Whether weights themselves are averaged: like applying the mean change, but without its rounding."""
        return self.codec is None and self.outer is None

    def measures(self, measured: tuple[int, int] | None) -> bool:
        """Whether times are still to be measured, from which the period or delay is chosen."""
        return measured is None and "auto" in (self.sync_every, self.fragment_sync_delay)

    def period_at(self, count: int, lr: float, measured: tuple[int, int] | None) -> int:
        """Return the steps of the period that begins after ``count`` optimizer steps.

        ``measured``: the period and the delay that "auto" has found, or None.
        """
        if count < self.warmup_steps:
            return 1
        if isinstance(self.sync_every, QSR):
            return self.sync_every.period(lr)
        return self.sync_every if isinstance(self.sync_every, int) else measured[0] if measured else 2

    def priced(self) -> Periodic:
        """Return what the planner needs to know; refuse a period that follows the learning rate, which has no price."""
        from thinwire.predict.timeline.local_steps import Periodic

        every, delay = self.sync_every, self.fragment_sync_delay
        if isinstance(every, QSR):
            raise ValueError("a period that follows the learning rate has no price: give sync_every as a number")
        fixed = None if isinstance(every, str) else every
        codec = None if self.codec == "auto" else self.method
        return Periodic(codec, fixed, delay, self.sync_every_max, self.outer is not None, self.ahead)

    def workers(self, topology: Topology) -> int:
        """Return how many train independently: ranks, or with ``inside`` machines."""
        return topology.world_size if self.inside is None else topology.nodes

    def delay_in(self, period: int, measured: tuple[int, int] | None = None) -> int:
        """Return the number of optimizer steps made while a fragment of this period is under way."""
        delay = self.fragment_sync_delay
        if delay == "auto":
            delay = measured[1] if measured else 0
        return steps_late(delay, period)


_DTYPES = ("fp16", "bf16", "int8", "int4", "int2", "int1")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "local": {"sync_every": "auto", "codec": "auto", "fragment_sync_delay": "auto"},
    "diloco": {"sync_every": 64, "outer": Nesterov()},
}
"""What the names stand for; an option that a user names replaces only its own default.

With a named period, changes are sent in 8 bits and training waits for rounds, unless a codec or a delay is named too.
"""
CANDIDATES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("local", {}), ("local", {"codec": "none"}), ("diloco", {}),
)  # fmt: skip
"""(name, options) of what ``thinwire plan`` prices if no method is named."""


def local_settings(method: Local | str, options: Mapping[str, Any]) -> Local:
    """Return the settings that a preset's name and options stand for, or Local(...) itself."""
    if isinstance(method, Local):
        if options:
            raise ValueError(f"Local(...) carries its own options: pass {', '.join(options)} to it")
        return method
    name = method.lower()
    known = [one.name for one in fields(Local)]
    if "server" in options:
        raise ValueError('server= joins from a loop or callback of your own: thinwire.attach(..., "local", server=...)')
    if wrong := [option for option in options if option not in known]:
        raise ValueError(unknown(f"option of {name}", wrong[0], known))
    chosen = {**PRESETS[name], **options}
    if chosen.get("sync_every") != "auto" and "fragment_sync_delay" not in options:
        chosen.pop("fragment_sync_delay", None)
    if chosen.get("sync_every") != "auto" and "codec" not in options and chosen.get("codec") == "auto":
        chosen["codec"] = "int8"
    if isinstance(codec := chosen.get("codec"), str) and codec != "auto":
        try:
            chosen["codec"] = None if codec == "none" else Cast(codec) if codec in _DTYPES else resolve(codec)
        except ValueError as error:
            raise ValueError(f"codec: {error}; and here auto, none, {', '.join(_DTYPES)}") from None
    if isinstance(inside := chosen.get("inside"), str):
        chosen["inside"] = resolve(inside)
    return Local(**chosen)


def named_local(method: object, options: Mapping[str, Any]) -> Local | None:
    """Return the settings of "local", "diloco" or Local(...), with their options; None: it is something else."""
    if isinstance(method, Local) or (isinstance(method, str) and method.lower() in PRESETS):
        return local_settings(method, options)
    return None


def check_name(method: object) -> None:
    """Refuse a name that neither a method nor local steps have."""
    if isinstance(method, str) and method.lower() not in (names := (*METHODS, *PRESETS, "auto")):
        raise ValueError(unknown("method", method, names))


def named_method(name: str, options: Mapping[str, Any]) -> Method:
    """Return what the planner prices under a name: a method, or local steps."""
    local = named_local(name, options)
    return of_registry(name, **options) if local is None else local.priced()

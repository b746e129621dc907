"""Bytes and seconds of a step on a link: bytes by formulas, without running anything; computation timed here."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from thinwire.core.checks import check_number
from thinwire.systems.split.codecs import Visit
from thinwire.systems.split.ends import LocalPair
from thinwire.systems.split.frames import header_bytes
from thinwire.systems.split.models import View, view_of
from thinwire.systems.split.plan import Recipe, SplitPlan
from thinwire.systems.split.surgery import split_model
from thinwire.systems.split.tasks import Task, TextData

_RECORD = 1 << 14
_RECORD_OVERHEAD = 22  # header 5, type 1, tag 16
_SEGMENT = 1448
_SEGMENT_OVERHEAD = 66  # Ethernet 14, IP 20, TCP with timestamps 32


@dataclass(frozen=True)
class Shape:
    """The properties of a model that determine the bytes.

    Attributes:
        hidden, intermediate: h and f.
        classes: outputs per sample (per token with ``every_token``).
        uses_lengths: whether padding is masked, so that lengths are sent.
        every_token: a language model: logits of all tokens.
        types: whether token types are among its inputs (with ``front_on="cloud"`` they are sent).
        pixels: numbers per picture; 0 if the inputs are tokens.
    """

    hidden: int
    intermediate: int
    classes: int
    uses_lengths: bool = True
    every_token: bool = False
    itemsize: int = 4
    types: bool = False
    pixels: int = 0


@dataclass(frozen=True)
class Crossing:
    kind: str
    up: bool
    parts: tuple[tuple[str, int], ...]
    header: int
    tls: int

    @property
    def wire(self) -> int:
        return sum(count for _, count in self.parts) + self.header + self.tls


def crossings(
    plan: SplitPlan, shape: Shape, lengths: Sequence[int] | None, batch: int, length: int, *,
    training: bool = True, fresh_tokens: int = 0, tls: bool = True,
) -> list[Crossing]:  # fmt: skip
    """Return the messages of one step, exactly as they are sent.

    Args:
        plan, shape: what crosses the cut of which model.
        lengths: real tokens per sample; None: no padding.
        batch, length: samples, and tokens per sample of the padded batch.
        training: False: an evaluation.
        fresh_tokens: real tokens of samples on their first visit, for delta.
        tls: whether the connection uses TLS.

    Raises:
        ValueError: the front is in the cloud, and the shape does not say how large the inputs are.
    """
    width = plan.width(shape.hidden, shape.intermediate)
    visit = Visit(lengths if shape.uses_lengths else None, training=training)
    made = []

    def message(kind: str, up: bool, parts: Sequence[tuple[str, int, int]]) -> None:
        header, total = header_bytes(sum(tensors for *_, tensors in parts)), sum(count for _, count, _ in parts)
        more = _RECORD_OVERHEAD * (1 + math.ceil(total / _RECORD)) if tls else 0
        made.append(Crossing(kind, up, tuple((name, count) for name, count, _ in parts), header, more))

    def state(direction: str) -> tuple[str, int, int]:
        chain, name = plan.chain(direction), plan.carries(direction)
        fresh = fresh_tokens if name == "activation" else 0
        return name, chain.nbytes(batch, length, visit, width, shape.itemsize, fresh), chain.parts(training)

    facts: list[tuple[str, int, int]] = [("lengths", 2 * batch, 1)] if shape.uses_lengths else []
    if training and (plan.chain("up").needs_slots or plan.chain("down").needs_slots):
        facts.append(("slots", 4 * batch, 1))
    if plan.front_on == "cloud":
        inputs = _inputs(shape, batch, length)
        message(inputs[0][0], True, [*inputs, *facts])
        message("z", False, [state("down")])
        if training:
            message("dz", True, [state("up")])
            message("done", False, [("control", 0, 1)])
        return made
    tokens = batch * length if shape.every_token else batch
    logits = tokens * shape.classes * shape.itemsize
    parts = [state("up"), *facts]
    if training and plan.labels == "cloud":
        message("z", True, [*parts, ("labels", 4 * tokens, 1)])
        message("dz", False, [state("down"), ("loss", shape.itemsize, 1)])
        return made
    message("z", True, parts)
    message("logits", False, [("logits", logits, 1)])
    if training:
        message("dlogits", True, [("dlogits", logits, 1)])
        message("dz", False, [state("down")])
    return made


def _inputs(shape: Shape, batch: int, length: int) -> list[tuple[str, int, int]]:
    if shape.pixels:
        return [("pixels", shape.itemsize * shape.pixels * batch, 1)]
    if not shape.uses_lengths:
        raise ValueError("front_on='cloud' sends the inputs: set Shape(pixels=...) to how many numbers a picture has")
    ids = ("ids", 4 * batch * length, 1)
    return [ids, ("types", batch * length, 1)] if shape.types else [ids]


@dataclass(frozen=True)
class Link:
    """A link between edge and cloud.

    Attributes:
        up, down: bits per second from the edge and to it.
        latency_seconds: one way.
        burst_bytes: what a token bucket lets through at once after a pause (the lab's ``LinkSpec.burst_bytes``).
    """

    up: float
    down: float
    latency_seconds: float = 0.0
    burst_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a rate above 0, in bits per second")
        check_number("latency_seconds", self.latency_seconds, least=0)

    def seconds(self, message: Crossing) -> float:
        """Return the seconds from the first byte that leaves to the last that arrives."""
        on_link = message.wire + _SEGMENT_OVERHEAD * math.ceil(message.wire / _SEGMENT)
        rate = self.up if message.up else self.down
        return self.latency_seconds + 8 * max(0, on_link - self.burst_bytes) / rate


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of a step on a link, whose messages follow one another without overlap."""

    bytes_up: int  # through the socket, from the edge
    bytes_down: int
    payload: dict[str, int]  # bytes by kind, both directions
    messages: int
    link_seconds: float  # computed from the link's figures
    compute_seconds: float | None  # of both ends; None: not measured
    provenance: str  # where compute_seconds comes from

    @property
    def wire(self) -> int:
        return self.bytes_up + self.bytes_down

    @property
    def state(self) -> int:
        return self.payload["activation"] + self.payload["gradient"]

    @property
    def step_seconds(self) -> float | None:
        return None if self.compute_seconds is None else self.compute_seconds + self.link_seconds

    def to_data(self) -> dict[str, Any]:
        return asdict(self) | {"wire": self.wire, "step_seconds": self.step_seconds}


def estimate(messages: Sequence[Crossing], link: Link, compute_seconds: float | None = None) -> Estimate:
    """Add up the messages of a step; they follow one another without overlap."""
    payload: Counter[str] = Counter()
    for message in messages:
        payload.update(dict(message.parts))
    return Estimate(
        sum(message.wire for message in messages if message.up),
        sum(message.wire for message in messages if not message.up),
        dict(payload),
        len(messages),
        sum(link.seconds(message) for message in messages),
        compute_seconds,
        "not measured" if compute_seconds is None else "measured here",
    )


def shape_of(view: View, classes: int) -> Shape:
    types = "token_type_ids" in view.inputs
    return Shape(view.hidden, view.intermediate, classes, view.uses_lengths, types=types, pixels=view.pixels)


def steps_of(plan: SplitPlan, shape: Shape, data: TextData, recipe: Recipe) -> list[list[Crossing]]:
    shape = replace(shape, types=shape.types and data.types is not None)
    made = []
    for epoch in range(recipe.epochs):
        for indices in recipe.batches(len(data), epoch):
            lengths = [len(data.tokens[i]) for i in indices]
            fresh = sum(lengths) if epoch == 0 else 0
            made.append(crossings(plan, shape, lengths, len(indices), max(lengths), fresh_tokens=fresh))
    return made


def advise(
    model: nn.Module, task: Task, plan: SplitPlan, recipe: Recipe, link: Link, measured_steps: int = 5
) -> dict[str, Estimate]:
    """Return the mean step of a training with ``plan``, and with the plain cuts ("boundary", "ffn") at the same layer.

    ``measured_steps`` are run here to time the computation; the first does not count. 0: none.
    """
    view = view_of(model)
    plan.check(len(view.layers(model)), view.hidden)
    plain = replace(plan, init="svd", residual="drop", up=(), down=())
    rows = {"boundary": replace(plain, kind="boundary"), "ffn": replace(plain, kind="ffn"), name_of(plan): plan}
    shape = shape_of(view, task.classes)
    found = {}
    for name, row in rows.items():
        seconds = _compute_seconds(model, task, row, recipe, measured_steps) if measured_steps else None
        steps = steps_of(row, shape, task.train, recipe)
        whole, count = estimate([message for step in steps for message in step], link, seconds), len(steps)
        found[name] = replace(
            whole,
            bytes_up=round(whole.bytes_up / count),
            bytes_down=round(whole.bytes_down / count),
            payload={kind: round(total / count) for kind, total in whole.payload.items()},
            messages=len(steps[0]),
            link_seconds=whole.link_seconds / count,
        )
    return found


def name_of(plan: SplitPlan) -> str:
    """Return a plan's name for display, such as ``lowrank r=8, up int8,pack``."""
    words = [f"{plan.kind} r={plan.rank}" if plan.kind in ("lowrank", "principal") else plan.kind]
    words += [f"residual {plan.residual}"] if plan.residual != "drop" else []
    ways = (("both ways", plan.up),) if plan.up == plan.down else (("up", plan.up), ("down", plan.down))
    words += [f"{way} {','.join(chain)}" for way, chain in ways if chain]
    return ", ".join(words)


def _compute_seconds(model: nn.Module, task: Task, plan: SplitPlan, recipe: Recipe, steps: int) -> float:
    """Return the seconds of a step without a link, both ends in this process, with codecs: the median of ``steps``."""
    batches = [task.train.batch(indices) for indices in recipe.batches(len(task.train), 0)[: steps + 1]]
    samples = [(batch.inputs, batch.lengths) for batch in batches] if plan.calibrated else None
    pair = LocalPair(*split_model(model, plan, samples), recipe, recipe.steps(len(task.train)))
    spent = []
    for batch in batches:
        start = time.perf_counter()
        pair.step(batch)
        spent.append(time.perf_counter() - start)
    timed = sorted(spent[1:] or spent)
    return timed[len(timed) // 2]

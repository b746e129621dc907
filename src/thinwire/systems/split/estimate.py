"""Bytes and seconds of a step by formulas, without running anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.core.checks import check_number
from thinwire.systems.split.codecs import Visit
from thinwire.systems.split.frames import HEADER_BYTES
from thinwire.systems.split.plan import SplitPlan

_RECORD = 1 << 14
_RECORD_OVERHEAD = 22  # header 5, type 1, tag 16
_SEGMENT = 1448
_SEGMENT_OVERHEAD = 66  # Ethernet 14, IP 20, TCP with timestamps 32


@dataclass(frozen=True)
class Shape:
    """The properties of a model that determine the bytes.

    Attributes:
        hidden: h.
        intermediate: f.
        classes: outputs per sample (per token with ``every_token``).
        uses_lengths: whether padding is masked, so that lengths are sent.
        every_token: a language model: logits of all tokens.
        itemsize: bytes of a number.
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
    """One message.

    Attributes:
        kind: of its first frame.
        up: from the edge to the cloud.
        parts: payload bytes by the ledger's kinds.
        header: bytes of its frames' headers.
        tls: bytes added by TLS.
    """

    kind: str
    up: bool
    parts: tuple[tuple[str, int], ...]
    header: int
    tls: int

    @property
    def wire(self) -> int:
        """Bytes through the socket."""
        return sum(count for _, count in self.parts) + self.header + self.tls


def crossings(
    plan: SplitPlan,
    shape: Shape,
    lengths: Sequence[int] | None,
    batch: int,
    length: int,
    *,
    training: bool = True,
    fresh_tokens: int = 0,
    tls: bool = True,
) -> list[Crossing]:
    """Return the messages of one step, exactly as they are sent.

    Args:
        plan: what crosses the cut.
        shape: of the model.
        lengths: real tokens per sample; None: no padding.
        batch: number of samples.
        length: tokens per sample of the padded batch.
        training: False: an evaluation.
        fresh_tokens: real tokens of samples on their first visit, for delta.
        tls: whether the connection uses TLS.

    Raises:
        ValueError: the front is in the cloud, and the shape does not say how large the inputs are.
    """
    width = plan.width(shape.hidden, shape.intermediate)
    visit = Visit(lengths if shape.uses_lengths else None, training=training)
    made = []

    def message(kind: str, up: bool, parts: Sequence[tuple[str, int, Sequence[int]]]) -> None:
        """Add a message; parts are (ledger's kind, bytes, dimensions of each frame)."""
        header = sum(HEADER_BYTES + 4 * dims for _, _, frames in parts for dims in frames)
        total = header + sum(count for _, count, _ in parts)
        more = _RECORD_OVERHEAD * math.ceil(total / _RECORD) if tls else 0
        made.append(Crossing(kind, up, tuple((name, count) for name, count, _ in parts), header, more))

    def state(direction: str) -> tuple[str, int, list[int]]:
        chain, name = plan.chain(direction), plan.carries(direction)
        fresh = fresh_tokens if name == "activation" else 0
        return name, chain.nbytes(batch, length, visit, width, shape.itemsize, fresh), chain.frames(training)

    facts: list[tuple[str, int, list[int]]] = [("lengths", 2 * batch, [1])] if shape.uses_lengths else []
    if training and (plan.chain("up").needs_slots or plan.chain("down").needs_slots):
        facts.append(("slots", 4 * batch, [1]))
    if plan.front_on == "cloud":
        inputs = _inputs(shape, batch, length)
        message(inputs[0][0], True, [*inputs, *facts])
        message("z", False, [state("down")])
        if training:
            message("dz", True, [state("up")])
            message("done", False, [("control", 0, [1])])
        return made
    tokens = batch * length if shape.every_token else batch
    logits = tokens * shape.classes * shape.itemsize
    dims = [3 if shape.every_token else 2]
    parts = [state("up"), *facts]
    if not training:
        message("z", True, parts)
        message("logits", False, [("logits", logits, dims)])
        return made
    down = state("down")
    if plan.labels == "cloud":
        message("z", True, [*parts, ("labels", 4 * tokens, [2 if shape.every_token else 1])])
        message("dz", False, [down, ("loss", shape.itemsize, [0])])
        return made
    message("z", True, parts)
    message("logits", False, [("logits", logits, dims)])
    message("dlogits", True, [("dlogits", logits, dims)])
    message("dz", False, [down])
    return made


def _inputs(shape: Shape, batch: int, length: int) -> list[tuple[str, int, list[int]]]:
    """Return the frames of a front's inputs; padding is sent too."""
    if shape.pixels:
        return [("pixels", shape.itemsize * shape.pixels * batch, [4])]
    if not shape.uses_lengths:
        raise ValueError("front_on='cloud' sends the inputs: set Shape(pixels=...) to how many numbers a picture has")
    ids = ("ids", 4 * batch * length, [2])
    return [ids, ("types", batch * length, [2])] if shape.types else [ids]


def payload_bytes(messages: Sequence[Crossing]) -> dict[str, int]:
    """Return a step's payload bytes by kind, both directions together."""
    total: Counter[str] = Counter()
    for message in messages:
        total.update(dict(message.parts))
    return dict(total)


@dataclass(frozen=True)
class Link:
    """A link between edge and cloud.

    Attributes:
        up: bits per second from the edge.
        down: bits per second to the edge.
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
    """The predicted cost of a step on a link.

    Attributes:
        bytes_up: through the socket, from the edge.
        bytes_down: through the socket, to the edge.
        payload: by kind, both directions.
        messages: how many.
        link_seconds: of the messages, one after the other; computed from the link's figures.
        compute_seconds: of both ends; None if not measured.
        provenance: where ``compute_seconds`` comes from.
    """

    bytes_up: int
    bytes_down: int
    payload: dict[str, int]
    messages: int
    link_seconds: float
    compute_seconds: float | None
    provenance: str

    @property
    def wire(self) -> int:
        """Bytes through the socket, both directions."""
        return self.bytes_up + self.bytes_down

    @property
    def state(self) -> int:
        """Bytes of activation and gradient."""
        return self.payload["activation"] + self.payload["gradient"]

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds; None if the computation was not measured."""
        return None if self.compute_seconds is None else self.compute_seconds + self.link_seconds

    def to_data(self) -> dict[str, Any]:
        return asdict(self) | {"wire": self.wire, "step_seconds": self.step_seconds}


def estimate(messages: Sequence[Crossing], link: Link, compute_seconds: float | None = None) -> Estimate:
    """Add up the messages of a step. They follow one another without overlap."""
    return Estimate(
        sum(message.wire for message in messages if message.up),
        sum(message.wire for message in messages if not message.up),
        payload_bytes(messages),
        len(messages),
        sum(link.seconds(message) for message in messages),
        compute_seconds,
        "not measured" if compute_seconds is None else "measured here",
    )

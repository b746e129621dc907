"""What is cut where, and what is sent: a frozen plan, equal at both ends, compared by hash before the first step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from thinwire.core.records import UNREADABLE
from thinwire.systems.split.codecs import Chain, check_chain

KINDS = ("lowrank", "ffn", "boundary")
INITS = ("svd", "activation")
LABELS = ("edge", "cloud")
FRONT_ON = ("edge", "cloud")


@dataclass(frozen=True)
class SplitPlan:
    """Where a model is cut in two, and in what form the activation is sent.

    Attributes:
        cut: the layer that is cut, counted from 1; the edge runs what comes before.
        kind: "lowrank": its first dense layer is split into two thin ones; r numbers per token are sent (SFT). "ffn":
            the cut is between that dense layer and its activation; f numbers are sent. "boundary": the cut is after the
            layer; h numbers are sent.
        rank: r; the other kinds do not use it.
        residual: of the feed-forward block that is cut. "drop": omitted, as in the paper. "keep": its h numbers are
            sent too. "lowrank:q": only their q principal directions are sent. A "boundary" has no residual to drop.
        labels: who computes the loss: "edge" (labels stay there) or "cloud" (labels are sent; one round trip per step).
        init: of the thin factors. "svd": closest to the weight. "activation": closest to its output on sample batches.
        up: codecs for what goes up, such as ("int8", "pack"): the activation if the front is at the edge.
        down: codecs for what comes down: the activation's gradient if the front is at the edge.
        front_on: who runs the first layers: "edge", or "cloud" as in the published code. With "cloud" the edge has the
            back and the labels, sends its inputs (token ids) every step, and the activation comes down.
    """

    cut: int
    kind: str = "lowrank"
    rank: int = 8
    residual: str = "drop"
    labels: str = "edge"
    init: str = "svd"
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    front_on: str = "edge"

    def __post_init__(self) -> None:
        object.__setattr__(self, "up", tuple(self.up))
        object.__setattr__(self, "down", tuple(self.down))
        for name, known in (("kind", KINDS), ("labels", LABELS), ("init", INITS), ("front_on", FRONT_ON)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")
        for name in ("cut", "rank"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number of at least 1")
        if self.residual not in ("drop", "keep") and self.kept_directions < 1:
            raise ValueError(f"residual={self.residual!r} is unknown; use drop, keep or a rank such as lowrank:4")
        if self.kind == "boundary" and self.residual != "drop":
            raise ValueError("a boundary cut always keeps every residual: leave residual out")
        if self.kind != "lowrank" and self.init != "svd":
            raise ValueError(f"init={self.init!r} needs factors: use it with kind='lowrank'")
        if self.front_on == "cloud" and self.labels == "cloud":
            raise ValueError(
                "labels='cloud' cannot be used with front_on='cloud': the edge has the back, which computes the loss; "
                "leave labels out"
            )
        check_chain(self.up, "up", self.carries("up"))
        check_chain(self.down, "down", self.carries("down"))

    @property
    def kept_directions(self) -> int:
        """q of ``residual="lowrank:q"``; 0 for "drop" and "keep", -1 for anything else."""
        word, colon, count = self.residual.partition(":")
        if not colon:
            return 0 if word in ("drop", "keep") else -1
        return int(count) if word == "lowrank" and count.isascii() and count.isdigit() else -1

    @property
    def calibrated(self) -> bool:
        """Whether the surgery needs sample batches."""
        return self.init == "activation" or self.kept_directions > 0

    def carries(self, direction: str) -> str:
        """Return what goes "up" or comes "down": "activation" or "gradient"."""
        return "activation" if (direction == "up") == (self.front_on == "edge") else "gradient"

    def chain(self, direction: str) -> Chain:
        """Return the codecs of "up" or "down", without state yet."""
        return Chain(self.up if direction == "up" else self.down, direction, self.carries(direction))

    @property
    def leaves(self) -> str | None:
        """A sentence about what data leaves the edge besides activations; None: nothing."""
        if self.front_on == "cloud":
            return "front_on='cloud': the inputs (token ids) leave the edge, every step"
        return "labels='cloud': the labels leave the edge" if self.labels == "cloud" else None

    def width(self, hidden: int, intermediate: int) -> int:
        """Return how many numbers per token are sent, for a model of these widths."""
        main = {"lowrank": self.rank, "ffn": intermediate, "boundary": hidden}[self.kind]
        return main + (hidden if self.residual == "keep" else self.kept_directions)

    def check(self, layers: int, hidden: int) -> None:
        """Raise ``ValueError`` if a model with that many layers of this width cannot be cut by this plan."""
        if self.cut > layers:
            raise ValueError(f"cut={self.cut} is outside 1 to {layers}, the layers of this model")
        if self.kind == "lowrank" and self.rank > hidden:
            raise ValueError(f"rank={self.rank} is outside 1 to {hidden}, the width of this model")
        if self.kept_directions > hidden:
            raise ValueError(f"residual={self.residual!r} keeps more directions than the {hidden} of this model")

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SplitPlan:
        """Read back what ``to_json`` wrote.

        Raises:
            ValueError: the text holds no plan.
        """
        try:
            return cls(**json.loads(text))
        except UNREADABLE as error:
            raise ValueError(f"this is not a split plan: {error}") from error

    @property
    def hash(self) -> str:
        """A short digest, the same on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

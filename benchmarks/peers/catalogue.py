"""Who is compared, in which runs, and under which setting. Plain data; nothing is measured here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from thinwire.tools.bench.rows import Row, parse_rows

LINKS = ("100mbit", "1gbit")
LONG = ("100mbit 25ms 0.1%", "20mbit 75ms 0.1%")
WORKERS = (2,)
EVERY = 8  # steps of a turn, and between two averages of the parameters

BASELINE = parse_rows("ddp")


@dataclass(frozen=True)
class Group:
    """Rows that run together, in turns, with DDP beside them.

    Attributes:
        rows: what runs.
        every: steps of a turn.
    """

    rows: tuple[Row, ...]
    every: int = EVERY


def _peer(label: str, function: str, **options: int) -> Row:
    return Row(label, f"contenders.{function}", dict(options))


@dataclass(frozen=True)
class Size:
    """A model, and the loss to which rows train it.

    Attributes:
        target: held-out loss, nats per character.
        most_steps: of a row that does not get there.
        exchanging: rows that send something in every step, and thinwire's local steps.
        beside: of thinwire's, in the runs of other libraries.
    """

    model: str
    target: float
    most_steps: int
    exchanging: str
    beside: str

    @property
    def setting(self) -> dict[str, object]:
        """What runs must have in common."""
        return {"model": self.model, "target": self.target, "most_steps": self.most_steps}

    @property
    def groups(self) -> dict[str, Group]:
        """Of rows, by name."""
        beside = parse_rows(self.beside)
        return {
            "gradients": Group((*BASELINE, *parse_rows(self.exchanging))),
            "averaging": Group(
                (
                    *BASELINE,
                    _peer("Accelerate LocalSGD", "accelerate_rows:local_sgd", every=EVERY),
                    _peer("torchft DDP", "torchft_rows:ddp"),
                    _peer("torchft LocalSGD", "torchft_rows:local_sgd", every=EVERY),
                    _peer("torchft DiLoCo", "torchft_rows:diloco", every=EVERY),
                    *beside,
                )
            ),
            "hivemind": Group(
                (*BASELINE, _peer("hivemind, local updates", "hivemind_rows:local_updates", every=2 * EVERY), *beside),
                every=2 * EVERY,
            ),
        }


SIZES = {
    "3.3M": Size(
        "chargpt:layers=6:width=208:heads=4",
        2.85,
        200,
        "ddp-best:buckets=1/4, ddp-fp16, torch-powersgd:rank=4, ssgd, cast:dtype=int8, powersgd:rank=4, acp:rank=16, "
        "local:sync_every=4:codec=int8, local:sync_every=8:codec=int8, auto:lossy=true",
        "ssgd, powersgd:rank=4",
    ),
    "3.3M-long": Size(  # at the rate that serves DDP and ours best, to what DDP has after some 190 steps
        "chargpt:layers=6:width=208:heads=4:lr=0.0005",
        2.35,
        320,
        "ddp-fp16, torch-powersgd:rank=4, cast:dtype=int8, powersgd:rank=4, acp:rank=16, local, "
        "local:sync_every=8:codec=int8, local:sync_every=8:codec=int8:fragment_sync_delay=3, auto:lossy=true",
        "powersgd:rank=4, local:sync_every=8:codec=int8:fragment_sync_delay=3",
    ),
    "1.1M": Size(  # likewise
        "chargpt:layers=4:width=144:heads=4:lr=0.0007",
        2.3,
        320,
        "ddp-best:buckets=0.25/1, ddp-fp16, torch-powersgd:rank=4, ssgd, cast:dtype=int8, cast:dtype=int4, "
        "powersgd:rank=4, local, local:sync_every=8:codec=int8, local:sync_every=8:codec=int8:fragment_sync_delay=3, "
        "auto:lossy=true",
        "cast:dtype=int4, local:sync_every=8:codec=int8",
    ),
}

AS_IT_COMES = parse_rows("local")  # its steps are those of what it chooses on a link
_TOLL_ROWS = (
    *parse_rows(
        "alone, accumulate:every=4, torch-powersgd:rank=4, local:sync_every=32:codec=none"
        + "".join(f", local:sync_every={h}:codec=int2" for h in (4, 8, 16, 64))
        + "".join(f", local:sync_every={h}:codec=int1:look=0.5" for h in (4, 8, 16))
        + "".join(
            f", local:sync_every={h}:codec=int2:fragment_sync_delay={d}" for h, d in ((4, 1), (8, 3), (16, 7), (64, 15))
        )
    ),
    _peer("Accelerate LocalSGD, every 32", "accelerate_rows:local_sgd", every=32),
    _peer("torchft LocalSGD, every 32", "torchft_rows:local_sgd", every=32),
)


@dataclass(frozen=True)
class Tolls:
    """A model on so many workers, whose rows' tolls are measured.

    Attributes:
        steps: of the whole runs in which ``../race.py`` trains.
        links: on which rows are timed.
        left_out: labels of the rows that are not trained.
        not_timed: more labels, by link.
        more: rows besides those of all.
    """

    model: str
    workers: int
    steps: int
    links: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    not_timed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    more: tuple[Row, ...] = ()

    @property
    def trained(self) -> tuple[Row, ...]:
        return tuple(row for row in (*BASELINE, *self.more, *_TOLL_ROWS) if row.label not in self.left_out)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those, and ``local`` as it comes.

        hivemind's ranks find each other by time, not after so many steps: where turns end before both have met, one
        waits until it gives up.
        """
        return (*AS_IT_COMES, *self.trained)

    def timed(self, link: str) -> tuple[Row, ...]:
        """Rows that are timed on one network."""
        return tuple(row for row in self.rows if row.label not in self.not_timed.get(link, ()))


def trained_as(label: str) -> str:
    """The label of the row whose losses are this one's: all average the same weights, as often."""
    found = re.fullmatch(r"(?:Accelerate|torchft) LocalSGD, every (\d+)", label)
    return f"local sync_every={found[1]} codec=none" if found else label


_UNTRAINED = (
    "accumulate every=4",
    "torch-powersgd rank=4",
    *(f"local sync_every={h} codec=int1 look=0.5" for h in (8, 16, 4)),
)
_LATEST = ("16 codec=int2 fragment_sync_delay=7", "64 codec=int2 fragment_sync_delay=15")
TOLLS = {
    "0.4M/8": Tolls(
        "chargpt:layers=3:width=96:heads=3", 8, 1504, ("10mbit", "100mbit"), _UNTRAINED, {"10mbit": ("ddp",)},
        parse_rows("cast:dtype=int4, local:sync_every=4:codec=int4, local:sync_every=2:codec=int2"),
    ),
    "1.1M/2": Tolls(
        "chargpt:layers=4:width=144:heads=4", 2, 1504, ("10mbit", "100mbit", "1gbit", *LONG),
        not_timed={
            LONG[0]: ("local", "cast dtype=int4"),
            LONG[1]: ("local", "cast dtype=int4", "ddp", "accumulate every=4"),  # a step of DDP takes half a minute
        },
        more=parse_rows("cast:dtype=int4"),
    ),
    "1.1M/4": Tolls(
        "chargpt:layers=4:width=144:heads=4", 4, 1504, ("10mbit", "100mbit"), _UNTRAINED, {"10mbit": ("ddp",)},
        parse_rows(
            "cast:dtype=int4, local:sync_every=4:codec=int4, local:sync_every=4:codec=int4:look=0.5, "
            "local:sync_every=4:codec=int2:look=0.5, local:sync_every=2:codec=int2:look=0.5"
        ),
    ),
    "3.3M/2": Tolls(
        "chargpt:layers=6:width=208:heads=4", 2, 1504, ("10mbit", "100mbit", "1gbit"), _UNTRAINED[:4],
        {"10mbit": ("ddp",)},
    ),
    "10M/2": Tolls(
        "chargpt:layers=8:width=320:heads=8", 2, 600, ("100mbit", "1gbit"),
        (*_UNTRAINED[:4], *(f"local sync_every={late}" for late in _LATEST)),
    ),
}  # fmt: skip
"""By size and number of workers."""


INSTALLED = ("torch", "accelerate", "torchft", "hivemind")
"""Distributions of the lock file that are compared; their versions stand on the page."""

TRIED = {
    "kfac-pytorch": ("K-FAC (gpauloski/kfac-pytorch)", "import kfac"),
    "dion": ("Dion, orthonormal updates (microsoft/dion)", "import dion"),
    "horovod==0.28.1": ("Horovod", "import horovod.torch; horovod.torch.init()"),
    "bagua==0.9.2": ("Bagua", "import bagua.torch_api"),
    "byteps==0.2.5.post15": ("BytePS", "import byteps.torch"),
    "colossalai==0.5.0": ("Colossal-AI", "import colossalai"),
    "powersgd==0.0.2": ("PowerSGD (epfml/powersgd)", "import powersgd"),
}
"""Peers that are not in the lock file: what pip is asked for (the newest version) -> what it is, and what has to
work then. ``attempts.py`` tries."""

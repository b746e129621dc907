"""Who is compared, in which runs, and under which setting. Plain data; nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass

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

_TOLL_TRAINED = (
    *BASELINE,
    *parse_rows(
        "powersgd:rank=4, local:sync_every=4:codec=int2, local:sync_every=8:codec=int2, "
        "local:sync_every=8:codec=int8, local:sync_every=8:codec=int8:fragment_sync_delay=3, "
        "local:sync_every=16:codec=int8, local:sync_every=16:codec=int2, "
        "local:sync_every=16:codec=int2:fragment_sync_delay=7, local:sync_every=32:codec=int2, "
        "local:sync_every=32:codec=int2:fragment_sync_delay=7, torch-powersgd:rank=4"
    ),
    *(_peer(f"Accelerate LocalSGD, every {h}", "accelerate_rows:local_sgd", every=h) for h in (8, 16, 32)),
)
_WHOLE_TRAINED = (
    *BASELINE,
    *parse_rows(
        "alone, accumulate:every=4, torch-powersgd:rank=4, local:sync_every=32:codec=none"
        + "".join(f", local:sync_every={h}:codec=int2" for h in (4, 8, 16, 64))
        + "".join(f", local:sync_every={h}:codec=int1:look=0.5" for h in (4, 8, 16))
        + "".join(
            f", local:sync_every={h}:codec=int2:fragment_sync_delay={d}" for h, d in ((4, 1), (8, 3), (16, 7), (64, 15))
        )
    ),
    _peer("Accelerate LocalSGD, every 32", "accelerate_rows:local_sgd", every=32),
)
_TOLL_NEAR = parse_rows("cast:dtype=int8, cast:dtype=int4")  # so near to DDP that they train at its rate alone
_NEAR = tuple(row.label for row in _TOLL_NEAR)
_TOLL_TIMED = tuple(_peer(f"torchft LocalSGD, every {h}", "torchft_rows:local_sgd", every=h) for h in (8, 16, 32))
_LATEST = "local sync_every=32 codec=int2 fragment_sync_delay=7"


@dataclass(frozen=True)
class Tolls:
    """A model on so many workers, whose rows' tolls are measured.

    Attributes:
        rates: of 0.001; DDP takes none at the ends.
        links: on which rows are timed.
        left_out: labels of the rows that are not trained.
        not_timed: more labels, by link.
        tuned_on: seeds whose median says which rate is a row's best.
        whole: steps of whole runs, which ``../race.py`` trains; 0: of runs to a loss early on.
    """

    model: str
    workers: int
    rates: tuple[float, ...]
    links: tuple[str, ...]
    left_out: tuple[str, ...]
    not_timed: dict[str, tuple[str, ...]]
    tuned_on: tuple[int, ...] = (0,)
    whole: int = 0

    @property
    def trained(self) -> tuple[Row, ...]:
        """Rows that are trained apart.

        hivemind's ranks find each other by time, not after so many steps: where turns end before both have met, one
        waits until it gives up.
        """
        return tuple(row for row in (_WHOLE_TRAINED if self.whole else _TOLL_TRAINED) if row.label not in self.left_out)

    @property
    def near(self) -> tuple[Row, ...]:
        """Rows that are trained at the rate that serves DDP best."""
        return () if self.whole else tuple(row for row in _TOLL_NEAR if row.label not in self.left_out)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those, and those that are timed alone."""
        labels = [row.label for row in self.trained]
        return (
            *BASELINE,
            *self.near,
            *self.trained[1:],
            *(row for row in _TOLL_TIMED if trained_as(row.label) in labels),
        )

    def timed(self, link: str) -> tuple[Row, ...]:
        """Rows that are timed on one network."""
        return tuple(row for row in self.rows if row.label not in self.not_timed.get(link, ()))


def trained_as(label: str, whole: int = 0) -> str:
    """The label of the row whose losses are this one's: all average the same weights, as often."""
    label = label.replace("torchft", "Accelerate")
    return (
        label.replace("Accelerate LocalSGD, every ", "local sync_every=") + " codec=none"
        if whole and "Accel" in label
        else label
    )


_TINY = "chargpt:layers=4:width=144:heads=4"
_SMALL, _LARGE = "chargpt:layers=6:width=208:heads=4", "chargpt:layers=8:width=320:heads=8"
_SHORT_IN_2_BITS = ("local sync_every=4 codec=int2", "local sync_every=8 codec=int2")
_LATE = (
    "local sync_every=8 codec=int8 fragment_sync_delay=3",
    "local sync_every=16 codec=int2 fragment_sync_delay=7",
    _LATEST,
)
TOLLS = {
    "1.1M/2": Tolls(
        _TINY, 2, (0.5, 0.7, 1.0), ("10mbit", "100mbit", "1gbit"),  # on one seed, 0.35 was best for no row
        left_out=("local sync_every=16 codec=int8", *_SHORT_IN_2_BITS, *_LATE[1:]),
        not_timed={},
        tuned_on=(0, 4, 5),  # the rate at which DDP does best on the first is nearly too high on others
    ),
    "1.1M/2/1504": Tolls(
        _TINY, 2, (), ("10mbit", "100mbit", "1gbit", *LONG), (),
        not_timed={LONG[1]: ("ddp", "accumulate every=4")},  # whose steps take half a minute there
        whole=1504,
    ),
    "3.3M/2": Tolls(
        _SMALL, 2, (0.25, 0.35, 0.5, 0.7, 1.0), ("10mbit", "100mbit", "250mbit", "1gbit"),
        left_out=_SHORT_IN_2_BITS,  # long periods need hardly more steps here
        # A step of DDP takes ten seconds on the slowest link; on the others no round takes as long as seven steps.
        # Gradients in 8 and 4 bits were timed in a second run on a slower day, of which ../results/peers.md tells.
        not_timed={
            "10mbit": ("ddp", *_NEAR), "100mbit": (_LATEST, *_NEAR), "250mbit": (_LATEST,), "1gbit": (_LATEST, *_NEAR)
        },
    ),
    "3.3M/4": Tolls(
        _SMALL, 4, (0.35, 0.5, 0.7), ("100mbit", "1gbit", *LONG),
        left_out=("local sync_every=16 codec=int8", "Accelerate LocalSGD, every 8", *_LATE),
        # On 1 Gb/s a round in 8 bits is so short that 2 bits gain nothing; on the long wires a step of DDP takes half a
        # minute and more. On the slower one weights are not averaged exactly after 16 steps, which on the faster one
        # takes nearly twice as long as after 32.
        not_timed={
            "1gbit": _SHORT_IN_2_BITS,
            LONG[0]: ("ddp", *_NEAR),
            LONG[1]: ("ddp", *_NEAR, "Accelerate LocalSGD, every 16", "torchft LocalSGD, every 16"),
        },
    ),
    "10M/2": Tolls(
        # Torch's hook and Accelerate's every 32 were trained at 0.18 and 0.25 alone, where all others are best.
        _LARGE, 2, (0.12, 0.18, 0.25, 0.35, 0.5, 0.7), ("100mbit", "1gbit"),
        left_out=(
            "local sync_every=16 codec=int8", "local sync_every=32 codec=int2", "Accelerate LocalSGD, every 16",
            *_NEAR, *_SHORT_IN_2_BITS, *_LATE,
        ),
        not_timed={},
    ),
}  # fmt: skip
"""By size and number of workers, and steps of whole runs."""


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

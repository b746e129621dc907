"""Who is compared, in which runs, and under which setting. Plain data; nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.bench.rows import Row, parse_rows

MODEL = "chargpt:layers=2:width=128:heads=4:batch=8"
TARGET = 2.7  # held-out loss, nats per character
MOST_STEPS = 256
LINKS = ("100mbit", "1gbit")
WORKERS = (2, 4)
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


GROUPS = {
    "gradients": Group(
        (
            *BASELINE,
            *parse_rows("ddp-best:buckets=0.25, ddp-fp16, torch-powersgd:rank=4"),
            *parse_rows("ssgd, dear, powersgd:rank=4, acp:rank=4, acp:rank=16, topk:density=0.01, auto:lossy=true"),
        )
    ),
    "averaging": Group(
        (
            *BASELINE,
            _peer("Accelerate LocalSGD", "accelerate_rows:local_sgd", every=EVERY),
            _peer("torchft DDP", "torchft_rows:ddp"),
            _peer("torchft LocalSGD", "torchft_rows:local_sgd", every=EVERY),
            _peer("torchft DiLoCo", "torchft_rows:diloco", every=EVERY),
            *parse_rows("acp:rank=4"),
        )
    ),
    "hivemind": Group(
        (
            *BASELINE,
            _peer("hivemind, local updates", "hivemind_rows:local_updates", every=2 * EVERY),
            *parse_rows("acp:rank=4"),
        ),
        every=2 * EVERY,
    ),
}

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

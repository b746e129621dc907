"""Progressive shrinking: all phases one after another; can be resumed at any step.

Differences from the published code: a draw depends only on (seed, phase, step, number); the loss of a batch without a
valid pixel is zero with a graph, so that no rank skips its backward; weights that a step did not use do not change
(``semantics="zero"`` changes them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.core.program import Method
from thinwire.engine.state import checkpoint
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.pairs import Pairs, Shuffled, collate
from thinwire.systems.supernet.stereo.phases import Phase
from thinwire.systems.supernet.stereo.step import SupernetStepReport, SupernetTrainer, adam

Progress = Callable[[Phase, int, SupernetStepReport], None]


@dataclass(frozen=True)
class PhaseReport:
    """What a phase did in this run.

    Attributes:
        name: of the phase. steps: of the phase. done: how many this run made (an earlier run made the others).
        seconds: of this run. loss: of the last step; None: this run made no step.
        bytes_sent, dense_bytes: sent by this rank, and what reducing everything would have sent.
        mean_share: active share of the gradient, mean over this run's steps.
    """

    name: str
    steps: int
    done: int
    seconds: float
    loss: float | None
    bytes_sent: int
    dense_bytes: int
    mean_share: float


@dataclass(frozen=True)
class ShrinkReport:
    """What ``shrink`` did, phase by phase."""

    phases: tuple[PhaseReport, ...]
    world_size: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def shrink(
    net: ElasticStereo,
    data: Pairs,
    phases: Sequence[Phase],
    *,
    batch: int = 4,
    method: Method | str = "active",
    sampling: str = "shared",
    divisor: str = "world",
    semantics: str = "skip",
    loss_over: str = "rank",
    seed: int = 0,
    overlap: bool = True,
    weight_decay: float = 1e-4,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 50,
    on_step: Progress | None = None,
) -> ShrinkReport:
    """Train all sub-networks of a network, on the ranks of the default process group if there is one.

    Each phase has its own optimizer, fusion plan and checkpoints. Run again with the same arguments, it continues from
    the newest checkpoint, bit for bit on the same number of ranks.

    Args:
        net: trained in place.
        data: training pairs; every rank can read all of them and uses its share of each step's.
        phases: ``published(...)``, ``short(...)`` or others, see :mod:`~thinwire.supernet.stereo.phases`.
        batch: pairs per rank and step.
        method, sampling, divisor, semantics, loss_over, seed, overlap: see
            :class:`~thinwire.supernet.stereo.step.SupernetTrainer`.
        weight_decay: L2 on weights, but not on BatchNorm or biases.
        checkpoint_dir: on a file system shared by all ranks; None: no checkpoints.
        checkpoint_every: steps between checkpoints; there is always one at the end of a phase.
        on_step: called after every step.

    Raises:
        ValueError: options or sizes do not match.
        ScheduleMismatch: the ranks were given different seeds, phases or spaces.
    """
    if batch < 1 or checkpoint_every < 1:
        raise ValueError(f"batch={batch} and checkpoint_every={checkpoint_every} must be at least 1")
    if len({phase.name for phase in phases}) != len(phases):
        raise ValueError("every phase needs its own name")
    for phase in phases:
        for number in range(phase.sub_nets):
            net.space.check(phase.draw(seed, 0, number))
    root = None if checkpoint_dir is None else Path(checkpoint_dir)
    folders = [None if root is None else root / f"{i}-{phase.name}" for i, phase in enumerate(phases)]
    begun = max((i for i, folder in enumerate(folders) if folder and checkpoint.complete(folder)), default=0)
    reports, world = [], 1
    for i, (phase, folder) in enumerate(zip(phases, folders)):
        if i < begun:
            reports.append(PhaseReport(phase.name, phase.steps, 0, 0.0, None, 0, 0, 0.0))
            continue
        if phase.sort:
            net.sort_channels()
        trainer = SupernetTrainer(
            net, phase, adam(net, phase.lr, weight_decay), method=method, sampling=sampling, divisor=divisor,
            semantics=semantics, loss_over=loss_over, seed=seed, overlap=overlap,
        )  # fmt: skip
        try:
            world = trainer.sync.services.topology.world_size
            order = Shuffled(len(data), seed + i)
            reports.append(_phase(trainer, data, order, batch, folder, checkpoint_every, on_step))
        finally:
            trainer.close()
    net.activate(net.space.largest)
    return ShrinkReport(tuple(reports), world)


def _phase(
    trainer: SupernetTrainer,
    data: Pairs,
    order: Shuffled,
    batch: int,
    folder: Path | None,
    every: int,
    on_step: Progress | None,
) -> PhaseReport:
    net, phase, sync = trainer.net, trainer.phase, trainer.sync
    first = 0
    if folder is not None:
        first = checkpoint.load(folder, net, trainer.optimizer, sync) or 0
        if first > phase.steps:
            raise ValueError(
                f"{folder} is from a run of {first} steps, but phase {phase.name} has {phase.steps}: give as many "
                "steps, or another checkpoint directory"
            )
    net.train()
    shares, last, started = 0.0, None, time.perf_counter()
    for step in range(first, phase.steps):
        chosen = order.indices(step, batch, sync.services.rank, sync.services.topology.world_size)
        last = trainer.step(collate(data, chosen), step)
        shares += last.share
        if on_step is not None:
            on_step(phase, step, last)
        if folder is not None and ((step + 1) % every == 0 or step + 1 == phase.steps):
            checkpoint.save(folder, net, trainer.optimizer, sync, step + 1)
    stats, done = sync.stats(), phase.steps - first
    return PhaseReport(
        phase.name, phase.steps, done, time.perf_counter() - started, None if last is None else last.loss,
        stats.bytes_sent, stats.dense_bytes, shares / done if done else 0.0,
    )  # fmt: skip

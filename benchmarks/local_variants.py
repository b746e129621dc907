"""Rows of whole runs for options of local steps that a row's text cannot hold: every 4 steps in 2 bits, and one more.

From this folder: ``python race.py --methods "ddp,local_variants:second_moments,local_variants:growing"``.
"""

from __future__ import annotations

from typing import Any

import thinwire as tw
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer


def second_moments(workload: Workload, group: Any, rounds: int = 3) -> Trainer:
    """Average Adam's second moments too, every so many rounds (DES-LOC)."""
    return _trainer(workload, group, sync_every=4, moments={"exp_avg_sq": rounds})


def growing(workload: Workload, group: Any, alpha: float = 0.008, most: int = 16) -> Trainer:
    """Periods that grow as the learning rate falls, from 4 steps on (QSR): to 16, once it is half of ``alpha / 2``."""
    return _trainer(workload, group, sync_every=tw.QSR(alpha, least=4, most=most))


def _trainer(workload: Workload, group: Any, **options: Any) -> Trainer:
    optimizer = workload.optimizer(workload.model)
    sync = tw.attach(
        workload.model, optimizer, "local", codec="int2", fragment_sync_delay=0, process_group=group, **options
    )
    return Trainer(workload.model, optimizer, sync.close, 4)  # type: ignore[arg-type]

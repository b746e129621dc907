"""DeAR: an all-reduce in two halves, one behind backward, one behind the next forward.

Paper: Zhang et al.: Decoupling the All-Reduce Primitive for Accelerating Distributed Deep Learning, ICDCS 2023,
arXiv 2302.12445.

An all-reduce is a reduce-scatter and an all-gather, at the same cost. A bucket's reduce-scatter runs while backward
goes on, its all-gather while the *next* forward does; its parameters are updated just before the first layer that
needs them. No byte is added. With forward f, backward b and exchange c seconds a step takes max(f, c/2) + max(b, c/2)
instead of f + max(b, c), but for the first and the last bucket.

Between ``backward()`` and ``step()`` the gradients are not there: clip with ``sync.clip_grad_norm_``. Between
``step()`` and the next forward parameters are not all up to date: forward, ``state_dict``, evaluation and checkpoints
see to that themselves; whatever else reads parameters (an average of weights, ``torch.save(model)``) calls
``sync.synchronize()``.

Differences from the paper and its public code: any ``torch.optim`` optimizer, with the hyper-parameters as they were at
``step()``; all all-gathers are issued in ``step()``, so that no rank waits for another's forward; modules called
twice, never, or by turns; shared weights; accumulation, loss scaling and clipping; the last update is not lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.methods.ssgd import SSGD


@dataclass(frozen=True)
class DeAR(SSGD):
    """Exact averaging on the decoupled schedule: ``SSGD(decoupled=True)`` by its published name.

    Args:
        fusion: MiB, "none", "single", "optimal", "tune", a ``Merge`` or "auto".
        check_finite: one small exchange at the end of backward, so that all ranks know of a non-finite gradient.
            Between CPUs that share no link only a ``GradScaler`` and ``find_unused_parameters=True`` wait for it;
            elsewhere False saves its latency where no ``GradScaler`` is in use.
        update_in_step: names of modules whose parameters are updated in ``optimizer.step()``, because something reads
            them without calling the module; True: all, for optimizers that look at all gradients together.
        poison_stale: parameters hold NaN until they are updated, so that a read of an old value shows (debugging).
        deterministic: sum in rank order: equal bits under any plan (on Gloo always).

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "dear"
    decoupled: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decoupled:
            raise ValueError("DeAR is the decoupled schedule; without it, use SSGD")

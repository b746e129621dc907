"""Ok-Topk: Top-k summed by region, so that the bytes do not grow with the number of workers.

Paper: Li, Hoefler: Near-optimal sparse allreduce for distributed deep learning, PPoPP 2022. The exchange is
:func:`~thinwire.methods.regions.by_region`: an all-to-all of pairs, and an all-gather of each region's largest sums.
Applied: the k largest of these, over P. E: all that is not among them, or found no room on the way.

Differences from the paper: messages have a fixed size (``capacity``), so that shapes, prices and buffers are known in
advance; regions are blocks dealt out at random, and not re-balanced from the data; selection is exact on every step
where the paper reuses thresholds for 32 steps; any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.methods.base import check_choice
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class OkTopk(TopK):
    """Send the largest entries, summed by region. Options: see :class:`~thinwire.methods.topk.TopK`."""

    name: ClassVar[str] = "oktopk"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"density": 0.01},)
    auto: ClassVar[tuple[int, Mapping[str, Any]] | None] = None

    exchange: str = "oktopk"

    def __post_init__(self) -> None:
        check_choice("exchange", self.exchange, ("oktopk",))
        super().__post_init__()

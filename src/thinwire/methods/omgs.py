"""OMGS-SGD: Top-k on merged buckets, so that selection, exchange and backward overlap best.

Paper: Shi et al.: Communication-efficient distributed deep learning with merged gradient sparsification on GPUs,
INFOCOM 2020. The program is that of :class:`~thinwire.methods.topk.TopK`; what is new is the plan.

Differences from the paper: the default plan is the exact optimum under the paper's own cost model, which its greedy
rule misses (``schedule="greedy"`` runs that, and decides on the pair of layers that backward yields first too, which
the authors' code never parts); costs are measured at start for any number of workers; a message is
values and indices together; selection runs beside backward where a core or a stream is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.methods.base import check_choice
from thinwire.methods.topk import TopK

_MERGES = {"optimal": "optimal", "greedy": "omgs", "none": "none", "single": "single"}


@dataclass(frozen=True)
class OMGS(TopK):
    """Send the largest entries of well-chosen buckets. Further options: see :class:`~thinwire.methods.topk.TopK`.

    Args:
        density: share of the elements that is sent, in (0, 1].
        schedule: "optimal", "greedy" (the published rule), "none" (layer-wise) or "single"; decides ``merge``.
    """

    name: ClassVar[str] = "omgs"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # as topk, where nothing is measured
    auto: ClassVar[tuple[int, Mapping[str, Any]] | None] = None
    unfit: ClassVar[Mapping[str, str]] = {"fsdp2": "a plan of its own"}

    schedule: str = "optimal"

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, tuple(_MERGES))
        object.__setattr__(self, "merge", _MERGES[self.schedule])
        super().__post_init__()

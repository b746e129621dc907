"""1-bit SGD: one bit per element and two values per tensor, the means of either side of zero, with error feedback.

Paper: Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs, Interspeech 2014. The program is that of :class:`~thinwire.methods.sign.SignSGD` with ``levels=2``.

Differences from the paper: the two values are per tensor, not per column of a matrix; messages are gathered, not
summed and quantised a second time by an owner; E does not contain the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.methods.base import check_choice
from thinwire.methods.sign import SignSGD


@dataclass(frozen=True)
class OneBit(SignSGD):
    """Send signs, and the mean of either side. Options as :class:`~thinwire.methods.sign.SignSGD`."""

    name: ClassVar[str] = "onebit"
    auto: ClassVar[tuple[int, Mapping[str, Any]] | None] = None

    levels: int = 2

    def __post_init__(self) -> None:
        check_choice("levels", self.levels, (2,))
        super().__post_init__()

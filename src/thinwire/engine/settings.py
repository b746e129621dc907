"""The options of ``attach`` that are not the method's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from thinwire.engine.parameters import DenseRule
from thinwire.program import Method, Plan


@dataclass(frozen=True)
class Settings:
    """The options of ``attach`` that are not the method's.

    Attributes:
        named: the method in whose stead S-SGD runs on a single rank, and whose state is kept; None: the one that runs.
    """

    start_compression_step: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    pinned: Plan | None = None
    timeout: timedelta | None = None
    check_order: bool = False
    note: str = ""
    dense: DenseRule = "auto"
    named: Method | None = None

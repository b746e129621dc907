"""The rows of a comparison: parses ``ddp,ddp-best,acp:rank=4``. Plain data; nothing is built here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.tools.bench.words import Value, load_function, nearest, split_options

if TYPE_CHECKING:
    from thinwire.core.program import Method

COMPUTE, ALONE = "compute", "alone"
EVERY = 8  # steps that "accumulate" adds up, if no number is named
BEST_BUCKETS_MB = (1, 4, 25, 100)
TORCH_ROWS: dict[str, tuple[str, ...]] = {
    COMPUTE: (),
    ALONE: (),
    "accumulate": ("every",),
    "ddp": ("bucket",),
    "ddp-best": ("buckets",),
    "ddp-fp16": (),
    "torch-powersgd": ("rank",),
}


@dataclass(frozen=True)
class Row:
    """One way to train: a kind of ``TORCH_ROWS``, a thinwire method, or a user's ``module:function`` (trainer.py).

    Of the rows of one ``family`` the table shows the fastest. ``plan``: JSON of a Plan to pin, or of options of local
    steps that a link has led to; "" for the method's own.
    """

    label: str
    kind: str
    options: dict[str, Value] = field(default_factory=dict)
    family: str = ""
    plan: str = ""

    @property
    def of_method(self) -> dict[str, Value]:
        """The options that are the method's own."""
        return without_look(self.pinned)

    @property
    def pinned(self) -> dict[str, Value]:
        """The options, and for local steps those that a link has led to in place of "auto"."""
        from thinwire.engine.local.settings import PRESETS

        return self.options | json.loads(self.plan) if self.plan and self.kind in PRESETS else self.options

    @property
    def own_pace(self) -> bool:
        return self.options.get("pace") == "own"

    @property
    def is_thinwire(self) -> bool:
        return self.kind not in TORCH_ROWS and not self.is_custom

    @property
    def is_custom(self) -> bool:
        return ":" in self.kind


def without_look(options: Mapping[str, Value]) -> dict[str, Value]:
    return {key: given for key, given in options.items() if key != "look"}


def parse_rows(text: str) -> tuple[Row, ...]:
    """Read ``--methods``. ``thinwire acp`` and ``acp`` are the same."""
    rows: list[Row] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        rows += _parse_one(part)
    labels = [row.label for row in rows]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"method {label!r} is given twice")
    if not rows:
        raise ValueError("no methods given; for example --methods ddp,ssgd,acp:rank=4")
    return tuple(rows)


def priced(row: Row) -> Method | None:
    """Return a row as the planner prices it; None: it has no price."""
    from thinwire.engine.local.settings import named_method
    from thinwire.predict.timeline.local_steps import Accumulated, OneWorker, Periodic

    if row.kind == ALONE:
        return OneWorker()
    if row.kind == "accumulate":
        return Periodic(Accumulated(), int(row.options.get("every", EVERY)), 0)
    return named_method(row.kind, row.pinned) if row.is_thinwire and row.kind != "auto" else None


def _parse_one(text: str) -> list[Row]:
    name, options = split_options(text.removeprefix("thinwire "))
    if name in TORCH_ROWS:
        for key, given in options.items():
            if key not in TORCH_ROWS[name]:
                known = ", ".join(TORCH_ROWS[name]) or "none"
                raise ValueError(f"{name!r} has no option {key!r}; known: {known}")
            if key == "rank" and not (type(given) is int and given >= 1):
                raise ValueError(f"{name}: rank={given!r} must be a whole number of at least 1")
            if key == "every" and not (type(given) is int and given >= 2):
                raise ValueError(f"{name}: every={given!r} must be a whole number of at least 2")
            if key == "bucket" and not _is_size(given):
                raise ValueError(f"{name}: bucket={given!r} must be a size in MB, such as 25")
        if name == "ddp-best":
            return _variants(options)
    elif ":" in name and not _is_method(name.partition(":")[0]):
        load_function(name, "row")
    else:
        _check_method(name, options)
    return [Row(_label(name, options), name, options)]


def _label(name: str, options: dict[str, Value]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _variants(options: dict[str, Value]) -> list[Row]:
    given = str(options.get("buckets", "/".join(map(str, BEST_BUCKETS_MB))))
    try:
        sizes = [float(size) for size in given.split("/")]
    except ValueError:
        sizes = []
    if not sizes or not all(map(_is_size, sizes)):
        raise ValueError(f"ddp-best: buckets={given!r} must be sizes in MB, such as 1/4/25/100")
    return [Row(f"ddp-best ({size:g} MB)", "ddp", {"bucket": size}, family="ddp-best") for size in sizes]


def _is_size(megabytes: Value) -> bool:
    return type(megabytes) in (int, float) and 0 < float(megabytes) < math.inf


def _is_method(name: str) -> bool:
    from thinwire.core.methods.registry import METHODS
    from thinwire.engine.local.settings import PRESETS

    return name == "auto" or name in METHODS or name in PRESETS


def _check_method(name: str, options: dict[str, Value]) -> None:
    from thinwire.core.methods.registry import METHODS, method
    from thinwire.engine.local.settings import PRESETS, named_local
    from thinwire.engine.look import as_look

    if not _is_method(name.lower()):
        raise ValueError(f"unknown method {name!r}; {nearest(name.lower(), (*TORCH_ROWS, *METHODS, *PRESETS, 'auto'))}")
    if named_local(name, options) is not None:
        return
    if name == "auto":
        if set(options) - {"lossy"} or not isinstance(options.get("lossy", True), bool):
            raise ValueError("'auto' has only the option lossy=true: it chooses the others itself")
        return
    try:
        as_look(options.get("look"))
        method(name, **without_look(options))
    except TypeError as error:
        raise ValueError(f"method {name!r}: {error}") from error

"""The names of the methods, and one function that turns a name and options into a method.

A name stands for a class, or for a class under options that a paper fixes (a :class:`Preset`). Only this table refers
to methods by name; everything else the methods declare themselves (:class:`~thinwire.program.Method`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from thinwire.core.checks import meant

if TYPE_CHECKING:
    from thinwire.core.program import Method


@dataclasses.dataclass(frozen=True, eq=False)
class Preset:
    """A published method: its ``home`` with ``fixed`` options, others by ``default``, and class attributes."""

    name: str
    home: str
    does: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    declares: Mapping[str, Any] = dataclasses.field(default_factory=dict)


METHODS: dict[str, str | Preset] = {
    "ssgd": "thinwire.core.methods.ssgd:SSGD",
    "cast": "thinwire.core.methods.cast:Cast",
    "signsgd": "thinwire.core.methods.sign:SignSGD",
    "onebit": Preset(
        "OneBit",
        "thinwire.core.methods.sign:SignSGD",
        "Send signs, and the mean of either side of zero",
        fixed={"levels": 2},
        declares={"auto": None},
    ),
    "qsgd": "thinwire.core.methods.qsgd:QSGD",
    "terngrad": "thinwire.core.methods.terngrad:TernGrad",
    "topk": "thinwire.core.methods.topk:TopK",
    "gtopk": Preset(
        "GTopK",
        "thinwire.core.methods.topk:TopK",
        "Send the largest entries, merged pair by pair",
        fixed={"exchange": "gtopk"},
        declares={"auto": None, "candidates": ({"density": 0.01},)},
    ),
    "oktopk": Preset(
        "OkTopk",
        "thinwire.core.methods.topk:TopK",
        "Send the largest entries, summed by region",
        fixed={"exchange": "oktopk"},
        declares={"auto": None, "candidates": ({"density": 0.01},)},
    ),
    "dgc": "thinwire.core.methods.dgc:DGC",
    "powersgd": "thinwire.core.methods.powersgd:PowerSGD",
    "acp": "thinwire.core.methods.acp:ACP",
    "dear": Preset(
        "DeAR",
        "thinwire.core.methods.ssgd:SSGD",
        "Exact averaging on the decoupled schedule",
        fixed={"decoupled": True},
    ),
    "hitopk": "thinwire.core.methods.hitopk:HiTopK",
    "omgs": Preset(
        "OMGS",
        "thinwire.core.methods.topk:TopK",
        "Send the largest entries of buckets that are planned from measured times",
        default={"fusion": "optimal"},
        declares={"auto": None, "candidates": (), "unfit": {"fsdp2": "its own plan"}},
    ),
    "lags": "thinwire.core.methods.lags:LAGS",
}


def class_of(name: str) -> type[Method]:
    row = METHODS[name]
    return _subclass(row, name) if isinstance(row, Preset) else _load(row)


def public() -> dict[str, str]:
    """Return the registered names by the names of their classes, which are also names in ``thinwire``."""
    return {row.name if isinstance(row, Preset) else row.partition(":")[2]: name for name, row in METHODS.items()}


def classes() -> dict[str, type[Method]]:
    return {name: class_of(name) for name in METHODS}


def needed(cls: type[Method]) -> list[str]:
    missing = dataclasses.MISSING
    return [name for name, field in _fields(cls).items() if field.default is field.default_factory is missing]


def label_of(name: str, options: Mapping[str, Any]) -> str:
    """Return name and options as the command line writes them: "acp:rank=4"."""
    return ":".join((name, *(f"{option}={value}" for option, value in options.items())))


def candidates() -> list[tuple[str, dict[str, Any]]]:
    """Return (name, options) of what ``thinwire plan`` prices if no method is named, as the methods declare it."""
    found = [(name, cls, dict(options)) for name, cls in classes().items() for options in cls.candidates]
    return [(name, options) for name, cls, options in found if set(needed(cls)) <= set(options)]


def lossy_candidates() -> list[tuple[str, dict[str, Any]]]:
    """Return (name, options) of what ``attach("auto", lossy=True)`` prices, in that order."""
    found = [(*cls.auto, name) for name, cls in classes().items() if cls.auto is not None]
    found.sort(key=lambda entry: entry[0])
    return [(name, dict(options)) for _, several, name in found for options in several]


def method(name: str, **options: Any) -> Method:
    """Return the method of a name, for example ``method("acp", rank=8)``.

    Raises:
        ValueError: the name or an option is unknown, missing or out of range.
        TypeError: ``decoupled=`` for a method that cannot be decoupled.
    """
    if not isinstance(name, str) or name.lower() not in METHODS:
        raise ValueError(unknown("method", name, METHODS))
    cls = class_of(name.lower())
    fields = _fields(cls)
    for option in options:
        if option == "decoupled" and option not in fields:
            raise TypeError(
                f"{name.lower()} cannot be decoupled: its messages cannot be summed in parts, or a second exchange "
                f"depends on the sum; {_listed([name for name in METHODS if _can_be_decoupled(name)])} can"
            )
        if option not in fields:
            raise ValueError(unknown(f"option of {name.lower()}", option, fields))
    for option in needed(cls):
        if option not in options:
            raise ValueError(f"method {name.lower()!r} needs {option}=...")
    return cls(**options)


def resolve(method_or_name: Method | str, **options: Any) -> Method:
    """Return a method as it is, or made from its name; an instance has options of its own, so others are refused."""
    from thinwire.core.program import Method  # here, so that the table can be read without torch

    if isinstance(method_or_name, Method):
        if options:
            raise ValueError(
                f"{type(method_or_name).__name__}(...) carries its own options: move {', '.join(options)} into it"
            )
        return method_or_name
    return method(method_or_name, **options)


def _load(home: str) -> type[Method]:
    module, attribute = home.split(":")
    cls: type[Method] = getattr(importlib.import_module(module), attribute)
    return cls


@cache
def _subclass(row: Preset, name: str) -> type[Method]:
    base = _load(row.home)
    kinds = _fields(base)

    def check(self: Any) -> None:
        for option, value in row.fixed.items():
            if (given := getattr(self, option)) != value:
                raise ValueError(
                    f"{row.name} is {base.__name__} with {option}={value!r}: for {option}={given!r} use {base.__name__}"
                )
        base.__post_init__(self)  # type: ignore[attr-defined]

    options = {**row.fixed, **row.default}
    changed = [
        (option, kinds[option].type, dataclasses.field(default=value, kw_only=kinds[option].kw_only))
        for option, value in options.items()
    ]
    said = ", ".join(f"{option}={value!r}" for option, value in options.items())
    about = f"{row.does}: :class:`~{base.__module__}.{base.__name__}` with ``{said}``, whose options it has."
    namespace = {"__doc__": about, "__post_init__": check, "name": name, **row.declares}
    cls: type[Method] = dataclasses.make_dataclass(row.name, changed, bases=(base,), namespace=namespace, frozen=True)
    cls.__module__ = "thinwire"
    return cls


def _fields(cls: type[Method]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _can_be_decoupled(name: str) -> bool:
    field = _fields(class_of(name)).get("decoupled")
    return field is not None and field.default is False


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    known = list(known)
    return f"unknown {what}: {given!r}; {meant(given, known)}known: {', '.join(known)}"

"""The names of the methods, and one function that turns a name and options into a method."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from thinwire.program import Method

METHODS = {
    "ssgd": "thinwire.methods.ssgd:SSGD",
    "cast": "thinwire.methods.cast:Cast",
    "signsgd": "thinwire.methods.sign:SignSGD",
    "onebit": "thinwire.methods.onebit:OneBit",
    "qsgd": "thinwire.methods.qsgd:QSGD",
    "terngrad": "thinwire.methods.terngrad:TernGrad",
    "topk": "thinwire.methods.topk:TopK",
    "gtopk": "thinwire.methods.gtopk:GTopK",
    "oktopk": "thinwire.methods.oktopk:OkTopk",
    "dgc": "thinwire.methods.dgc:DGC",
    "powersgd": "thinwire.methods.powersgd:PowerSGD",
    "acp": "thinwire.methods.acp:ACP",
    "dear": "thinwire.methods.dear:DeAR",
    "hitopk": "thinwire.methods.hitopk:HiTopK",
    "omgs": "thinwire.methods.omgs:OMGS",
    "lags": "thinwire.methods.lags:LAGS",
}


def class_of(name: str) -> type[Method]:
    """The class of a registered name."""
    module, attribute = METHODS[name].split(":")
    cls: type[Method] = getattr(importlib.import_module(module), attribute)
    return cls


def classes() -> dict[str, type[Method]]:
    """All registered classes by name: for what is asked of every method."""
    return {name: class_of(name) for name in METHODS}


def needed(cls: type[Method]) -> list[str]:
    """The options that have to be given."""
    missing = dataclasses.MISSING
    return [name for name, field in _fields(cls).items() if field.default is field.default_factory is missing]


def candidates() -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of what ``thinwire plan`` prices when no method is named, as the methods declare it."""
    found = [(name, cls, dict(options)) for name, cls in classes().items() for options in cls.candidates]
    return [(name, options) for name, cls, options in found if set(needed(cls)) <= set(options)]


def lossy_candidates() -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of what ``attach("auto", lossy=True)`` prices, in the order in which it does."""
    found = [(cls.auto[0], name, dict(cls.auto[1])) for name, cls in classes().items() if cls.auto is not None]
    return [(name, options) for _, name, options in sorted(found, key=lambda entry: entry[0])]


def method(name: str, **options: Any) -> Method:
    """The method of a name, for example ``method("acp", rank=8)``.

    Raises:
        ValueError: the name or an option is unknown, missing or out of range.
        TypeError: ``decoupled=`` for a method that cannot be.
    """
    if not isinstance(name, str) or name.lower() not in METHODS:
        raise ValueError(_unknown("method", name, METHODS))
    cls = class_of(name.lower())
    fields = _fields(cls)
    for option in options:
        if option == "decoupled" and option not in fields:
            raise TypeError(
                f"{name.lower()} cannot be decoupled: its messages cannot be summed in parts, or a second exchange "
                f"depends on the sum; {_listed([name for name in METHODS if _can_be_decoupled(name)])} can"
            )
        if option not in fields:
            raise ValueError(_unknown(f"option of {name.lower()}", option, fields))
    for option in needed(cls):
        if option not in options:
            raise ValueError(f"method {name.lower()!r} needs {option}=...")
    return cls(**options)


def resolve(method_or_name: Method | str, **options: Any) -> Method:
    """A method as it is, or made from its name.

    Raises:
        ValueError: as ``method``; or options beside an instance, which carries its own.
    """
    if isinstance(method_or_name, Method):
        if options:
            raise ValueError(
                f"{type(method_or_name).__name__}(...) carries its own options: move {', '.join(options)} into it"
            )
        return method_or_name
    return method(method_or_name, **options)


def _fields(cls: type[Method]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _can_be_decoupled(name: str) -> bool:
    field = _fields(class_of(name)).get("decoupled")
    return field is not None and field.default is False


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _unknown(what: str, given: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what}: {given!r}{hint} There is {', '.join(known)}."

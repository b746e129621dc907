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


def method(name: str, **options: Any) -> Method:
    """The method of a name, for example ``method("acp", rank=8)``.

    Raises:
        ValueError: the name or an option is unknown, missing or out of range.
        TypeError: ``decoupled=`` for a method that cannot be.
    """
    if not isinstance(name, str) or name.lower() not in METHODS:
        raise ValueError(_unknown("method", name, METHODS))
    module, attribute = METHODS[name.lower()].split(":")
    cls = getattr(importlib.import_module(module), attribute)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for option in options:
        if option == "decoupled" and option not in fields:
            raise TypeError(
                f"{name.lower()} cannot be decoupled: its messages cannot be summed in parts, or a second exchange "
                "depends on the sum; ssgd, cast and acp can"
            )
        if option not in fields:
            raise ValueError(_unknown(f"option of {name.lower()}", option, fields))
    for field in fields.values():
        if field.default is dataclasses.MISSING and field.name not in options:
            raise ValueError(f"method {name.lower()!r} needs {field.name}=...")
    made: Method = cls(**options)
    return made


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


def _unknown(what: str, given: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what}: {given!r}{hint} There is {', '.join(known)}."

"""Dataclasses as JSON and back: every field by its name, read strictly by the fields' types."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
"""What reading a text as JSON, and what it should contain, may raise."""
_Made = TypeVar("_Made")
_Record = TypeVar("_Record", bound="Record")


class Record:
    """A dataclass that is kept as JSON; ``called`` completes the error "this is not ...", as "a thinwire plan".

    ``alone`` False: the text may hold other fields beside its own, which are not read.
    """

    called: ClassVar[str]
    alone: ClassVar[bool] = True

    def to_json(self) -> str:
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls: type[_Record], text: str | bytes) -> _Record:
        """Read what :meth:`to_json` wrote; ``ValueError`` for any other text."""
        try:
            return cls.from_data(json.loads(text))
        except UNREADABLE as error:
            raise ValueError(f"this is not {cls.called}: {error}") from error

    @classmethod
    def from_data(cls: type[_Record], data: Any) -> _Record:
        """Read JSON's content; one of the errors in ``UNREADABLE`` if something else is in it."""
        if not cls.alone and isinstance(data, Mapping):
            own = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
            data = {name: value for name, value in data.items() if name in own}
        return made(cls, data)

    @property
    def hash(self) -> str:
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()


def plain(value: Any) -> Any:
    """Return a dataclass, and what it contains, as values that JSON can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, (str, int)) for key in value):
            return {str(key): plain(one) for key, one in value.items()}
        return [[plain(key), plain(one)] for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if type(value).__module__ == "torch" else value  # a dtype


def made(kind: type[_Made], value: Any) -> _Made:
    """Return the ``kind`` that :func:`plain` wrote; of a union, the first member that can be read from it."""
    found: Any = _made(kind, value)
    return found  # type: ignore[no-any-return]


def _made(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value)
    if origin in (Union, types.UnionType):
        return _first(inner, value)
    if origin is Literal:
        return value if value in inner else _refuse(value, f"one of {', '.join(map(repr, inner))}")
    if origin is tuple:
        each = [inner[0]] * len(_listed(value)) if inner[1:] == (...,) else inner
        if len(each) != len(_listed(value)):
            _refuse(value, f"a list of {len(each)}")
        return tuple(_made(one, v) for one, v in zip(each, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(inner[0], inner[1], value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_made(inner[0], one) for one in _listed(value)]
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if getattr(kind, "__module__", "") == "torch":
        import torch

        found = getattr(torch, str(value).removeprefix("torch."), None)
        return found if isinstance(found, kind) else _refuse(value, f"a {kind.__name__}")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is None or kind is type(None):
        return value if value is None else _refuse(value, "null")
    return value if type(value) is kind else _refuse(value, f"a {getattr(kind, '__name__', kind)}")


def _dataclass(kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        _refuse(value, f"the fields of a {kind.__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    hints, found = get_type_hints(kind), {}
    for name, field in fields.items():
        if name in value:
            try:
                found[name] = _made(hints[name], value[name])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{name}: {error}") from error
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"the field {name} is missing")
    return kind(**found)


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    errors = []
    for kind in kinds:
        try:
            return _made(kind, value)
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    raise ValueError(errors[0])


def _mapping(key: Any, kind: Any, value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        pairs = [(int(name) if key is int else name, one) for name, one in value.items()]
    else:
        pairs = [(_made(key, name), one) for name, one in _listed(value)]
    return {name: _made(kind, one) for name, one in pairs}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _refuse(value, "a list")


def _refuse(value: Any, wanted: str) -> Any:
    shown = repr(value)
    raise ValueError(f"{shown[:60]}{'...' * (len(shown) > 60)} is not {wanted}")

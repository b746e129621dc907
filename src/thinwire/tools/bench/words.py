"""What users write: ``name:option=value:option=value``, and functions of their own as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import thinwire
from thinwire.core.checks import meant

PACKAGE = Path(thinwire.__file__).resolve().parent
_NOT_THE_USERS = (str(PACKAGE), "<", *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
Value = bool | int | float | str
WITHOUT_A_METHOD = {
    "alone": ("one worker alone", "train on one machine; nothing has to be attached"),
    "accumulate": ("DDP that accumulates", "keep DDP, with every backward() but the last before a step in no_sync()"),
}
"""By the kind of a row: what to use, and what to do next."""


def value(text: str) -> Value:
    """Parse an option's value: a bool, an int, a finite float, or else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float) if text.isascii() else ():
        try:
            if math.isfinite(number := kind(text)):
                return number
        except (ValueError, OverflowError):
            continue
    return text


def split_options(text: str) -> tuple[str, dict[str, Value]]:
    """Parse ``"acp:rank=4"`` as ``("acp", {"rank": 4})``; parts without ``=`` belong to the name."""
    name, *parts = text.strip().split(":")
    options, key = dict[str, Value](), ""
    for part in parts:
        if "=" not in part and not options:
            name += f":{part}"
            continue
        if part.isdigit() and isinstance(before := options.get(key, 0), str):  # collective=threshold:4
            options[key] = f"{before}:{part}"
            continue
        key, found, given = (text.strip() for text in part.partition("="))
        if not found or not key or not given:
            raise ValueError(f"{text!r}: {part!r} is not an option; use name:option=value, such as acp:rank=4")
        if key in options:
            raise ValueError(f"{text!r} names {key} twice")
        options[key] = value(given)
    return name.strip(), options


def arguments(name: str, options: Mapping[str, Value]) -> str:
    return ", ".join([f'"{name}"', *(f"{key}={given!r}" for key, given in options.items())])


def attach_line(name: str, options: Mapping[str, Value]) -> str:
    return f"sync = tw.attach(model, optimizer, {arguments(name, options)})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known name, and all of them."""
    known = sorted(known)
    return f"{meant(name, known)}known: {', '.join(known)}"


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Import ``module:function``; ``what`` names its role in error messages, such as ``"model"``."""
    module_name, _, function_name = name.partition(":")
    check_module(module_name, what)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with as_guest(module_name):
            function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name!r} cannot be loaded: {error}") from error
    except Exception as error:
        raise ValueError(f"{what} {name!r} cannot be loaded: {in_words(error)}") from error
    if not callable(function):
        raise ValueError(f"{what} {name!r} is not a function")
    return function


def check_module(name: str, what: str) -> None:
    """Raise ``ValueError`` for a file in place of the name of a module."""
    if name.endswith(".py") or "/" in name:
        stem = Path(name).stem
        raise ValueError(
            f"{what} {name!r} is a file: write {stem}:build for its function build, from the file's folder"
        )


@contextmanager
def as_guest(name: str) -> Iterator[None]:
    """Run user code as if started alone: ``argparse`` sees no arguments, what is printed goes to stderr."""
    arguments = sys.argv
    sys.argv = [name]
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as end:
        raise RuntimeError(f"it called sys.exit({end.code!r})").with_traceback(end.__traceback__) from end
    finally:
        sys.argv = arguments


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn an exception in user code into a one-sentence ``ValueError`` with its place; ``what`` names what failed."""
    try:
        with as_guest(what):
            yield
    except Exception as error:
        raise ValueError(f"{what} failed: {in_words(error)}") from error


def in_words(error: Exception) -> str:
    """Return ``file, line: Type: message``; the place is the innermost frame outside thinwire and libraries."""
    own = _own_frames(error)
    place: tuple[str, int | None] | None = (own[-1].filename, own[-1].lineno) if own else None
    words = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        place, words = (error.filename, error.lineno), error.msg
    at = f"{os.path.relpath(place[0])}, line {place[1]}: " if place else ""
    lines = words.strip().splitlines()
    return f"{at}{type(error).__name__}" + (f": {lines[0]}" if lines else "")


def is_users(error: Exception) -> bool:
    return bool(_own_frames(error))


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]


def check_options(label: str, function: Callable[..., Any], options: Mapping[str, Any], *, ours: bool) -> None:
    """Raise ``ValueError`` for an option that a function does not accept; of ``ours``, also for a wrong value."""
    accepted = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return
    for key, value in options.items():
        if key not in accepted:
            raise ValueError(f"{label} has no option {key!r}; {nearest(key, accepted)}")
        if ours and (wanted := _wanted(accepted[key].default, value)):
            raise ValueError(f"{label}: {key}={value!r} must be {wanted}")


def _wanted(default: Any, value: Any) -> str | None:
    """Return what is expected in place of ``value``, given the default; None if the value is valid."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        least = min(default, 1)
        good = number and isinstance(value, int) and value >= least
        return None if good else f"a whole number of at least {least}"
    if isinstance(default, float):
        return None if number and math.isfinite(value) and value > 0 else "a number above 0"
    return None

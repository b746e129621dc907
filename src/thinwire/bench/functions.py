"""``module:function`` of the user's own, found from the current directory too."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Import ``module:function``; ``what`` says in errors what it was meant to be, such as ``"model"``.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ValueError(f"{what} {name!r} is not a function")
    return function
